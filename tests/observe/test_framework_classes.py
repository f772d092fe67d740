"""The callbacks that are given to frameworks, with a stand-in for each framework: what they do with strange values.

With the real packages: tests/extras.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from threading import get_ident
from types import SimpleNamespace
from typing import Any

import pytest

from ndd_watch import frameworks
from ndd_watch.clock import BASE, EVALUATE, OTHER, TRAINER, S
from ndd_watch.frameworks import Wishes, hugging_face, lightning
from ndd_watch.install import Observer

WISHES = Wishes()


class Base:
    """A framework's class of callbacks."""


Told = list[tuple[str, dict[str, Any]]]


def made(make: Any) -> tuple[Any, Told]:
    told: Told = []
    return make(Base, lambda kind, **body: told.append((kind, body)), known, WISHES)(), told


def known(found: dict[str, Any], then: Callable[[dict[str, float]], None]) -> None:
    """All values are at hand."""
    then(frameworks.numbers(found))


@pytest.mark.parametrize("make", [hugging_face, lightning])
def test_no_hook_raises_or_returns_anything(make: Any) -> None:
    # As if it were a defect in the observer's own file; an error of the script would go on.
    names: dict[str, Any] = {}
    planted = "def raises(kind, **body): raise RuntimeError('planted')\ndef known(found, then): then(found)"
    exec(compile(planted, str(frameworks.__file__), "exec"), names)
    for callback in (make(Base, names["raises"], names["known"], WISHES)(), made(make)[0]):
        hooks = [name for name in dir(callback) if name.startswith("on_")]
        assert len(hooks) >= 4
        for name in hooks:
            assert getattr(callback, name)(None, None, None) is None
            assert getattr(callback, name)(object(), object()) is None


def test_numbers_of_hugging_face() -> None:
    callback, told = made(hugging_face)
    args = SimpleNamespace(metric_for_best_model="accuracy", greater_is_better=True)
    state = SimpleNamespace(global_step=7, max_steps=50, num_train_epochs=sys.maxsize, epoch=1.7)
    callback.on_train_begin(args, state, None)
    callback.on_epoch_begin(args, state, None)
    callback.on_log(
        args, state, None, logs={"loss": 2, "epoch": 1.7, "grad_norm": float("nan"), "text": "no"}
    )
    metrics = {"eval_loss": 1.0, "eval_runtime": 2.0, "eval_samples_per_second": 5.0, "eval_accuracy": 0.5}
    callback.on_evaluate(args, state, None, metrics={**metrics, "epoch": 2})
    assert [kind for kind, _ in told] == ["totals", "epoch", "scalars", "evaluated", "evaluation"]
    totals, epoch, scalars, _, evaluation = (body for _, body in told)
    assert totals == {
        "framework": "transformers", "earlier": 7, "total_steps": 50, "epochs": 0, "obeys": ["checkpoint"],
    }  # fmt: skip
    assert (epoch, scalars) == ({"epoch": 1}, {"values": {"loss": 2.0}})
    assert (evaluation["seconds"], evaluation["lower"]) == (2.0, False)
    # The metric that chooses the best model is the first.
    assert list(evaluation["metrics"].items()) == [("eval_accuracy", 0.5), ("eval_loss", 1.0)]


def test_metrics_of_a_validation_of_lightning() -> None:
    callback, told = made(lightning)
    trainer = SimpleNamespace(
        sanity_checking=False, callback_metrics={"loss": 3.0, "size": 1.0},
        checkpoint_callback=SimpleNamespace(monitor="score", mode="max"),
    )  # fmt: skip
    callback.on_validation_start(trainer, None)
    trainer.callback_metrics |= {"size": 2.5, "score": 0.25}
    callback.on_validation_end(trainer, None)
    over, told_metrics, _ = told
    assert over == ("evaluated", {})
    assert told_metrics == ("evaluation", {"lower": False, "metrics": {"score": 0.25, "size": 2.5}})
    assert list(told_metrics[1]["metrics"]) == ["score", "size"]
    trainer.sanity_checking = True
    callback.on_validation_end(trainer, None)
    assert [kind for kind, _ in told[3:]] == ["evaluated"]


def test_what_follows_an_evaluation_of_a_framework_is_no_part_of_it() -> None:
    ended: list[bool] = []
    observer: Any = SimpleNamespace(modules=SimpleNamespace(evaluation=ended.append))
    before = S[TRAINER], S[BASE]
    try:
        for S[TRAINER], S[BASE] in (
            (get_ident(), EVALUATE),
            (get_ident(), OTHER),
            (get_ident() + 1, EVALUATE),
        ):
            Observer.note(observer, "evaluated")
    finally:
        S[TRAINER], S[BASE] = before
    assert ended == [False]


@pytest.mark.parametrize(("strategy", "evaluates"), [("epoch", True), ("no", False)])
def test_the_trainer_saves_and_evaluates_on_request(strategy: str, evaluates: bool) -> None:
    callback, told = made(hugging_face)
    state, control = SimpleNamespace(global_step=7), SimpleNamespace(should_save=False, should_evaluate=False)
    WISHES.saves = WISHES.evaluates = True
    callback.obey(SimpleNamespace(eval_strategy=strategy), state, control)
    # Without a strategy there may be no data, and an evaluation would end the training.
    assert (control.should_save, control.should_evaluate) == (True, evaluates)
    assert not WISHES and len(told) == 1 + evaluates


@pytest.mark.parametrize("fails", [False, True])
def test_lightning_saves_a_checkpoint_at_the_end_of_a_step(fails: bool) -> None:
    callback, told = made(lightning)
    saved: list[str] = []

    def save(path: str) -> None:
        if fails:
            raise OSError("No space left on device")
        saved.append(path)

    micro = [True, False]
    trainer = SimpleNamespace(
        fit_loop=SimpleNamespace(_should_accumulate=lambda: micro.pop(0)), global_step=7, save_checkpoint=save,
        checkpoint_callback=SimpleNamespace(dirpath="here"), default_root_dir="there",
    )  # fmt: skip
    WISHES.saves = True
    callback.obey(trainer)
    assert WISHES and not told
    callback.obey(trainer)
    assert saved == ["here/requested-step=7.ckpt"] * (not fails) and not WISHES
    assert [kind for kind, _ in told] == ["warning" if fails else "note"]
