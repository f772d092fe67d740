"""A resumed run equals an uninterrupted one, also in its random numbers, and refuses changes of model or data."""

from __future__ import annotations

import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.states import equal
from tests.tiers import few
from train_help import EVERY_STEP, NDD, Result, Trainer, Written, resumed, stop_at, training_state

from ndd_engine.errors import EXIT_USAGE, UsageError
from ndd_engine.record.rundir import RunDir
from ndd_engine.train.checkpoint_state import kept_random, random_state, restore_random_state

CPU = torch.device("cpu")
# Dropout draws random numbers, accumulation moves the place in the data, epochs end within the run.
HARD = (
    "workload.dropout=0.2", "batch.accumulation=2", "clip.max_norm=0.5", "schedule.kind=cosine",
    "schedule.warmup_steps=7", "run.epochs=4", "checkpoint.every_epochs=0", "checkpoint.keep=100",
)  # fmt: skip
VARIANTS = {
    "chartext": ("workload.name=chartext",),
    "recurrent": ("workload.name=eeg", "workload.model=lstm", "optimizer.name=sgd", "optimizer.momentum=0.9"),
    "fp16": (
        "workload.name=chartext",
        "workload.objective=diffusion",
        "precision.amp=fp16",
        "optimizer.lr=0.01",
    ),
    "bf16": ("workload.name=chartext", "precision.amp=bf16"),
    "bf16-parameters": ("workload.name=chartext", "precision.amp=bf16", "precision.parameters=bf16"),
}
# In `make test`; the others take twice as long.
PROMISED = ("chartext", "recurrent")
FORMATS = ("bf16-parameters", "fp16", "bf16")


@pytest.mark.long
@pytest.mark.parametrize(
    "variant",
    [
        *(pytest.param(name, marks=pytest.mark.promise) for name in PROMISED),
        *few(["bf16-parameters", "fp16", "bf16"], 1),
    ],
)
def test_stopped_and_resumed_equals_uninterrupted(trainer: Trainer, variant: str) -> None:
    base = trainer.ndd if variant == "recurrent" else trainer.chartext
    sets = (*base, *EVERY_STEP, *HARD, *VARIANTS[variant])
    whole = trainer.train(*sets)
    total = whole.identity.total_steps
    per_epoch = whole.identity.steps_per_epoch
    assert total == 4 * per_epoch > 30
    # Once in the middle of an epoch and, further on, wherever the stop is heard.
    parts = trainer.train(*sets, steer=stop_at(per_epoch + 3))
    assert parts.end.status == "stopped" and 0 < parts.end.step < total
    parts = trainer.train(resume=parts, steer=stop_at(3 * per_epoch))
    parts = trainer.train(resume=parts) if parts.end.status == "stopped" else parts
    assert parts.end.status == "done"
    assert parts.losses == whole.losses
    assert len(whole.losses) == total
    assert equal(training_state(parts.state(total)), training_state(whole.state(total)))
    evaluations = {each.step: each.metrics for each in whole.snapshot.evaluations}
    assert {each.step: each.metrics for each in parts.snapshot.evaluations} == evaluations


def test_a_checkpoint_between_two_epochs_goes_on_with_the_next(trainer: Trainer) -> None:
    sets = (*trainer.ndd, *EVERY_STEP, "run.epochs=2", "workload.dropout=0.2", "checkpoint.keep=9")
    whole = trainer.train(*sets)
    again = trainer.train("checkpoint.keep=9", resume=whole, from_step=22)
    assert again.end.status == "done"
    # `losses` compares the steps that were done twice.
    assert again.losses == whole.losses
    assert again.identity.resumed_step == 22
    assert again.identity.resumed_from == "step-00000022"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """A run of 20 steps that can be continued to 44, with checkpoints of steps 10 and 20."""
    folder = tmp_path_factory.mktemp("finished")
    first = Trainer(folder, folder).train(
        *NDD, *EVERY_STEP, "run.epochs=2", "run.max_steps=20", "workload.dropout=0.0", "checkpoint.every_steps=10",
        "checkpoint.every_epochs=0", "evaluate.every_epochs=0",
    )  # fmt: skip
    assert first.checkpoints == [10, 20]
    return first


@pytest.fixture
def stopped(finished: Result, trainer: Trainer) -> Result:
    """A copy of that run."""
    copy = RunDir(trainer.root / finished.directory.name)
    shutil.copytree(finished.directory.path, copy.path)
    return Result(copy)


def test_a_run_killed_after_its_last_checkpoint_ends_as_done(trainer: Trainer, stopped: Result) -> None:
    # The last line of the record is the end, which a killed run does not write.
    *lines, end = stopped.directory.events.read_bytes().splitlines(keepends=True)
    assert b'"end"' in end
    stopped.directory.events.write_bytes(b"".join(lines))
    again = trainer.train(resume=stopped)
    assert (again.end.status, again.end.step, again.end.exit_status) == ("done", 20, 0), again.end.reason
    assert again.snapshot.status == "done" and again.snapshot.step == 20
    assert again.losses == stopped.losses


def test_a_finished_run_may_go_further(trainer: Trainer, stopped: Result) -> None:
    again = trainer.train("run.max_steps=30", resume=stopped)
    assert (again.end.status, again.end.step) == ("done", 30)
    assert sorted(again.losses) == list(range(1, 31))
    snapshot = again.snapshot
    assert (snapshot.status, snapshot.step, snapshot.items) == ("done", 30, 30 * 16)
    assert [x for x, _ in snapshot.loss_trend] == list(range(1, 31))


def test_another_workload_is_refused(trainer: Trainer, stopped: Result) -> None:
    text = '[workload]\nname = "chartext"\nsize = "tiny"\n[run]\nmax_steps = 30\n'
    stopped.directory.config.write_text(text)
    with pytest.raises(UsageError, match=r"workload\.name"):
        trainer.open(resume=stopped)


@pytest.mark.parametrize(
    "change",
    [
        "batch.micro=8", "batch.accumulation=3", "run.seed=5", "workload.samples=500",
        "workload.hidden=[9]", "workload.model=lstm", "optimizer.name=sgd",
    ],
)  # fmt: skip
def test_another_model_or_data_is_refused_before_the_record_is_touched(
    trainer: Trainer, stopped: Result, change: str
) -> None:
    events = stopped.directory.events.read_bytes()
    with pytest.raises(UsageError, match=rf"{change.partition('=')[0]}.* was .*, now ") as caught:
        trainer.train(change, "run.max_steps=30", resume=stopped)
    assert caught.value.exit_status == EXIT_USAGE
    assert stopped.directory.events.read_bytes() == events
    assert stopped.directory.live_owner() is None
    if "model" in change:  # the checkpoints are as good as before
        healed = trainer.train("run.max_steps=22", resume=stopped)
        assert healed.end.status == "done", healed.end.reason


def test_data_that_was_replaced_is_a_usage_error(trainer: Trainer, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("abcdefgh" * 400)
    first = trainer.train(*trainer.chartext, f"workload.data={text}", "run.max_steps=3")
    text.write_text("hgfedcba" * 400)
    again = trainer.train("run.max_steps=6", resume=first)
    assert (again.end.status, again.end.exit_status) == ("failed", EXIT_USAGE)


def test_a_resume_from_another_folder_finds_its_data(
    trainer: Trainer, tmp_path: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.txt").write_text(text_file.read_text())
    first = trainer.train(*trainer.chartext, "workload.data=mine.txt", "run.max_steps=3")
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "sub")
    again = trainer.train("run.max_steps=6", resume=first)
    assert (again.end.status, again.end.step) == ("done", 6)


def test_changed_settings_of_the_optimizer_take_effect(trainer: Trainer, stopped: Result) -> None:
    changed = ("optimizer.lr=0.5", "optimizer.weight_decay=0.25", "optimizer.betas=[0.5,0.6]")
    again = trainer.train("run.max_steps=30", *changed, resume=stopped)
    for group, decay in zip(again.state(30)["optimizer"]["param_groups"], (0.25, 0.0), strict=True):
        assert (group["lr"], group["weight_decay"], tuple(group["betas"])) == (0.5, decay, (0.5, 0.6))
    assert again.rates[-1] == 0.5


def test_a_damaged_checkpoint_is_told_and_the_one_before_works(trainer: Trainer, stopped: Result) -> None:
    path = stopped.directory.checkpoints / "step-00000020" / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 255
    path.write_bytes(data)
    failed = trainer.train("run.max_steps=30", resume=stopped)
    assert (failed.end.status, failed.end.exit_status) == ("failed", 1)
    assert "step-00000020" in failed.end.reason and "--from-step 10" in failed.end.reason
    again = trainer.train("run.max_steps=30", resume=stopped, from_step=10)
    assert (again.end.status, again.end.step) == ("done", 30)
    assert sorted(again.losses) == list(range(1, 31))


def test_another_number_of_threads_is_a_warning(trainer: Trainer, stopped: Result) -> None:
    again = trainer.train("run.max_steps=22", "run.threads=2", resume=stopped)
    assert len(again.marks("warning")) == 1
    assert again.end.status == "done"


def test_the_record_of_a_moved_run_goes_on(trainer: Trainer, stopped: Result, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere" / "renamed"
    moved.parent.mkdir()
    stopped.directory.path.rename(moved)
    again = trainer.train("run.max_steps=24", resume=Result(type(stopped.directory)(moved)))
    assert (again.end.status, again.directory.name) == ("done", "renamed")


# Random numbers of Python and NumPy

DRAWS = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 1)
    def forward(self, x):
        return self.linear(x + random.random() / 10)

def join(items):
    x, y = default_collate(items)
    return x + random.random() / 10, y

def factory(settings):
    torch.manual_seed(0)
    x = torch.rand(160, 3)
    return dict(model=Net(), train_data=TensorDataset(x, x.sum(1, keepdim=True)), collate=join,
                loss=lambda output, batch: (output - batch[1]).square().mean())
"""


class Numbers:
    """A stand-in for numpy.random: a generator with its own state, unseeded at first."""

    def __init__(self) -> None:
        self.generator = random.Random()

    def seed(self, value: int) -> None:
        self.generator.seed(value)

    def get_state(self) -> tuple[str, Any, int, int, float]:
        _, internal, _ = self.generator.getstate()
        return "MT19937", SimpleNamespace(tolist=lambda: list(internal)), 0, 0, 0.0

    def set_state(self, state: tuple[str, list[int], int, int, float]) -> None:
        self.generator.setstate((3, tuple(state[1]), None))

    def rand(self) -> float:
        return self.generator.random()


@pytest.fixture
def numpy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Numbers]:
    """NumPy as a module that can be imported, but is not yet."""
    monkeypatch.delitem(sys.modules, "numpy", raising=False)
    numbers = Numbers()
    place = "ndd_engine.train.checkpoint_state.importlib.import_module"
    monkeypatch.setattr(place, lambda name: use(name, numbers, monkeypatch))
    yield numbers


def use(name: str, numbers: Numbers, monkeypatch: pytest.MonkeyPatch) -> Any:
    module = SimpleNamespace(random=numbers)
    monkeypatch.setitem(sys.modules, name, module)
    return module


def test_numbers_of_all_generators_leave_no_trace(numpy: Numbers, monkeypatch: pytest.MonkeyPatch) -> None:
    use("numpy", numpy, monkeypatch)
    numpy.seed(4)
    before = random_state(CPU)
    with kept_random(CPU):
        first = torch.rand(1), random.random(), numpy.rand()
    assert str(random_state(CPU)) == str(before)
    assert (torch.rand(1), random.random(), numpy.rand()) == first


def test_a_numpy_that_the_test_step_imports_is_seeded_as_the_run(
    numpy: Numbers, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = []
    for _ in range(2):
        monkeypatch.delitem(sys.modules, "numpy", raising=False)
        torch.manual_seed(8)
        with kept_random(CPU):
            use("numpy", numpy, monkeypatch)
            numpy.generator = random.Random()  # from the system's entropy, as at NumPy's import
            numpy.rand()
        drawn.append(numpy.rand())
    assert drawn[0] == drawn[1]


def test_a_resumed_run_imports_numpy_if_the_first_one_had_it(
    numpy: Numbers, monkeypatch: pytest.MonkeyPatch
) -> None:
    use("numpy", numpy, monkeypatch)
    numpy.seed(3)
    state = random_state(CPU)
    expected = numpy.rand()
    monkeypatch.delitem(sys.modules, "numpy")
    numpy.seed(9)
    restore_random_state(state, CPU)
    assert "numpy" in sys.modules and numpy.rand() == expected


def test_a_run_whose_data_and_model_draw_pythons_numbers_resumes_exactly(
    trainer: Trainer, written: Written
) -> None:
    sets = (*written(DRAWS), *EVERY_STEP, "run.threads=1", "batch.micro=4", "evaluate.at_end=false")
    assert len(resumed(trainer, sets, 12, 60).losses) == 60
