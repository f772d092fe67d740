"""Tuning in a real terminal: its screen, stopping it, and what is left on the terminal afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest

from ndd_engine.config import read

from .screen import Terminal

pytestmark = pytest.mark.long


def test_the_screen_stops_and_leaves_the_table(tmp_path: Path) -> None:
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
        terminal.until("written to")
        terminal.press("q")
        assert terminal.wait() == 1  # stopped before its end
        assert terminal.echoes() and "workers" in terminal.words
    assert read(output).resolve().workload.name == "eeg"
