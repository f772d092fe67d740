"""The live screen in a real terminal: start, keys, resize and every way to leave it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from ndd_engine.record.rundir import RunDir
from tests.records import snapshot_of
from tests.waiting import until

from .screen import ENDLESS, Terminal

pytestmark = pytest.mark.long


def state(runs: Path, name: str) -> str:
    return snapshot_of(RunDir(runs / name)).status


@pytest.mark.promise
def test_keys_resize_and_stop(tmp_path: Path) -> None:
    # Exported by some shells and tools: the size at their start, which the terminal does not keep.
    with Terminal("train", "--run", "live", *ENDLESS, runs=tmp_path, COLUMNS="80", LINES="24") as terminal:
        screen = terminal.until("● training")
        assert "live" in screen.splitlines()[0]
        terminal.until("backward")
        terminal.press("p")
        terminal.until("‖ paused")
        terminal.press("c")
        terminal.until("checkpoint at")  # no epoch ends meanwhile and takes its place
        terminal.press("p")
        terminal.until("● training")
        assert list((tmp_path / "live" / "checkpoints").glob("step-*"))
        terminal.press("e")
        terminal.until("bits_per_char")
        terminal.press("?")
        terminal.until("glossary")
        terminal.press("\x1b")
        terminal.until("● training")
        terminal.resize(120, 40)
        terminal.until(lambda text: "● training" in text.splitlines()[0][100:])
        terminal.press("q")
        terminal.until("reattach")
        terminal.press("s")
        assert terminal.wait() == 0
        assert terminal.echoes()
        assert b"\x1b[?1049l" in terminal.raw
        assert "stopped" in terminal.text
    assert state(tmp_path, "live") == "stopped"


@pytest.mark.promise
def test_sigterm_checkpoints_stops_and_restores_the_terminal(tmp_path: Path) -> None:
    with Terminal("train", "--run", "live", *ENDLESS, runs=tmp_path) as terminal:
        terminal.until("backward")
        os.kill(terminal.process.pid, signal.SIGTERM)
        assert terminal.wait() == 143
        assert terminal.echoes()
    assert state(tmp_path, "live") == "terminated"
    assert list((tmp_path / "live" / "checkpoints").glob("step-*"))


@pytest.mark.promise
def test_lost_connection_leaves_the_run_and_attach_steers_it(tmp_path: Path) -> None:
    with Terminal("train", "--run", "live", *ENDLESS, runs=tmp_path) as terminal:
        terminal.until("backward")
        terminal.hang_up()
        with Terminal("attach", "live", runs=tmp_path, columns=100, rows=30) as second:
            second.until("● training")
            second.press("p")
            second.until("‖ paused")
            second.press("s")
            second.until("live?")
            second.press("s")
            second.until("■ stopped")
            second.press("q")
            assert second.wait() == 0
    assert state(tmp_path, "live") == "stopped"


@pytest.mark.promise
def test_leave_it_running_gives_the_prompt_back(tmp_path: Path) -> None:
    with Terminal("train", "--run", "live", *ENDLESS, runs=tmp_path) as terminal:
        terminal.until("backward")
        terminal.press("q")
        terminal.until("reattach")
        terminal.press("d")
        assert terminal.wait() == 0
        assert terminal.echoes()
        assert "attach" in terminal.words
        assert state(tmp_path, "live") in ("training", "evaluating", "checkpointing")


@pytest.mark.promise
def test_killed_run_restores_the_terminal_and_resumes(tmp_path: Path) -> None:
    sets = (*ENDLESS, "--set", "checkpoint.every_steps=20")
    with Terminal("train", "--run", "live", *sets, runs=tmp_path) as terminal:
        terminal.until("checkpoint at")
        owner = RunDir(tmp_path / "live").live_owner()
        assert owner is not None
        os.kill(owner["pid"], signal.SIGKILL)
        assert terminal.wait() == 137
        assert terminal.echoes()
        assert "--resume" in terminal.words
    assert state(tmp_path, "live") == "lost"
    with Terminal("train", "--resume", "live", runs=tmp_path) as again:
        again.until("● training")
        os.kill(again.process.pid, signal.SIGKILL)  # the process with the screen, whose child trains
        assert again.wait() == 137
        until(lambda: RunDir(tmp_path / "live").live_owner() is None)


def test_failed_run_shows_why_and_keeps_the_screen(tmp_path: Path) -> None:
    sets = (*ENDLESS, "--set", "optimizer.lr=1e30")
    with Terminal("train", "--run", "live", *sets, runs=tmp_path) as terminal:
        assert "loss" in terminal.until("✖ failed")
        terminal.press("q")
        assert terminal.wait() == 1


@pytest.mark.promise
def test_home_shows_the_machine_and_starts_a_workload(tmp_path: Path) -> None:
    with Terminal(runs=tmp_path, NDD_RUNS=str(tmp_path), columns=100, rows=30) as terminal:
        terminal.until("chartext")
        terminal.until("eeg")
        terminal.until("usable")
        terminal.press("s")
        terminal.until("● training")
        terminal.press("\x03")
        terminal.until(lambda text: "stopping" in text or "interrupted" in text)
        terminal.press("\x03")
        assert terminal.wait() == 130
