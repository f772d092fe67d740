"""A step in every so many seconds is profiled: it names slow functions, is in no statistics, and changes no result."""

from __future__ import annotations

import cProfile
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from train_help import EVERY_STEP, Result, Trainer

from ndd_engine.measure import capture
from ndd_engine.record.events import FunctionsEvent
from ndd_engine.train import loop
from ndd_watch import collecting, holders
from ndd_watch.profiler import ANOTHER, StepProfiler

SLOW = """\
import torch
from torch import nn


def tokenize(index):
    total = 0
    for number in range(4000):
        total += number * index % 7
    return total % 3


class Clips(torch.utils.data.Dataset):
    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index] + tokenize(index), self.items[index].sum()


def penalty(output):
    total = 0.0
    for number in range(2000):
        total += number * 1e-9
    return output.square().mean() * total


def loss(output, batch):
    return (output.squeeze(1) - batch[1]).square().mean() + penalty(output)


def log_norms(train):
    train.log("norm", sum(number % 3 for number in range(5000)))


def factory(settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
    return {"model": model, "train_data": Clips(torch.randn(400, 3)), "loss": loss, "on_step": log_norms}
"""
QUIET = (
    "evaluate.at_end=false",
    "evaluate.every_epochs=0",
    "checkpoint.at_end=false",
    "checkpoint.every_epochs=0",
)


@pytest.fixture
def slow(trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Trains the workload above in its folder; the second step and every tenth one after it is profiled."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(capture, "FIRST_S", 0.0)
    monkeypatch.setattr(capture, "FIRST_STEPS", 2)
    sys.modules.pop("slow_data", None)
    (tmp_path / "slow_data.py").write_text(SLOW)

    def train(*sets: str) -> Result:
        fixed = ("workload.name=slow_data:factory", "batch.micro=4", "run.threads=1", *QUIET)
        result = trainer.train(*fixed, *sets)
        assert result.end.status == "done", result.end
        return result

    yield train
    sys.modules.pop("slow_data", None)
    assert sys.getprofile() is None


def profiles(result: Result) -> list[FunctionsEvent]:
    return [event for event in result.events if isinstance(event, FunctionsEvent)]


def line_of(text: str) -> int:
    return SLOW.splitlines().index(text) + 1


def test_functions_of_the_dataset_the_loss_and_a_callback_are_named_with_their_phase(slow: Any) -> None:
    result = slow("run.max_steps=12", *EVERY_STEP)
    (found,) = profiles(result)
    assert found.step == 3 and found.wall_ns > 0
    rows = {row[2]: row for row in found.functions}
    file, line, _, calls, ns, own_ns, caller, phase = rows["tokenize"]
    assert (file, line, calls, caller, phase) == (
        "slow_data.py", line_of("def tokenize(index):"), 4, "Clips.__getitem__", "data_wait",
    )  # fmt: skip
    assert own_ns == ns > 0
    assert rows["Clips.__getitem__"][5] < rows["Clips.__getitem__"][4]
    assert rows["penalty"][6:] == ("loss", "loss") and rows["log_norms"][7] == "log"
    # The product's own code, and this test, are not the user's.
    assert {row[0] for row in found.functions} == {"slow_data.py"}


def test_a_profiled_step_is_in_no_statistics_and_phases_add_up(slow: Any) -> None:
    result = slow("run.max_steps=20", "log.window_s=60", "log.every_steps=1")
    before, profiled, after = (window for window in result.windows if window.steps)
    assert [window.profiled for window in (before, profiled, after)] == [False, True, False]
    assert (before.step, profiled.step, profiled.steps, after.steps) == (2, 3, 1, 17)
    for window in (before, profiled, after):
        spent = sum(body["host_ns"] for name, body in window.phases.items() if "/" not in name)
        assert spent == window.wall_ns
    totals = result.snapshot.totals
    assert totals.steps == 19 and totals.wall_ns == sum(
        window.wall_ns for window in result.windows if not window.profiled
    )
    assert result.snapshot.functions is not None


def test_long_steps_are_not_profiled_all_the_time(slow: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # As after 30 seconds in each step.
    monkeypatch.setattr(capture.FunctionProfiles, "_wait", lambda self: None)
    assert [found.step for found in profiles(slow("run.max_steps=40"))] == [3, 14, 25, 36]


@pytest.mark.long
def test_losses_and_weights_do_not_depend_on_it(slow: Any) -> None:
    sets = ("run.max_steps=30", "checkpoint.at_end=true", *EVERY_STEP)
    on, off = slow(*sets), slow(*sets, "log.profile_every_s=0")
    assert profiles(on) and not profiles(off)
    assert len(on.losses) == 30 and on.losses == off.losses
    states = [result.state(30)["model"] for result in (on, off)]
    assert all((states[0][name] == states[1][name]).all() for name in states[0])


def test_workers_are_said_to_be_out_of_sight(slow: Any) -> None:
    (found,) = profiles(slow("run.max_steps=6", "loader.workers=1"))
    assert not {"tokenize", "Clips.__getitem__"} & {row[2] for row in found.functions}


def test_under_another_profiler_the_run_says_so_once(slow: Any) -> None:
    other = cProfile.Profile()
    other.enable()
    try:
        result = slow("run.max_steps=40")
        assert other.getstats() and (sys.getprofile() is other or sys.version_info >= (3, 12))
    finally:
        other.disable()
    assert not profiles(result)
    (note,) = [mark for mark in result.marks("note") if "not profiled" in mark.text]
    assert ANOTHER in note.text


def test_a_profiler_of_the_users_own_within_the_step_is_left_alone(slow: Any, tmp_path: Path) -> None:
    path = tmp_path / "slow_data.py"
    own = "import cProfile\nPROFILER = cProfile.Profile()\n" + SLOW.replace(
        "    return total % 3", "    PROFILER.enable()\n    return total % 3"
    )
    path.write_text(own)
    sys.modules.pop("slow_data", None)
    try:
        result = slow("run.max_steps=12")
        assert not profiles(result)
        assert sys.getprofile() is sys.modules["slow_data"].PROFILER or sys.version_info >= (3, 12)
    finally:
        sys.modules["slow_data"].PROFILER.disable()


@pytest.mark.parametrize("broken", ["begin", "end"])
def test_a_profiler_that_fails_costs_only_the_profile(
    slow: Any, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("planted")

    monkeypatch.setattr(StepProfiler, broken, fail)
    try:
        result = slow("run.max_steps=30")
    finally:
        sys.setprofile(None)
    assert result.snapshot.step == 30
    assert sum(window.steps for window in result.windows if not window.profiled) >= 26
    notes = [mark.text for mark in result.marks("note") if "not profiled" in mark.text]
    assert len(notes) == 1 and "planted" in notes[0]


def test_a_step_that_raises_leaves_no_profiler(slow: Any, trainer: Trainer, tmp_path: Path) -> None:
    # In the third step, which is profiled.
    failing = SLOW.replace("    total = 0\n", "    total = 0\n    CALLS.append(1 // (len(CALLS) < 9))\n", 1)
    (tmp_path / "slow_data.py").write_text(f"CALLS = []\n{failing}")
    sys.modules.pop("slow_data", None)
    sets = ("workload.name=slow_data:factory", "batch.micro=4", "run.max_steps=9", "run.threads=1", *QUIET)
    result = trainer.train(*sets)
    assert result.end.status == "failed"


def test_an_evaluation_is_profiled_once_by_function(slow: Any) -> None:
    sets = ("evaluate.every_steps=4", "run.max_steps=12", "loader.workers=0", "loader.fetch=item")
    found = [event for event in profiles(slow(*sets)) if event.inside]
    assert [event.inside for event in found] == ["evaluate"] and found[0].step == 8
    rows = {row[2]: row for row in found[0].functions}
    assert rows["tokenize"][0] == "slow_data.py" and rows["penalty"][5] > 0
    assert {"forward", "data_wait"} & {row[7] for row in found[0].calls}


COLLECTS = """\
class Metric:
    def __init__(self):
        self.outputs = []

    def update(self, output, batch, loss):
        self.outputs.append(output)

    def result(self):
        return {"loss": float(torch.cat(self.outputs).mean())}


def factory("""


@pytest.mark.parametrize("keeps", [True, False])
def test_what_an_evaluation_keeps_is_named(
    slow: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keeps: bool
) -> None:
    used = iter(range(0, 10**12, collecting.GROWN))
    monkeypatch.setattr(loop, "in_use", lambda _: next(used))
    monkeypatch.setattr(collecting, "EACH_NS", 0)
    monkeypatch.setattr(holders, "LOOK_NS", 10**10)
    monkeypatch.setattr(holders, "NAME_NS", 10**10)
    text = SLOW.replace("def factory(", COLLECTS, 1).replace(
        '"loss": loss', '"loss": loss, "metric": Metric', 1
    )
    if not keeps:
        text = text.replace("self.outputs.append(output)", "self.outputs = [output]")
    (tmp_path / "slow_data.py").write_text(text.replace("torch.randn(400, 3)", "torch.randn(1600, 3)"))
    sys.modules.pop("slow_data", None)
    result = slow("evaluate.every_steps=4", "run.max_steps=4", "loader.workers=0", "log.profile_every_s=100")
    collected = result.snapshot.collected
    names = [(one.owner, one.name, one.at) for one in collected.holders] if collected is not None else []
    line = 1 + next(
        at for at, one in enumerate(text.splitlines()) if "self.outputs.append(output)" in one or not keeps
    )
    assert (("Metric", "outputs", (str(tmp_path / "slow_data.py"), line)) in names) == keeps, names


PUBLISH = """\
def publish(path, train):
    total = 0
    for number in range(9000):
        total += number % 5


def factory("""


def test_a_checkpoint_is_profiled_once_by_function(slow: Any, tmp_path: Path) -> None:
    text = SLOW.replace("def factory(", PUBLISH).replace('"on_step": log_norms', '"on_checkpoint": publish')
    (tmp_path / "slow_data.py").write_text(text)
    result = slow("checkpoint.every_steps=4", "run.max_steps=12")
    found = [event for event in profiles(result) if event.inside]
    assert [event.inside for event in found] == ["checkpoint"] and found[0].step == 8
    assert {row[2] for row in found[0].functions} == {"publish"}
