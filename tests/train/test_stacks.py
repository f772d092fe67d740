"""A stack sample names the user's own line, or a library's if there is none."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ndd_engine.measure.stacks import TOP, StackWatch
from train_help import EVERY_STEP, Trainer

from ndd_engine.measure import stacks
from ndd_engine.measure.clock import FORWARD, PhaseClock
from ndd_engine.record.events import Event, StacksEvent

SLOW = """\
import time
from types import SimpleNamespace

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(3, 4), Slow(), nn.Linear(4, 1))

    def forward(self, x):
        return self.layer(x)


class Slow(nn.Module):
    def forward(self, x):
        time.sleep(0.02)
        return x.relu()


def loss(output, batch):
    return nn.functional.mse_loss(output.squeeze(1), batch[1])


def factory(settings):
    data = torch.utils.data.TensorDataset(torch.randn(200, 3), torch.randn(200))
    return SimpleNamespace(model=Net(), train_data=data, loss=loss)
"""


def watch(put: list[Event], thread: int | None = None, hz: float = 100, **more: Any) -> StackWatch:
    clock = PhaseClock()
    clock.enter(FORWARD)
    own = threading.get_ident() if thread is None else thread
    resting = more.get("resting", lambda: False)
    return StackWatch(own, hz, clock, put.append, lambda: 7, resting)


@pytest.fixture
def waiting() -> Iterator[threading.Thread]:
    """A thread in which nothing but Python's own library runs."""
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    yield thread
    done.set()
    thread.join()


def test_the_slow_line_of_a_users_model_is_named(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "slow_model.py").write_text(SLOW)
    result = trainer.train(
        "workload.name=slow_model:factory", "batch.micro=4", "run.threads=1", "run.max_steps=30",
        "log.stacks_hz=50", "checkpoint.at_end=false", "evaluate.at_end=false", *EVERY_STEP,
    )  # fmt: skip
    assert result.end is not None and result.end.status == "done", result.end
    found = result.snapshot.stacks
    assert found is not None and found.step == 30 and found.looks >= 10
    phase, file, line, function, looks, own = found.frames[0]
    sleeping = SLOW.splitlines().index("        time.sleep(0.02)") + 1
    assert (file, line, function, own) == ("slow_model.py", sleeping, "Slow.forward", 1)
    assert phase.partition("/")[0] == "forward"
    assert looks > found.looks / 2
    # This test began the run, and takes none of its time.
    assert not any(Path(frame[1]).name == "test_stacks.py" for frame in found.frames)
    # At 0 samples a second there are none.
    result = trainer.train(*trainer.ndd, "run.max_steps=30", "log.stacks_hz=0")
    assert result.snapshot.stacks is None


def test_a_frame_of_the_users_code_is_found_below_those_of_libraries() -> None:
    told: list[Event] = []
    looker = watch(told)
    model = torch.nn.Sequential(torch.nn.Identity())
    # Called through torch: the frames above this function are torch's.
    model[0].register_forward_hook(lambda *_: looker.look())
    model(torch.zeros(1))
    looker._tell()
    (event,) = told
    assert isinstance(event, StacksEvent)
    ((phase, file, _, function, looks, own),) = event.frames
    assert (event.step, event.looks, phase, looks, own) == (7, 1, "forward", 1, 1)
    assert Path(file).name == "test_stacks.py" and "lambda" in function


def test_where_only_a_library_runs_its_innermost_frame_is_told(waiting: threading.Thread) -> None:
    told: list[Event] = []
    looker = watch(told, waiting.ident)
    looker.look()
    looker._tell()
    (event,) = told
    assert isinstance(event, StacksEvent)
    ((_, file, _, function, _, own),) = event.frames
    assert Path(file).name == "threading.py" and own == 0 and function.startswith("Condition.wait")


@pytest.mark.parametrize(
    ("file", "own"),
    [
        (torch.nn.functional.__file__, False),
        (os.__file__, False),
        (pytest.__file__, False),
        (stacks.__file__, False),
        (str(Path(stacks.__file__).parents[1] / "workloads" / "eeg.py"), True),
        (__file__, True),
        ("<string>", False),
    ],
)
def test_what_counts_as_the_users_own(file: str, own: bool) -> None:
    assert watch([])._is_own(file) is own


def test_files_are_told_as_people_know_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    looker = watch([])
    assert looker._short(str(tmp_path / "data" / "my.py")) == str(Path("data", "my.py"))
    assert looker._short("/usr/lib/python3/threading.py") == "python3/threading.py"


def test_a_pause_and_a_thread_that_ended_show_nothing() -> None:
    told: list[Event] = []
    paused = watch(told, resting=lambda: True)
    ended = watch(told, 1)
    for looker in (paused, ended):
        looker.look()
        looker._tell()
    assert not told


def test_it_tells_now_and_then_and_at_the_end(
    waiting: threading.Thread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "FIRST_S", 0.05)
    monkeypatch.setattr(stacks, "EVERY_S", 0.3)
    told: list[Event] = []
    looker = watch(told, waiting.ident, resting=lambda: False)
    looker.start()
    deadline = time.monotonic() + 30
    while len(told) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    looker.stop()
    looker.stop()
    looks = [event.looks for event in told if isinstance(event, StacksEvent)]
    # The first event comes soon, then periodically; a few last samples do not replace earlier ones.
    assert looks[:2] == [5, 30] and all(count >= stacks.FEW for count in looks[2:])
    assert "ndd-stacks" not in {thread.name for thread in threading.enumerate()}


def test_only_the_most_seen_frames_are_told() -> None:
    told: list[Event] = []
    looker = watch(told)
    for line in range(TOP + 5):
        looker._seen[("forward", "a.py", line, "f", 1)] = line + 1
    looker._tell()
    (event,) = told
    assert isinstance(event, StacksEvent)
    assert len(event.frames) == TOP and event.frames[0][2] == TOP + 4
    assert event.looks == sum(range(1, TOP + 6))
