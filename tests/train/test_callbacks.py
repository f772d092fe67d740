"""Callbacks, own scalars, samples, early stopping and the best checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.states import equal
from train_help import EVERY_STEP, Trainer, Written

from ndd_engine.record.events import ScalarsEvent, TextsEvent
from ndd_engine.train.evaluate import Monitor

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


@pytest.fixture
def own(written: Written) -> Written:
    """own(source) writes a module and returns the settings of a run with its factory."""
    return lambda source: (*written(SOURCE + source), *SETS, *EVERY_STEP)


def notes(folder: Path) -> list[str]:
    return next(folder.glob("written_*.txt")).read_text().splitlines()


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


def test_callbacks_are_called_with_what_they_need(trainer: Trainer, own: Written, tmp_path: Path) -> None:
    result = trainer.train(*own(CALLED), "evaluate.every_steps=4", "checkpoint.every_steps=4")
    assert result.end.status == "done"
    lines = notes(tmp_path)
    assert [line for line in lines if line.startswith("step")] == [
        f"step {step} 1 0.001" for step in range(1, 10)
    ]
    assert [line.split() for line in lines if not line.startswith("step")] == [
        ["evaluate", "4", "loss"], ["checkpoint", "step-00000004"],
        ["evaluate", "8", "loss"], ["checkpoint", "step-00000008"],
        ["checkpoint", "step-00000009"], ["evaluate", "9", "loss"],
    ]  # fmt: skip
    scalars = [event for event in result.events if isinstance(event, ScalarsEvent)]
    assert len(scalars) == 9
    assert dict(result.snapshot.scalars).keys() == {"norm"}
    texts = [event for event in result.events if isinstance(event, TextsEvent)]
    assert [event.step for event in texts] == [4, 8, 9]
    assert texts[0].texts == ["one\ntwo", "\\x1b[31mred"]
    assert result.snapshot.texts == texts[-1]


def test_samples_and_callbacks_leave_no_trace_in_the_training(trainer: Trainer, own: Written) -> None:
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
    trainer: Trainer, own: Written, tmp_path: Path, name: str
) -> None:
    sets = own(RAISING.format(name=name))
    result = trainer.train(*sets, "evaluate.every_steps=3", "checkpoint.every_steps=3")
    step = 1 if name == "on_step" else 3
    line = (SOURCE + RAISING).splitlines().index('    raise ValueError("not today")') + 1
    reason = result.end.reason
    assert f".py:{line}: {name} " in reason and f"step {step}" in reason and "not today" in reason
    assert f"--resume {result.directory.name}" in reason
    assert (result.end.status, result.end.exit_status) == ("failed", 1)
    assert result.checkpoints == [step]
    assert "Traceback" in result.directory.console_log.read_text()
    # The code was repaired: the run resumes, and has trained the same.
    repaired = "\ndef factory(settings):\n    return parts()\n"
    module = sets[0].removeprefix("workload.name=").removesuffix(":factory")
    (tmp_path / f"{module}.py").write_text(SOURCE + repaired)
    del sys.modules[module]
    whole = trainer.train(*own(repaired), "evaluate.every_steps=3")
    rest = trainer.train(resume=result)
    assert rest.end.status == "done" and rest.losses == whole.losses


STOPPING = """
def factory(settings):
    return parts(on_step=lambda train: train.stop("bored") if train.step == 5 else None)
"""


def test_a_callback_stops_the_run(trainer: Trainer, own: Written) -> None:
    result = trainer.train(*own(STOPPING))
    assert (result.end.status, result.end.step, result.end.exit_status) == ("done", 5, 0)
    assert "bored" in result.end.reason
    assert result.checkpoints == [5]
    assert [mark.step for mark in result.marks("evaluation")] == [5]


SCORES = """
def factory(settings):
    Scores.scores = iter({scores})
    return parts(metric=Scores, better="higher")
"""


def test_early_stopping_waits_for_its_patience(trainer: Trainer, own: Written) -> None:
    sets = (*own(SCORES.format(scores=[0.1, 0.5, 0.4, 0.52, 0.3, 0.2, 0.9])), "evaluate.every_steps=1")
    result = trainer.train(*sets, "evaluate.patience=2", "evaluate.min_delta=0.05")
    assert (result.end.status, result.end.step) == ("done", 4)
    assert "evaluate.patience" in result.end.reason
    assert result.state(4)["monitor"] == {"best": 0.5, "waited": 2}


@pytest.mark.long
def test_the_best_checkpoint_is_that_of_the_chosen_metric(trainer: Trainer, own: Written) -> None:
    sets = own(SCORES.format(scores=[0.1, 0.9, 0.4, 0.5, 0.6, 0.7, 0.8, 0.3, 0.2]))
    every = ("evaluate.every_steps=1", "checkpoint.every_steps=1", "checkpoint.keep=1")
    assert trainer.train(*sets, *every).checkpoints == [2, 9]
    result = trainer.train(*own(SCORES.format(scores=[0.3, 0.9, 0.1, 0.5, 0.6])), *every, "evaluate.mode=min")
    assert result.checkpoints == [6, 9]  # later evaluations return 0
    result = trainer.train(*own(SCORES.format(scores=[0.3, 0.9])), *every, "evaluate.metric=other")
    assert result.snapshot.best is not None
    assert (result.snapshot.best.step, next(iter(result.snapshot.best.metrics))) == (1, "other")
    wrong = trainer.train(*own(SCORES.format(scores=[])), *every, "evaluate.metric=f1")
    assert "evaluate.metric" in wrong.end.reason and "score, other" in wrong.end.reason


LOGGING = """
def step(train):
    train.log("x", {value})

def factory(settings):
    return parts(on_step=step)
"""


@pytest.mark.parametrize("value", ["'high'", "torch.ones(2)"])
def test_a_scalar_that_is_no_number_is_refused(trainer: Trainer, own: Written, value: str) -> None:
    end = trainer.train(*own(LOGGING.format(value=value))).end
    assert end.status == "failed" and "log('x', …)" in end.reason


def test_a_scalar_that_is_not_finite_is_no_failure(trainer: Trainer, own: Written) -> None:
    result = trainer.train(*own(LOGGING.format(value="float('nan')")))
    assert result.end.status == "done"
    assert result.snapshot.scalars == ()


def test_an_evaluation_that_was_lost_is_made_up_for(trainer: Trainer, own: Written, tmp_path: Path) -> None:
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
    assert "not yet" in first.end.reason
    assert first.checkpoints == [4]
    sys.modules.pop(sets[0].partition("=")[2].partition(":")[0])
    again = trainer.train(resume=first)
    assert again.end.status == "done"
    assert notes(tmp_path) == ["made", "made", "evaluate 4", "evaluate 8", "evaluate 9"]


def test_nan_is_no_improvement() -> None:
    from ndd_engine.config.schema import EvaluateSection

    monitor = Monitor(EvaluateSection(patience=2), lower=True)
    assert monitor.see("loss", float("nan")) is None
    assert monitor.see("loss", float("nan")) is not None  # its patience has ended
    assert monitor.see("loss", 1.0) is None


OFF = (
    "evaluate.every_steps=0",
    "evaluate.at_end=false",
    "checkpoint.every_steps=0",
    "checkpoint.every_minutes=0",
)


@pytest.mark.parametrize(
    ("part", "sets", "what"),
    [
        (
            "on_evaluate=lambda metrics, train: 0",
            (),
            "on_evaluate: is never called, since evaluations are off",
        ),
        ("samples=lambda model: []", (), "samples: is never called, since evaluations are off"),
        ("on_checkpoint=lambda path, train: 0", ("checkpoint.at_end=false",), "since checkpoints are off"),
        ("", ("evaluate.patience=3",), "evaluate.patience = 3: is not used"),
    ],
)
def test_what_no_evaluation_or_checkpoint_would_use_is_refused(
    own: Written, trainer: Trainer, part: str, sets: tuple[str, ...], what: str
) -> None:
    result = trainer.train(*own(f"def factory(settings): return parts({part})"), *OFF, *sets)
    assert result.end.status == "failed" and what in result.end.reason
    assert "never called" not in result.end.reason or ".py:" in result.end.reason


def test_what_an_evaluation_or_checkpoint_at_the_end_uses_is_accepted(own: Written, trainer: Trainer) -> None:
    parts = (
        "on_evaluate=lambda metrics, train: 0, samples=lambda model: [], on_checkpoint=lambda path, train: 0"
    )
    result = trainer.train(
        *own(f"def factory(settings): return parts({parts})"), *OFF, "evaluate.at_end=true"
    )
    assert result.end.status == "done"


STEP = """
def step(batch, train):
    loss = nn.functional.mse_loss(train.model(batch[0]), batch[1])
    {backward}
    if train.step >= 2:
        {update}
    return loss
def factory(settings): return parts(step=step)
"""


@pytest.mark.parametrize(
    ("backward", "update", "amp", "refused"),
    [
        ("loss.backward()", "train.optimizer.step()", "fp16", 'precision.amp = "fp16"'),
        ("train.backward(loss)", "train.optimizer.step()", "fp16", "clip.max_norm = 0.5 is not used"),
        ("loss.backward()", "train.update()", "bf16", ""),
        ("train.backward(loss)", "train.update()", "fp16", ""),
    ],
)
def test_a_step_of_its_own_that_clips_or_scales_nothing_is_refused(
    own: Written, trainer: Trainer, backward: str, update: str, amp: str, refused: str
) -> None:
    source = STEP.format(backward=backward, update=update)
    sets = ("clip.max_norm=0.5", f"precision.amp={amp}", "run.epochs=2", "run.max_steps=18")
    result = trainer.train(*own(source), *sets)
    assert result.end.status == ("failed" if refused else "done"), result.end
    assert refused in result.end.reason
    if not refused:
        assert result.settings["clip.max_norm"].in_effect
