"""Profiler captures from the command line: events, log lines and a trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .program import run

pytestmark = pytest.mark.timeout(150)

TINY = (
    "--workload",
    "eeg",
    "--set",
    "workload.samples=4000",
    "--set",
    "workload.channels=2",
    "--set",
    "batch.micro=16",
)


@pytest.mark.long
def test_captures_and_a_trace(tmp_path: Path) -> None:
    done = run(
        "train", *TINY, "--max-steps", "30", "--kernels-every", "10", "--trace", "t.json", "--headless", "--json",
        "--set", "evaluate.every_epochs=0", "--set", "checkpoint.every_epochs=0", folder=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    captures = [event for event in map(json.loads, done.stdout.splitlines()) if event["type"] == "kernels"]
    assert [event["step"] for event in captures] == [14, 24]
    for event in captures:
        assert event["busy_ns"] + sum(event["idle_ns"].values()) == event["wall_ns"]
        assert event["trace"] == str(tmp_path / "t.json")
    assert done.stderr.count("compute idle") == 2
    assert "operators" in done.stderr
    # The profiler's own messages stay out of it.
    assert "USDT" not in done.stderr
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]


@pytest.mark.long
def test_a_trace_that_cannot_be_written_is_reported_at_once(tmp_path: Path) -> None:
    done = run("train", *TINY, "--headless", "--trace", "no/such/t.json", folder=tmp_path)
    assert done.returncode == 2
    assert "log.trace" in done.stderr
    assert "no/such" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()
    negative = run("train", *TINY, "--headless", "--kernels-every", "-1", folder=tmp_path)
    assert negative.returncode == 2
    assert "--kernels-every" in negative.stderr
