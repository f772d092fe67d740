"""A run of several ranks in a real terminal: the screen, its keys, and what is left of it."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import psutil
import pytest

from ndd_engine.record.rundir import all_runs
from tests.terminal.screen import ENDLESS, Terminal


@pytest.mark.long
@pytest.mark.budget(25)
def test_two_ranks_are_shown_paused_and_stopped_by_keys(tmp_path: Path) -> None:
    with Terminal("train", "--workload", "chartext", *ENDLESS, "--ranks", "2", runs=tmp_path) as terminal:
        terminal.until("2 ranks, DDP")
        terminal.until("exchange")
        (run,) = all_runs(tmp_path)
        events = [json.loads(line) for line in run.events.read_text().splitlines()]
        ranks = [event["pid"] for event in events if event["type"] == "run"]
        terminal.press("r")
        terminal.until("Slowest ranks")
        terminal.press("\x1b")
        terminal.until("p pause")
        terminal.press("p")
        terminal.until("‖ paused")
        terminal.press("p")
        terminal.until("● training")
        terminal.press("q")
        terminal.until("keep it running")
        terminal.press("s")
        assert terminal.wait() == 0
        assert f"--resume {run.name}" in terminal.words
    assert not any(psutil.pid_exists(pid) for pid in ranks)
    assert list((run.path / "checkpoints").glob("step-*"))


@pytest.mark.slow
@pytest.mark.long
def test_ctrl_c_after_a_stop_that_does_not_end_kills_the_ranks(tmp_path: Path) -> None:
    with Terminal("train", "--workload", "chartext", *ENDLESS, "--ranks", "2", runs=tmp_path) as terminal:
        terminal.until("2 ranks, DDP")
        (run,) = all_runs(tmp_path)
        record = (run.ranks / "1" / "events.jsonl").read_text().splitlines()
        (hung,) = [event["pid"] for event in map(json.loads, record) if event["type"] == "run"]
        launcher = psutil.Process(hung).parent()
        assert launcher is not None
        ranks = [process.pid for process in launcher.children()]
        os.kill(hung, signal.SIGSTOP)
        terminal.press("q")
        terminal.until("keep it running")
        terminal.press("s")
        terminal.until("stopping")
        terminal.press("\x03")
        assert terminal.wait() == 130
    assert not any(psutil.pid_exists(pid) for pid in ranks)
