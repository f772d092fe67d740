"""A run without a terminal: log lines, events, signals, and what other commands print about it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from ndd_engine.record.events import PHASES
from ndd_engine.record.reader import RunReader
from ndd_engine.record.rundir import RunDir

from .program import ENDLESS, run, start

pytestmark = pytest.mark.timeout(150)


def wait_for(folder: Path, text: str, seconds: float = 150) -> None:
    """Until the record of run "one" holds a text."""
    events = folder / "runs" / "one" / "events.jsonl"
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if events.exists() and text in events.read_text(encoding="utf-8"):
            return
        time.sleep(0.05)
    raise AssertionError(f"not in the record: {text}")


def status(folder: Path) -> str:
    reader = RunReader(RunDir(folder / "runs" / "one"))
    reader.poll()
    return reader.snapshot().status


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=150)
    return process.returncode, out, err


def test_without_a_terminal_train_runs_headless_and_logs(tmp_path: Path) -> None:
    done = run("train", "--max-steps", "40", "--set", "log.headless_s=0.2", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search("no CUDA (card|GPU): size", done.stderr)  # the model size it chose, and why
    assert "steps/s" in done.stderr and "loss" in done.stderr
    assert "done: finished all 40 steps" in done.stdout and "checkpoints" in done.stdout
    log = (tmp_path / "runs" / "chartext-001" / "console.log").read_text()
    assert re.search("no CUDA (card|GPU): size", log)
    runs = json.loads(run("runs", "--json", folder=tmp_path).stdout)["runs"]
    assert runs[0]["name"] == "chartext-001" and runs[0]["status"] == "done" and runs[0]["step"] == 40
    assert "chartext-001" in run("runs", folder=tmp_path).stdout
    attached = run("attach", folder=tmp_path)
    assert attached.returncode == 0 and "done: finished all 40 steps" in attached.stdout


def test_events_as_lines(tmp_path: Path) -> None:
    done = run(
        "train",
        "--json",
        "--workload",
        "ndd",
        "--max-steps",
        "20",
        "--set",
        "log.window_s=0",
        folder=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert [event["type"] for event in events][-1] == "end"
    windows = [event for event in events if event["type"] == "window"]
    assert sum(window["steps"] for window in windows) == 20
    for window in windows:
        top = [item["host_ns"] for name, item in window["phases"].items() if name in PHASES]
        assert sum(top) == window["wall_ns"]
    recorded = (tmp_path / "runs" / "ndd-001" / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["type"] for line in recorded] == [event["type"] for event in events]


@pytest.mark.parametrize(
    ("number", "code", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
def test_signal_checkpoints_then_stops(tmp_path: Path, number: signal.Signals, code: int, word: str) -> None:
    process = start("train", "--run", "one", *ENDLESS, folder=tmp_path)
    wait_for(tmp_path, '"type":"window"')
    process.send_signal(number)
    returned, out, err = finish(process)
    assert returned == code and "Traceback" not in err
    assert word in out and "checkpoint at step" in out
    assert status(tmp_path) == word
    assert list((tmp_path / "runs" / "one" / "checkpoints").glob("step-*.pt"))


def test_second_interrupt_stops_at_once(tmp_path: Path) -> None:
    # An evaluation that takes long: the first Ctrl-C waits for its end, the second does not.
    slow = (
        "--set",
        "evaluate.every_steps=5",
        "--set",
        "batch.micro=1",
        "--set",
        "workload.eval_fraction=0.45",
    )
    process = start("train", "--run", "one", *ENDLESS, *slow, folder=tmp_path)
    wait_for(tmp_path, '"status":"evaluating"')
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    returned, out, err = finish(process)
    assert returned == 130 and "at once" in out and "Traceback" not in err
    assert status(tmp_path) == "interrupted"


def test_hangup_does_not_stop_a_headless_run(tmp_path: Path) -> None:
    process = start("train", "--run", "one", *ENDLESS, folder=tmp_path)
    wait_for(tmp_path, '"type":"window"')
    process.send_signal(signal.SIGHUP)
    wait_for(tmp_path, '"epoch":1,')
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == 143


def test_hangup_stops_when_configured(tmp_path: Path) -> None:
    process = start("train", "--run", "one", *ENDLESS, "--set", "console.on_hangup=stop", folder=tmp_path)
    wait_for(tmp_path, '"type":"window"')
    process.send_signal(signal.SIGHUP)
    assert finish(process)[0] == 143
    assert status(tmp_path) == "terminated"


def test_two_processes_never_write_one_run(tmp_path: Path) -> None:
    process = start("train", "--run", "one", *ENDLESS, "--set", "checkpoint.every_steps=10", folder=tmp_path)
    wait_for(tmp_path, '"kind":"checkpoint"')
    second = run("train", "--resume", "one", folder=tmp_path)
    assert second.returncode == 2
    assert f"process {process.pid}" in second.stderr and "attach one" in second.stderr
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == 143


def test_reader_that_leaves_does_not_stop_the_run(tmp_path: Path) -> None:
    process = start("train", "--run", "one", "--json", *ENDLESS, "--max-steps", "2000", folder=tmp_path)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=150) == 0
    assert status(tmp_path) == "done"


def test_interrupt_of_the_whole_group_with_loader_workers(tmp_path: Path) -> None:
    """Ctrl-C reaches the workers too; they must live until the checkpoint."""
    process = start(
        "train", "--run", "one", *ENDLESS, "--set", "loader.workers=2", folder=tmp_path, group=True
    )
    wait_for(tmp_path, '"type":"window"')
    os.killpg(process.pid, signal.SIGINT)
    returned, out, err = finish(process)
    assert returned == 130 and "checkpoint at step" in out, out + err
    assert status(tmp_path) == "interrupted"


def test_reader_that_stops_reading_stops_neither_run_nor_record(tmp_path: Path) -> None:
    every_step = ("--set", "log.window_s=0", "--set", "checkpoint.every_epochs=0")
    process = start(
        "train", "--run", "one", "--json", *ENDLESS, *every_step, "--max-steps", "400", folder=tmp_path
    )
    wait_for(tmp_path, '"type":"end"')
    assert status(tmp_path) == "done"
    process.kill()
    process.communicate()
