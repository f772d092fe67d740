"""Evaluations change nothing in the training; what happens with them: callbacks, samples, early stopping, the best."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
import torch
from tests.states import equal
from tests.tiers import few
from train_help import EVERY_STEP, IMPORTS, Trainer, Written

from ndd_engine.config import Config, read
from ndd_engine.config.schema import EvaluateSection
from ndd_engine.record.events import ScalarsEvent, TextsEvent
from ndd_engine.run.control import StopNow
from ndd_engine.train.checkpoint import CheckpointStore
from ndd_engine.train.checkpoint_state import random_state
from ndd_engine.train.data.loader import EvalBatches
from ndd_engine.train.evaluate import EvaluationResult, Monitor, evaluate
from ndd_engine.train.step.stepper import Stepper
from ndd_engine.workloads.base import Workload
from ndd_engine.workloads.factory_data import prepare

CPU = torch.device("cpu")


def made(trainer: Trainer, *sets: str) -> tuple[Config, Workload]:
    config = read(None, [*trainer.chartext, "workload.dropout=0.5", *sets]).resolve()
    torch.manual_seed(1)
    return config, prepare(config)


def run(config: Config, workload: Workload, batches: int | None = None) -> EvaluationResult:
    section = config.evaluate.model_copy(update={"batches": batches})
    stepper = Stepper(workload, config.model_copy(update={"evaluate": section}), CPU, 1)
    return evaluate(stepper, EvalBatches(workload.eval_data, config), lambda: None)


@pytest.mark.parametrize("objective", ["autoregressive", "diffusion"])
def test_it_changes_no_random_number_no_gradient_and_no_mode(trainer: Trainer, objective: str) -> None:
    config, workload = made(trainer, f"workload.objective={objective}")
    workload.model.train()
    before = random_state(CPU)
    weights = {key: value.clone() for key, value in workload.model.state_dict().items()}
    first = run(config, workload)
    assert equal(random_state(CPU), before)
    assert equal(dict(workload.model.state_dict()), weights)
    assert workload.model.training
    assert all(parameter.grad is None for parameter in workload.model.parameters())
    # Whatever was drawn in between, it gives the same figures: no dropout, the same noise.
    torch.rand(100)
    random.random()
    assert run(config, workload).metrics == first.metrics
    assert next(iter(first.metrics)) == first.headline[0] == "bits_per_char"
    if objective == "diffusion":  # workers give the same ones
        helped, _ = made(trainer, "workload.objective=diffusion", "loader.eval_workers=1")
        assert run(helped, workload).metrics == first.metrics


def test_a_result_that_is_not_finite_is_a_warning(trainer: Trainer) -> None:
    config, workload = made(trainer)
    assert run(config, workload).not_finite == ""
    workload.loss = lambda *_: torch.tensor(float("nan"))  # type: ignore[method-assign, assignment]
    assert "loss is nan" in run(config, workload).not_finite
    # Some data has no auroc.
    assert EvaluationResult({"rmse": 0.5, "auroc": float("nan")}, 1, 1.0, True).not_finite == ""


def test_nothing_is_dropped_out(trainer: Trainer) -> None:
    config, workload = made(trainer)
    plain_config, plain = made(trainer, "workload.dropout=0.0")
    plain.model.load_state_dict(workload.model.state_dict())
    assert run(config, workload).metrics == run(plain_config, plain).metrics


def test_it_looks_at_no_more_batches_than_asked(trainer: Trainer) -> None:
    config, workload = made(trainer, "batch.micro=2")
    assert run(config, workload, batches=1).batches == 1
    everything = run(config, workload)
    assert everything.batches == -(-len(workload.eval_data) // 2)  # type: ignore[arg-type]
    assert run(config, workload, batches=1000).metrics == everything.metrics


def test_it_can_be_left_in_the_middle(trainer: Trainer) -> None:
    config, workload = made(trainer, "batch.micro=1")
    seen = []

    def between() -> None:
        seen.append(1)
        if len(seen) == 2:
            raise StopNow

    before = random_state(CPU)
    with pytest.raises(StopNow):
        evaluate(Stepper(workload, config, CPU, 1), EvalBatches(workload.eval_data, config), between)
    assert workload.model.training
    assert equal(random_state(CPU), before)
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()


# Callbacks and metrics of a factory

SOURCE = """
from pathlib import Path

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
PARTS = "\ndef factory(settings):\n    return parts({})\n"


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
    steps = [line for line in lines if line.startswith("step")]
    assert steps == [f"step {step} 1 0.001" for step in range(1, 10)]
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
    one, other = (
        trainer.train(*own(PARTS.format(parts)), "evaluate.every_steps=2")
        for parts in ("", "samples=lambda model: str(torch.rand(3))")
    )
    assert one.losses == other.losses
    assert equal(one.state(9)["random"], other.state(9)["random"])


RAISING = """
def fail(*_):
    raise ValueError("not today")

def factory(settings):
    return parts({name}=fail)
"""


@pytest.mark.long
@pytest.mark.parametrize("name", few(["on_evaluate", "on_step", "on_checkpoint", "samples"], 1))
def test_a_callback_that_raises_ends_the_run_with_its_place_and_a_checkpoint(
    trainer: Trainer, own: Written, tmp_path: Path, name: str
) -> None:
    sets = own(RAISING.format(name=name))
    result = trainer.train(*sets, "evaluate.every_steps=3", "checkpoint.every_steps=3")
    step = 1 if name == "on_step" else 3
    line = (IMPORTS + SOURCE + RAISING).splitlines().index('    raise ValueError("not today")') + 1
    reason = result.end.reason
    assert f".py:{line}: {name} " in reason and f"step {step}" in reason and "not today" in reason
    assert f"--resume {result.directory.name}" in reason
    assert (result.end.status, result.end.exit_status) == ("failed", 1)
    assert result.checkpoints == [step]
    assert "Traceback" in result.directory.console_log.read_text()
    # The code was repaired: the run resumes, and has trained the same.
    repaired = PARTS.format("")
    module = sets[0].removeprefix("workload.name=").removesuffix(":factory")
    (tmp_path / f"{module}.py").write_text(IMPORTS + SOURCE + repaired)
    del sys.modules[module]
    whole = trainer.train(*own(repaired), "evaluate.every_steps=3")
    rest = trainer.train(resume=result)
    assert rest.end.status == "done" and rest.losses == whole.losses


def test_a_callback_stops_the_run(trainer: Trainer, own: Written) -> None:
    step = 'on_step=lambda train: train.stop("bored") if train.step == 5 else None'
    result = trainer.train(*own(PARTS.format(step)), "checkpoint.every_steps=5")
    assert (result.end.status, result.end.step, result.end.exit_status) == ("done", 5, 0)
    assert "bored" in result.end.reason
    (evaluation,) = result.snapshot.evaluations
    # The checkpoint of this step was due before its evaluation: it is written again.
    (saved,) = CheckpointStore(result.directory.checkpoints, 9).all()
    assert (saved.step, evaluation.step, saved.metric) == (5, 5, evaluation.metrics["loss"])


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


LATER = (
    """
class Later:
    """
    + '"""Its second name needs more than one batch, as a class that a batch does not have."""'
    + """
    def __init__(self): self.batches = 0
    def update(self, output, batch, loss): self.batches += 1
    def result(self): return {"score": 1.0, **({"rare": 2.0} if self.batches > 1 else {})}

def factory(settings):
    return parts(metric=Later)
"""
)


def test_a_metric_that_is_missing_is_refused_before_training(trainer: Trainer, own: Written) -> None:
    sets = own(SCORES.format(scores=[]))
    wrong = trainer.train(*sets, "evaluate.metric=f1")
    assert wrong.end.status == "failed" and not wrong.losses
    assert "evaluate.metric" in wrong.end.reason and "score, other" in wrong.end.reason
    # It does not matter if nothing is evaluated, and a single batch need not have all of them.
    assert trainer.train(*sets, "evaluate.metric=f1", "evaluate.at_end=false").end.status == "done"
    later = trainer.train(*own(LATER), "evaluate.metric=rare", "batch.micro=2", "batch.accumulation=2")
    assert later.end.status == "done" and later.snapshot.best is not None
    assert "rare" in later.snapshot.best.metrics


@pytest.mark.long
@pytest.mark.parametrize("objective", ["autoregressive", "diffusion"])
def test_looking_for_the_metric_before_training_changes_no_loss(trainer: Trainer, objective: str) -> None:
    sets = (*trainer.chartext, f"workload.objective={objective}", "workload.dropout=0.5", *EVERY_STEP)
    plain, looked = (trainer.train(*sets, *more) for more in ((), ("evaluate.metric=loss",)))
    assert looked.losses and looked.losses == plain.losses
    assert looked.end.status == plain.end.status == "done"


@pytest.mark.parametrize("value", ["'high'", "torch.ones(2)"])
def test_a_scalar_that_is_no_number_is_refused(trainer: Trainer, own: Written, value: str) -> None:
    end = trainer.train(*own(PARTS.format(f"on_step=lambda train: train.log('x', {value})"))).end
    assert end.status == "failed" and "log('x', …)" in end.reason


def test_a_scalar_that_is_not_finite_is_no_failure(trainer: Trainer, own: Written) -> None:
    result = trainer.train(*own(PARTS.format("on_step=lambda train: train.log('x', float('nan'))")))
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
EVALUATED, SAMPLED = "on_evaluate=lambda metrics, train: 0", "samples=lambda model: []"
SAVED = "on_checkpoint=lambda path, train: 0"


@pytest.mark.parametrize(
    ("part", "sets", "what"),
    [
        (EVALUATED, (), "on_evaluate: is never called, since evaluations are off"),
        (SAMPLED, (), "samples: is never called, since evaluations are off"),
        (SAVED, ("checkpoint.at_end=false",), "since checkpoints are off"),
        ("", ("evaluate.patience=3",), "evaluate.patience = 3: is not used"),
        (f"{EVALUATED}, {SAMPLED}, {SAVED}", ("evaluate.at_end=true",), ""),
    ],
)
def test_what_no_evaluation_or_checkpoint_would_use_is_refused(
    own: Written, trainer: Trainer, part: str, sets: tuple[str, ...], what: str
) -> None:
    end = trainer.train(*own(PARTS.format(part)), *OFF, *sets).end
    assert end.status == ("failed" if what else "done") and what in end.reason
    assert "never called" not in end.reason or ".py:" in end.reason
