"""A step in every so many seconds is profiled: it names slow functions and what is done without need.

It is in no statistics, and changes no result.
"""

from __future__ import annotations

import cProfile
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from train_help import EVERY_STEP, QUIET, Result, Trainer

from ndd_engine.diagnose import diagnose
from ndd_engine.measure import capture, close_looks
from ndd_engine.record.events import FunctionsEvent
from ndd_engine.train import loop
from ndd_watch import collecting, holders
from ndd_watch.probes import Probe
from ndd_watch.profiler import ANOTHER, StepProfiler
from ndd_watch.slowing import RETAINED_STEPS

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


@pytest.fixture
def profiled(trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """profiled(source, *sets) trains the factory of this source; the second step and later ones are profiled."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(capture, "FIRST_S", 0.0)
    monkeypatch.setattr(capture, "FIRST_STEPS", 2)

    def train(source: str, *sets: str, status: str = "done") -> Result:
        sys.modules.pop("profiled_data", None)
        (tmp_path / "profiled_data.py").write_text(source)
        fixed = ("workload.name=profiled_data:factory", "batch.micro=4", "run.threads=1", *QUIET)
        result = trainer.train(*fixed, "checkpoint.at_end=false", *sets)
        assert result.end.status == status, result.end
        return result

    yield train
    sys.modules.pop("profiled_data", None)
    assert sys.getprofile() is None


def profiles(result: Result) -> list[FunctionsEvent]:
    return [event for event in result.events if isinstance(event, FunctionsEvent)]


def line_of(text: str) -> int:
    return SLOW.splitlines().index(text) + 1


def test_functions_of_the_dataset_the_loss_and_a_callback_are_named_with_their_phase(profiled: Any) -> None:
    result = profiled(SLOW, "run.max_steps=12", *EVERY_STEP)
    (found,) = profiles(result)
    assert found.step == 3 and found.wall_ns > 0
    rows = {row[2]: row for row in found.functions}
    file, line, _, calls, ns, own_ns, caller, phase = rows["tokenize"]
    assert (file, line, calls, caller, phase) == (
        "profiled_data.py", line_of("def tokenize(index):"), 4, "Clips.__getitem__", "data_wait",
    )  # fmt: skip
    assert own_ns == ns > 0
    assert rows["Clips.__getitem__"][5] < rows["Clips.__getitem__"][4]
    assert rows["penalty"][6:] == ("loss", "loss") and rows["log_norms"][7] == "log"
    # The product's own code, and this test, are not the user's.
    assert {row[0] for row in found.functions} == {"profiled_data.py"}


def test_a_profiled_step_is_in_no_statistics_and_phases_add_up(profiled: Any) -> None:
    result = profiled(SLOW, "run.max_steps=20", "log.window_s=60", "log.every_steps=1")
    found = [(one.step, one.steps, one.profiled) for one in result.windows if one.steps]
    assert found == [(2, 2, False), (3, 1, True), (20, 17, False)]
    result.closed_ns()
    totals = result.snapshot.totals
    assert totals.steps == 19
    assert totals.wall_ns == sum(window.wall_ns for window in result.windows if not window.profiled)
    assert result.snapshot.functions is not None


def test_long_steps_are_not_profiled_all_the_time(profiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # As after 30 seconds in each step.
    monkeypatch.setattr(capture.FunctionProfiles, "_wait", lambda self: None)
    assert [found.step for found in profiles(profiled(SLOW, "run.max_steps=40"))] == [3, 14, 25, 36]


def test_losses_and_weights_do_not_depend_on_it(profiled: Any) -> None:
    sets = ("run.max_steps=16", "checkpoint.at_end=true", *EVERY_STEP)
    on, off = profiled(SLOW, *sets), profiled(SLOW, *sets, "log.profile_every_s=0")
    assert profiles(on) and not profiles(off)
    assert len(on.losses) == 16 and on.losses == off.losses
    states = [result.state(16)["model"] for result in (on, off)]
    assert all((states[0][name] == states[1][name]).all() for name in states[0])


def test_workers_are_said_to_be_out_of_sight(profiled: Any) -> None:
    (found,) = profiles(profiled(SLOW, "run.max_steps=6", "loader.workers=1"))
    assert not {"tokenize", "Clips.__getitem__"} & {row[2] for row in found.functions}


def test_under_another_profiler_the_run_says_so_once(profiled: Any) -> None:
    other = cProfile.Profile()
    other.enable()
    try:
        result = profiled(SLOW, "run.max_steps=24")
        assert other.getstats() and (sys.getprofile() is other or sys.version_info >= (3, 12))
    finally:
        other.disable()
    assert not profiles(result)
    (note,) = [mark for mark in result.marks("note") if "not profiled" in mark.text]
    assert ANOTHER in note.text


def test_a_profiler_of_the_users_own_within_the_step_is_left_alone(profiled: Any) -> None:
    enables = SLOW.replace("    return total % 3", "    PROFILER.enable()\n    return total % 3")
    try:
        result = profiled(f"import cProfile\nPROFILER = cProfile.Profile()\n{enables}", "run.max_steps=12")
        assert not profiles(result)
        own = sys.modules["profiled_data"].PROFILER
        assert sys.getprofile() is own or sys.version_info >= (3, 12)
    finally:
        sys.modules["profiled_data"].PROFILER.disable()


@pytest.mark.parametrize("broken", ["begin", "end"])
def test_a_profiler_that_fails_costs_only_the_profile(
    profiled: Any, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("planted")

    monkeypatch.setattr(StepProfiler, broken, fail)
    try:
        result = profiled(SLOW, "run.max_steps=30")
    finally:
        sys.setprofile(None)
    assert result.snapshot.step == 30
    assert sum(window.steps for window in result.windows if not window.profiled) >= 26
    notes = [mark.text for mark in result.marks("note") if "not profiled" in mark.text]
    assert len(notes) == 1 and "planted" in notes[0]


def test_a_step_that_raises_leaves_no_profiler(profiled: Any) -> None:
    # In the third step, which is profiled.
    failing = SLOW.replace("    total = 0\n", "    total = 0\n    CALLS.append(1 // (len(CALLS) < 9))\n", 1)
    profiled(f"CALLS = []\n{failing}", "run.max_steps=9", status="failed")


PUBLISH = """\
def publish(path, train):
    total = 0
    for number in range(9000):
        total += number % 5


def factory("""


def test_an_evaluation_and_a_checkpoint_are_profiled_once_by_function(profiled: Any) -> None:
    text = SLOW.replace("def factory(", PUBLISH).replace('"on_step"', '"on_checkpoint": publish, "on_step"')
    sets = ("evaluate.every_steps=4", "checkpoint.every_steps=4", "run.max_steps=12", "loader.fetch=item")
    found = {event.inside: event for event in profiles(profiled(text, *sets)) if event.inside}
    assert {inside: event.step for inside, event in found.items()} == {"evaluate": 8, "checkpoint": 8}
    rows = {row[2]: row for row in found["evaluate"].functions}
    assert rows["tokenize"][0] == "profiled_data.py" and rows["penalty"][5] > 0
    assert {"forward", "data_wait"} & {row[7] for row in found["evaluate"].calls}
    assert {row[2] for row in found["checkpoint"].functions} == {"publish"}


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
    profiled: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keeps: bool
) -> None:
    used = iter(range(0, 10**12, collecting.GROWN))
    monkeypatch.setattr(loop, "in_use", lambda _: next(used))
    monkeypatch.setattr(collecting, "EACH_NS", 0)
    monkeypatch.setattr(holders, "LOOK_NS", 10**10)
    monkeypatch.setattr(holders, "NAME_NS", 10**10)
    text = SLOW.replace("def factory(", COLLECTS, 1).replace("torch.randn(400, 3)", "torch.randn(1600, 3)")
    text = text.replace('"loss": loss', '"loss": loss, "metric": Metric', 1)
    line = text.splitlines().index("        self.outputs.append(output)") + 1
    if not keeps:
        text = text.replace("self.outputs.append(output)", "self.outputs = [output]")
    result = profiled(text, "evaluate.every_steps=4", "run.max_steps=4", "log.profile_every_s=100")
    collected = result.snapshot.collected
    names = [(one.owner, one.name, one.at) for one in collected.holders] if collected is not None else []
    assert (("Metric", "outputs", (str(tmp_path / "profiled_data.py"), line)) in names) == keeps, names


# What is done without need

WASTES = """\
import torch
from torch import nn
from torch.utils.data import TensorDataset


class Net(nn.Module):
    def __init__(self, rows, sparse, tied):
        super().__init__()
        self.table = nn.Embedding(rows, 8, sparse=sparse)
        self.out = nn.Linear(8, 1)
        self.tied = tied

    def forward(self, x):
        vectors = self.table(x).mean(1)
        return (vectors @ self.table.weight.t()).mean(1, True) if self.tied else self.out(vectors)


def made(rows=5000, sparse=False, tied=False, keep=None, both=False, anomaly=False):
    torch.manual_seed(0)
    x, y = torch.randint(0, rows, (400, 2)), torch.rand(400, 1)
    model = Net(rows, sparse, tied)
    parts = {"model": model, "train_data": TensorDataset(x, y), "loss": lambda out, b: (out - b[1]).square().mean()}
    if sparse:
        parts["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.01)
    if anomaly:
        torch.autograd.set_detect_anomaly(True)
    if keep is not None:
        def step(batch, train):
            loss = (train.model(batch[0]) - batch[1]).square().mean()
            loss.backward(retain_graph=keep)
            if both:
                loss.backward()
            train.update()
            return loss
        parts["step"] = step
    return parts
"""
RETAINS = ("profiled_data.py", WASTES.splitlines().index("            loss.backward(retain_graph=keep)") + 1)


# What is made, and what of it is seen: a table of which few rows are read, graphs that are kept, anomaly detection.
@pytest.mark.parametrize(
    ("made", "seen"),
    [
        ("", {"table"}),
        ("keep=False", {"table"}),
        ("rows=50", set()),
        ("sparse=True", set()),
        ("tied=True", set()),
        ("rows=50, keep=True", {"graphs"}),
        ("rows=50, keep=False", set()),
        ("rows=50, keep=True, both=True", set()),
        ("rows=50, anomaly=True", {"anomaly"}),
    ],
)
def test_what_is_done_without_need_is_seen_and_its_innocent_twins_are_not(
    profiled: Any, monkeypatch: pytest.MonkeyPatch, made: str, seen: set[str]
) -> None:
    monkeypatch.setattr(capture, "BETWEEN_STEPS", RETAINED_STEPS + 4)
    monkeypatch.setattr(capture.FunctionProfiles, "_wait", lambda self: setattr(self, "due_ns", 0))
    # Other tests of this process may have compiled something.
    monkeypatch.setattr(close_looks, "_compiled", lambda: False)
    before = torch.autograd.backward.__code__
    try:
        result = profiled(f"{WASTES}\ndef factory(settings):\n    return made({made})\n", "run.max_steps=40")
    finally:
        torch.autograd.set_detect_anomaly(False)
    assert torch.autograd.backward.__code__ is before
    events = profiles(result)
    assert len(events) > 1
    tables = [table for event in events[1:] for table in event.tables]
    assert {(*table[:5], table[6]) for table in tables} == (
        {("Net.table", "Embedding", 5000, 8, 8, "AdamW")} if "table" in seen else set()
    )
    assert {event.retains for event in events} - {None} == ({RETAINS} if "graphs" in seen else set())
    assert {event.anomaly for event in events} == {"anomaly" in seen}
    causes = {item.cause: item for item in diagnose(result.snapshot, few_steps=True)}
    assert ("retain-graph" in causes) is ("graphs" in seen)
    if "graphs" in seen:
        assert causes["retain-graph"].changes[0].where == f"profiled_data.py:{RETAINS[1]}"
    # Hooks that were there for a step are gone.
    assert not any(key.startswith("hooks:") for key in events[-1].sizes)


def test_looking_again_and_again_makes_nothing_new() -> None:
    before = torch.autograd.backward.__code__
    looks = close_looks.CloseLooks(torch.nn.Linear(2, 2), list, lambda: 1, keeps=True)
    looks.begin()
    heard, classes = torch.autograd.backward.__code__, len(Probe.__subclasses__())
    assert heard is not before
    for _ in range(3):
        looks.end()
        looks.begin()
        assert torch.autograd.backward.__code__ is heard
    assert len(Probe.__subclasses__()) == classes
    looks.drop()
    assert torch.autograd.backward.__code__ is before
