"""`ndd-console try`: what it prints and records."""

from __future__ import annotations

import io
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from ndd_console.cli.printing import say, stoppable
from ndd_console.cli.try_ import TrialProgress
from ndd_engine.record.rundir import RunDir
from ndd_engine.record.snapshot import Snapshot
from ndd_engine.trial.outcome import MEASURING, Progress
from tests.records import events_of, snapshot_of
from tests.trial.trial_help import SOURCE, planted
from tests.waiting import LIMIT_S, until

from .program import run, start

TINY = (
    "--workload", "eeg", "--set", "workload.samples=400", "--set", "batch.sequence=8", "--set", "batch.micro=16",
    "--set", "run.threads=1", "--set", "run.device=cpu", "--set", "evaluate.every_epochs=0",
)  # fmt: skip


def snapshot(folder: Path) -> Snapshot:
    return snapshot_of(RunDir(folder / "runs" / "one"))


@pytest.mark.slow
def test_a_live_run_is_paused_then_resumes_and_records_the_result(tmp_path: Path) -> None:
    training = start(
        "train", "--headless", "--run", "one", *TINY, "--set", "run.epochs=1000000", folder=tmp_path
    )
    try:
        until(lambda: snapshot(tmp_path).step >= 5)
        change = ("--set", "batch.micro=64", "--cause", "small-micro")
        done = run("try", "one", *change, "--json", folder=tmp_path, timeout=150)
        assert done.returncode == 0, done.stderr
        step = snapshot(tmp_path).step
        until(lambda: snapshot(tmp_path).step >= step + 5)
    finally:
        training.send_signal(signal.SIGINT)
        training.communicate(timeout=LIMIT_S)
    event = json.loads(done.stdout)
    assert (event["type"], event["against"], event["sets"]) == ("trial", "run one", ["batch.micro=64"])
    assert event["verdict"] == "faster" and event["low"] > 1, event["text"]
    assert event["cause"] == "small-micro"
    found = snapshot(tmp_path)
    assert [trial.text for trial in found.trials] == [event["text"]]
    events = events_of(RunDir(tmp_path / "runs" / "one"))
    (pause,) = [event.text for event in events if event.type == "mark" and event.kind == "pause"]
    assert re.search(r"process \d+", pause)


@pytest.mark.long
def test_a_candidate_that_fails_is_reported_in_one_sentence(tmp_path: Path) -> None:
    planted(tmp_path)
    line = SOURCE.splitlines().index('                raise ValueError("this model is broken")') + 1
    done = run("try", "planted.toml", "--set", "workload.options.fault=broken", "--json", folder=tmp_path)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    event = json.loads(done.stdout)
    assert event["verdict"] == "failed" and "ValueError" in event["text"]
    assert f"planted.py:{line}" in event["text"]
    assert not (tmp_path / "runs").exists()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def figures(text: str) -> list[list[str]]:
    """The numbers of each line."""
    return [re.findall(r"[0-9.]+", line) for line in text.splitlines()]


def test_progress_moves_on_a_terminal_and_is_lines_elsewhere() -> None:
    plain, terminal = io.StringIO(), Terminal()
    for stream in (plain, terminal):
        shown = TrialProgress(stream)
        for second in range(8):
            shown.look(Progress("measuring", float(second), 60.0, second // 4, 1.5, 1.4, 1.6))
        shown.finish()
    assert figures(plain.getvalue()) == [
        ["0", "60", "1.50", "1.40", "1.60"], ["4", "60", "1", "1.50", "1.40", "1.60"],
    ]  # fmt: skip
    assert "\n" not in terminal.getvalue()
    assert terminal.getvalue().count("\r\x1b[K") == 9


def test_progress_never_exceeds_the_budget_and_says_what_is_still_done() -> None:
    plain, terminal = io.StringIO(), Terminal()
    stages = ((58, MEASURING), (64, MEASURING), (70, MEASURING), (75, "warming up the candidate"))
    for stream in (plain, terminal):
        shown = TrialProgress(stream)
        for second, stage in stages:
            shown.look(Progress(stage, float(second), 60.0, 3))
    assert figures(plain.getvalue()) == [["58", "60", "3"], ["60", "60", "3"], ["60", "60", "3"]]
    assert len(set(plain.getvalue().splitlines())) == 3
    assert "60 of 60 s" in terminal.getvalue() and "70 of" not in terminal.getvalue()


@pytest.mark.long
@pytest.mark.promise
def test_ctrl_c_prints_the_result_so_far(tmp_path: Path) -> None:
    trial = start(
        "try", *TINY, "--set", "batch.micro=64", "--budget", "1000", "--json", folder=tmp_path, group=True
    )
    assert trial.stderr is not None and trial.stdout is not None
    trial.stderr.readline()
    trial.send_signal(signal.SIGINT)
    out, err = trial.communicate(timeout=LIMIT_S)
    assert trial.returncode == 130, err
    assert json.loads(out)["verdict"] == "stopped"


class Interrupted(io.RawIOBase):
    """A stream in whose first write Ctrl-C arrives."""

    def __init__(self) -> None:
        self.written = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.written += len(data)
        if self.written == len(data):
            os.kill(os.getpid(), signal.SIGINT)
        return len(data)


def test_ctrl_c_while_a_line_is_printed_stops_after_it(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    stream = Interrupted()
    monkeypatch.setattr("sys.stderr", io.TextIOWrapper(io.BufferedWriter(stream), line_buffering=True))
    with stoppable("the trial") as stop:
        say("a line")
        assert stop.is_set() and stop.exit_status == 130 and stream.written == len("a line\n")
    assert capfd.readouterr().err


def test_waiting_for_another_trial_is_one_line() -> None:
    """Its text has how long the other one has lasted, which was a new line every tenth of a second."""
    stream = io.StringIO()
    shown = TrialProgress(stream)
    for process, tenths in ((7, 1), (7, 2), (7, 3), (9, 1), (9, 2)):
        text = f"waiting for the trial of a=1 (process {process}, for {tenths}00 ms) on cpu"
        shown.look(Progress(text, 0.0, 60.0))
    shown.look(Progress("preparing", 1.0, 60.0))
    first, second, last = stream.getvalue().splitlines()
    assert "process 7" in first and "process 9" in second and last.endswith("preparing")
