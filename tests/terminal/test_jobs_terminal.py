"""Trials, tuning and several ranks in a real terminal: stopping them, and what is left of them afterwards."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from ndd_engine.config import read
from ndd_engine.record.events import RunEvent
from ndd_engine.record.rundir import RunDir, all_runs
from ndd_engine.record.snapshot import Snapshot
from tests.records import events_of, snapshot_of
from tests.waiting import lives, until

from .screen import ENDLESS, Terminal

RANKS = ("train", "--workload", "chartext", *ENDLESS, "--ranks", "2")


def stop_by_keys(terminal: Terminal) -> None:
    terminal.press("q")
    terminal.until("reattach")
    terminal.press("s")


# A trial


def look(runs: Path) -> Snapshot:
    return snapshot_of(RunDir(runs / "live"))


def sides(terminal: Terminal) -> list[psutil.Process]:
    """The processes of a trial in this terminal."""
    own = psutil.Process(terminal.process.pid).children(recursive=True)
    return [process for process in own if "ndd_engine.trial.side" in process.cmdline()]


@pytest.mark.long
def test_a_run_resumes_after_its_trial_however_that_ends(tmp_path: Path) -> None:
    """It is stopped by a key, then the terminal is lost."""
    with Terminal("train", "--run", "live", *ENDLESS, runs=tmp_path) as terminal:
        terminal.until("backward")
        for ends_by in ("\x1b", ""):
            terminal.press("t")
            terminal.until("run live")
            terminal.press("\x1b[B" * 20 + "batch.micro=4\r")
            until(lambda: look(tmp_path).status == "paused", "the run was not paused")
            until(lambda: len(sides(terminal)) == 2, "the trial has no processes")
            processes = sides(terminal)
            if ends_by:
                terminal.press(ends_by)
                until(lambda: look(tmp_path).trials != ())
            else:
                terminal.hang_up()
            until(lambda: look(tmp_path).status == "training", "the run is still paused")
            step = look(tmp_path).step
            until(lambda step=step: look(tmp_path).step > step, "the run does not resume")  # type: ignore[misc]
            until(lambda own=processes: not any(map(lives, own)), "processes are left")  # type: ignore[misc]
            if ends_by:
                # Esc leaves the page of a trial that has ended: at once if it ended just before the key was read.
                terminal.until(lambda text: "stopped: batch.micro=4" in text or "── machine" in text)
                if "── machine" not in terminal.text:
                    terminal.press("\x1b")
                terminal.until("── machine")


# Tuning


@pytest.mark.long
def test_the_screen_of_tuning_stops_and_leaves_the_table(tmp_path: Path) -> None:
    output = tmp_path / "found.toml"
    arguments = (
        "tune", "--workload", "eeg", "--set", "workload.samples=20000", "--set", "run.threads=1",
        "--only", "workers", "--budget", "60", "-o", str(output),
    )  # fmt: skip
    exported = {"COLUMNS": "80", "LINES": "24"}  # by some shells; the terminal knows better
    with Terminal(*arguments, runs=tmp_path / "runs", columns=110, rows=40, **exported) as terminal:
        terminal.until("◐ measuring")
        assert "eeg" in terminal.text and "· skipped" in terminal.text
        terminal.press("\x1b")
        terminal.until("found.toml")
        terminal.press("q")
        assert terminal.wait() == 1  # stopped before its end
        assert terminal.echoes() and "workers" in terminal.words
    assert read(output).resolve().workload.name == "eeg"


# Ranks


@pytest.mark.long
@pytest.mark.budget(25)
def test_two_ranks_are_shown_paused_and_stopped_by_keys(tmp_path: Path) -> None:
    with Terminal(*RANKS, runs=tmp_path) as terminal:
        terminal.until("2 ranks, DDP")
        terminal.until("exchange")
        (run,) = all_runs(tmp_path)
        ranks = [event.pid for event in events_of(run) if isinstance(event, RunEvent)]
        terminal.press("r")
        terminal.until("Slowest")
        terminal.press("\x1b")
        terminal.until("p pause")
        terminal.press("p")
        terminal.until("‖ paused")
        terminal.press("p")
        terminal.until("● training")
        stop_by_keys(terminal)
        assert terminal.wait() == 0
        assert f"--resume {run.name}" in terminal.words
    assert not any(psutil.pid_exists(pid) for pid in ranks)
    assert list((run.path / "checkpoints").glob("step-*"))


@pytest.mark.slow
def test_ctrl_c_after_a_stop_that_does_not_end_kills_the_ranks(tmp_path: Path) -> None:
    with Terminal(*RANKS, runs=tmp_path) as terminal:
        terminal.until("2 ranks, DDP")
        (run,) = all_runs(tmp_path)
        record = events_of(run.ranks / "1" / "events.jsonl")
        (hung,) = [event.pid for event in record if isinstance(event, RunEvent)]
        launcher = psutil.Process(hung).parent()
        assert launcher is not None
        ranks = [process.pid for process in launcher.children()]
        os.kill(hung, signal.SIGSTOP)
        stop_by_keys(terminal)
        terminal.until("stopping")
        terminal.press("\x03")
        assert terminal.wait() == 130
    assert not any(psutil.pid_exists(pid) for pid in ranks)
