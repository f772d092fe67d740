"""Callbacks, own scalars, samples, early stopping and the best checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.states import equal
from train_help import EVERY_STEP, Result, Trainer

from ndd_engine.record.events import ScalarsEvent, TextsEvent
from ndd_engine.train.callbacks import Monitor

SOURCE = """
import torch
from pathlib import Path
from torch import nn
from torch.utils.data import TensorDataset

NOTES = Path(__file__).with_suffix(".txt")

def note(*words):
    with NOTES.open("a") as file:
        print(*words, file=file)

def loss(output, batch):
    return nn.functional.mse_loss(output, batch[1])

class Scores:
    scores = iter([])
    def update(self, output, batch, loss):
        pass
    def result(self):
        return {"score": next(self.scores, 0.0), "other": 1.0}

def parts(**more):
    draw = torch.Generator().manual_seed(3)
    x = torch.rand(40, 4, generator=draw)
    model = nn.Linear(4, 1)
    return dict(model=model, train_data=TensorDataset(x, x.sum(1, keepdim=True)), loss=loss, **more)
"""
SETS = (
    "batch.micro=4",
    "run.threads=1",
    "run.max_steps=9",
    "evaluate.every_epochs=0",
    "checkpoint.every_epochs=0",
)
Make = Callable[[str], tuple[str, ...]]


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Make:
    """own(source) writes a module and returns the settings of a run with its factory."""
    monkeypatch.setattr(sys, "path", [*sys.path])

    def sets(source: str) -> tuple[str, ...]:
        name = f"own_callbacks_{abs(hash(request.node.nodeid))}"
        (tmp_path / f"{name}.py").write_text(SOURCE + source)
        sys.modules.pop(name, None)
        return (f"workload.name={name}:factory", f'workload.path=["{tmp_path}"]', *SETS, *EVERY_STEP)

    return sets


def notes(folder: Path) -> list[str]:
    return next(folder.glob("own_callbacks_*.txt")).read_text().splitlines()


def reason(result: Result) -> str:
    assert result.end is not None
    return result.end.reason


CALLED = """
def on_step(train):
    note("step", train.step, train.loss.numel(), round(train.lr, 4))
    train.log("norm", train.model.weight.norm())
    train.log("norm", 0.0)

def on_checkpoint(path, train):
    note("checkpoint", path.name)

def factory(settings):
    return parts(on_step=on_step, on_evaluate=lambda metrics, train: note("evaluate", train.step, *metrics),
                 on_checkpoint=on_checkpoint, samples=lambda model: ["one\\ntwo", "\\x1b[31mred"])
"""


def test_callbacks_are_called_with_what_they_need(trainer: Trainer, own: Make, tmp_path: Path) -> None:
    result = trainer.train(*own(CALLED), "evaluate.every_steps=4", "checkpoint.every_steps=4")
    assert reason(result) == "finished all 9 steps"
    lines = notes(tmp_path)
    assert [line for line in lines if line.startswith("step")] == [
        f"step {step} 1 0.001" for step in range(1, 10)
    ]
    others = [line for line in lines if not line.startswith("step")]
    assert others == [
        "evaluate 4 loss", "checkpoint step-00000004.pt", "evaluate 8 loss", "checkpoint step-00000008.pt",
        "checkpoint step-00000009.pt", "evaluate 9 loss",
    ]  # fmt: skip
    scalars = [event for event in result.events if isinstance(event, ScalarsEvent)]
    assert len(scalars) == 9
    assert dict(result.snapshot.scalars).keys() == {"norm"}
    texts = [event for event in result.events if isinstance(event, TextsEvent)]
    assert [event.step for event in texts] == [4, 8, 9]
    assert texts[0].texts == ["one\ntwo", "\\x1b[31mred"]
    assert result.snapshot.texts == texts[-1]


def test_samples_and_callbacks_leave_no_trace_in_the_training(trainer: Trainer, own: Make) -> None:
    silent = "\ndef factory(settings):\n    return parts()\n"
    drawing = "\ndef factory(settings):\n    return parts(samples=lambda model: str(torch.rand(3)))\n"
    one = trainer.train(*own(silent), "evaluate.every_steps=2")
    other = trainer.train(*own(drawing), "evaluate.every_steps=2")
    assert one.losses == other.losses
    assert equal(one.state(9)["random"], other.state(9)["random"])


RAISING = """
def fail(*_):
    raise ValueError("not today")

def factory(settings):
    return parts({name}=fail)
"""


@pytest.mark.long
@pytest.mark.parametrize("name", ["on_step", "on_evaluate", "on_checkpoint", "samples"])
def test_a_callback_that_raises_ends_the_run_with_its_place_and_a_checkpoint(
    trainer: Trainer, own: Make, name: str
) -> None:
    sets = own(RAISING.format(name=name))
    result = trainer.train(*sets, "evaluate.every_steps=3", "checkpoint.every_steps=3")
    step = 1 if name == "on_step" else 3
    line = (SOURCE + RAISING).splitlines().index('    raise ValueError("not today")') + 1
    text = reason(result)
    assert f".py:{line}: {name} failed at step {step}: ValueError: not today; " in text
    assert f"the last good checkpoint is step {step}" in text
    assert f"resume with: ndd-console train --resume {result.directory.name}" in text
    assert result.end is not None
    assert (result.end.status, result.end.exit_status) == ("failed", 1)
    assert "raise ValueError" in result.directory.console_log.read_text()
    # The code was repaired: the run resumes, and has trained the same.
    whole = trainer.train(*own("\ndef factory(settings):\n    return parts()\n"), "evaluate.every_steps=3")
    rest = trainer.train(resume=result)
    assert reason(rest) == "finished all 9 steps"
    assert {**result.losses, **rest.losses} == whole.losses


STOPPING = """
def factory(settings):
    return parts(on_step=lambda train: train.stop("bored") if train.step == 5 else None)
"""


def test_a_callback_stops_the_run(trainer: Trainer, own: Make) -> None:
    result = trainer.train(*own(STOPPING))
    assert result.end is not None
    assert (result.end.status, result.end.step, result.end.exit_status) == ("done", 5, 0)
    assert reason(result) == "ended early at step 5: bored"
    assert result.checkpoints == [5]
    assert [mark.step for mark in result.marks("evaluation")] == [5]


SCORES = """
def factory(settings):
    Scores.scores = iter({scores})
    return parts(metric=Scores, better="higher")
"""


def test_early_stopping_waits_for_its_patience(trainer: Trainer, own: Make) -> None:
    sets = (*own(SCORES.format(scores=[0.1, 0.5, 0.4, 0.52, 0.3, 0.2, 0.9])), "evaluate.every_steps=1")
    result = trainer.train(*sets, "evaluate.patience=2", "evaluate.min_delta=0.05")
    assert reason(result) == (
        "ended early at step 4: score has not improved in 2 evaluations since its best value 0.5 (evaluate.patience)"
    )
    assert result.state(4)["monitor"] == {"best": 0.5, "waited": 2}


@pytest.mark.long
def test_the_best_checkpoint_is_that_of_the_chosen_metric(trainer: Trainer, own: Make) -> None:
    sets = own(SCORES.format(scores=[0.1, 0.9, 0.4, 0.5, 0.6, 0.7, 0.8, 0.3, 0.2]))
    every = ("evaluate.every_steps=1", "checkpoint.every_steps=1", "checkpoint.keep=1")
    assert trainer.train(*sets, *every).checkpoints == [2, 9]
    result = trainer.train(*own(SCORES.format(scores=[0.3, 0.9, 0.1, 0.5, 0.6])), *every, "evaluate.mode=min")
    assert result.checkpoints == [6, 9]  # later evaluations return 0
    result = trainer.train(*own(SCORES.format(scores=[0.3, 0.9])), *every, "evaluate.metric=other")
    assert result.snapshot.best is not None
    assert (result.snapshot.best.step, next(iter(result.snapshot.best.metrics))) == (1, "other")
    wrong = trainer.train(*own(SCORES.format(scores=[])), *every, "evaluate.metric=f1")
    assert "evaluate.metric = 'f1': the evaluation has no such metric; allowed: score, other, loss" in reason(
        wrong
    )


LOGGING = """
def step(train):
    train.log("x", {value})

def factory(settings):
    return parts(on_step=step)
"""


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("'high'", "TypeError: log('x', …) received a str, not a number"),
        ("torch.ones(2)", "ValueError: log('x', …) received a tensor of shape (2,), not one number"),
    ],
)
def test_a_scalar_that_is_none_is_refused(trainer: Trainer, own: Make, value: str, words: str) -> None:
    assert words in reason(trainer.train(*own(LOGGING.format(value=value))))


def test_a_scalar_that_is_not_finite_is_no_failure(trainer: Trainer, own: Make) -> None:
    result = trainer.train(*own(LOGGING.format(value="float('nan')")))
    assert reason(result) == "finished all 9 steps"
    assert result.snapshot.scalars == ()


def test_an_evaluation_that_was_lost_is_made_up_for(trainer: Trainer, own: Make, tmp_path: Path) -> None:
    """A checkpoint that was written before the evaluation of its step: the evaluation counts on resume."""
    source = """
def evaluated(metrics, train):
    note("evaluate", train.step)

def broken(self):
    raise ValueError("not yet")

def factory(settings):
    if (broken_once := not NOTES.exists()):
        Scores.result = broken
    note("made")
    return parts(metric=Scores, on_evaluate=evaluated)
"""
    sets = own(source)
    first = trainer.train(*sets, "evaluate.every_steps=4")
    assert "not yet" in reason(first)
    assert first.checkpoints == [4]
    sys.modules.pop(sets[0].partition("=")[2].partition(":")[0])
    again = trainer.train(resume=first)
    assert reason(again) == "finished all 9 steps"
    assert notes(tmp_path) == ["made", "made", "evaluate 4", "evaluate 8", "evaluate 9"]


def test_nan_is_no_improvement() -> None:
    from ndd_engine.config.schema import EvaluateSection

    monitor = Monitor(EvaluateSection(patience=2), lower=True)
    assert monitor.see("loss", float("nan")) is None
    assert "loss has not improved in 2 evaluations (" in str(monitor.see("loss", float("nan")))
    assert monitor.see("loss", 1.0) is None
