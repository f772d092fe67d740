"""A trial in a real terminal: the run resumes however its screen is left."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from ndd_engine.record.rundir import RunDir
from ndd_engine.record.snapshot import Snapshot
from tests.records import snapshot_of
from tests.waiting import lives, until

from .screen import ENDLESS, Terminal


def look(runs: Path) -> Snapshot:
    return snapshot_of(RunDir(runs / "live"))


def sides(terminal: Terminal) -> list[psutil.Process]:
    """The processes of a trial in this terminal."""
    own = psutil.Process(terminal.process.pid).children(recursive=True)
    return [process for process in own if "ndd_engine.trial.side" in process.cmdline()]


def begin(terminal: Terminal, runs: Path) -> list[psutil.Process]:
    """Type a change, wait until it is measured, and return the trial's processes."""
    terminal.press("t")
    terminal.until("measure a change against run live")
    terminal.press("\x1b[B" * 20)
    terminal.press("batch.mikro=4\r")
    terminal.until("did you mean micro?")
    terminal.press("\x15batch.micro=4\r")
    terminal.until("measuring batch.micro=4")
    until(lambda: look(runs).status == "paused", "the run was not paused")
    until(lambda: len(sides(terminal)) == 2, "the trial has no processes")
    return sides(terminal)


def resumes(runs: Path, processes: list[psutil.Process]) -> None:
    until(lambda: look(runs).status == "training", "the run is still paused")
    step = look(runs).step
    until(lambda: look(runs).step > step, "the run does not resume")
    until(lambda: not any(map(lives, processes)), "processes of the trial are left")


@pytest.mark.long
def test_stopping_a_trial_and_losing_the_terminal_in_one(tmp_path: Path) -> None:
    with Terminal("train", "--run", "live", *ENDLESS, runs=tmp_path) as terminal:
        terminal.until("backward")
        processes = begin(terminal, tmp_path)
        terminal.press("\x1b")
        terminal.until("stopped before")
        resumes(tmp_path, processes)
        terminal.press("t")
        terminal.until("earlier trials")
        assert "batch.micro=4" in terminal.text and "stopped" in terminal.text
        terminal.press("\x1b")
        terminal.until("● training")
        processes = begin(terminal, tmp_path)
        terminal.hang_up()
        resumes(tmp_path, processes)
