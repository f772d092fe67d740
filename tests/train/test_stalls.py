"""A loop without progress is reported with the line it is at."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ndd_engine.measure import reporting
from ndd_engine.measure.phase_clock import DATA_WAIT, PhaseClock
from ndd_engine.measure.reporting import STALLED_S, StallWatch
from ndd_engine.record.events import Event, MarkEvent
from ndd_watch.own import own, short


@pytest.fixture
def waiting() -> Iterator[threading.Thread]:
    """A thread that waits in a function of this file."""
    done, begun = threading.Event(), threading.Event()

    def read_slowly() -> None:
        begun.set()
        done.wait()

    thread = threading.Thread(target=read_slowly)
    thread.start()
    begun.wait()
    yield thread
    done.set()
    thread.join()


def test_a_stall_is_told_with_its_phase_and_line_and_again_when_it_has_doubled(
    waiting: threading.Thread,
) -> None:
    now = 0
    clock = PhaseClock(lambda: now)
    clock.enter(DATA_WAIT)
    told: list[Event] = []
    resting = False
    assert waiting.ident is not None
    watch = StallWatch(waiting.ident, clock, told.append, lambda: 7, lambda: resting)
    texts = []
    for seconds in (STALLED_S - 1, STALLED_S, STALLED_S + 5, 2 * STALLED_S, 3 * STALLED_S):
        now = int(seconds * 1e9)
        watch.look()
        texts.append(len(told))
    assert texts == [0, 1, 1, 2, 2]
    mark = told[0]
    assert isinstance(mark, MarkEvent) and (mark.kind, mark.step) == ("warning", 7)
    assert all(part in mark.text for part in ("30.0 s", "data_wait", "test_stalls.py:", "read_slowly"))
    # After progress, and after a pause, it counts anew.
    clock.enter(DATA_WAIT)
    watch.look()
    now += int(STALLED_S * 1e9)
    resting = True
    watch.look()
    assert len(told) == 2
    resting = False
    watch.look()
    assert len(told) == 3


def test_a_run_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporting, "PERIOD_S", 0.01)
    watch = StallWatch(threading.get_ident(), PhaseClock(), lambda event: None, lambda: 0, lambda: False)
    watch.start()
    watch.stop()
    watch.stop()
    assert "ndd-stalls" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize(
    ("file", "is_own"),
    [
        (torch.nn.functional.__file__, False),
        (os.__file__, False),
        (pytest.__file__, False),
        (reporting.__file__, False),
        (str(Path(reporting.__file__).parents[1] / "workloads" / "eeg.py"), True),
        (str(Path(reporting.__file__).parents[1] / "workloads" / "factory_data.py"), False),
        (__file__, True),
        ("<string>", False),
    ],
)
def test_what_counts_as_the_users_own(file: str, is_own: bool) -> None:
    assert own(compile("0", file, "exec")) is is_own


def test_files_are_told_as_people_know_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert short(str(tmp_path / "data" / "my.py")) == str(Path("data", "my.py"))
    assert short("/usr/lib/python3/threading.py") == "python3/threading.py"
