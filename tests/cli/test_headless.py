"""A run without a terminal, as a process: log lines, events, signals, and readers of its output."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ndd_engine.record.events import PHASES
from ndd_engine.record.rundir import RunDir
from ndd_engine.record.snapshot import Snapshot
from tests import forked
from tests.records import snapshot_of
from tests.trial.written_runs import write_run
from tests.waiting import LIMIT_S, contains, until

from .program import ENDLESS, call, capture_fails, environment, run, start

pytestmark = pytest.mark.long

F_SETPIPE_SZ = 1031
EEG = (
    "--workload", "eeg", "--set", "workload.samples=4000", "--set", "workload.channels=2", "--set", "batch.micro=16",
    "--set", "run.threads=1", "--set", "evaluate.every_epochs=0", "--set", "checkpoint.every_epochs=0",
)  # fmt: skip


def wait_for(folder: Path, text: str) -> None:
    """Until the record of run "one" holds a text."""
    events = folder / "runs" / "one" / "events.jsonl"
    until(lambda: contains(events, text), f"not in the record: {text}")


def recorded(folder: Path) -> list[dict[str, Any]]:
    """The events of run "one"; none of its files had the number of a standard stream."""
    return [json.loads(line) for line in (folder / "runs/one/events.jsonl").read_text().splitlines()]


def snapshot(folder: Path) -> Snapshot:
    return snapshot_of(RunDir(folder / "runs" / "one"))


def status(folder: Path) -> str:
    return snapshot(folder).status


def begin(folder: Path, text: str, *more: str, **options: bool) -> subprocess.Popen[str]:
    """An endless run "one", whose record holds a text."""
    process = start("train", "--run", "one", *ENDLESS, *more, folder=folder, **options)
    wait_for(folder, text)
    return process


def checkpoints(folder: Path) -> list[Path]:
    return list((folder / "runs" / "one" / "checkpoints").glob("step-*"))


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=150)
    assert "Traceback" not in err, err
    return process.returncode, out, err


@pytest.mark.promise
def test_without_a_terminal_train_runs_headless_and_logs(tmp_path: Path) -> None:
    """A signal that comes while Python ends does not change the status."""
    process = start(
        "train", "--run", "one", "--max-steps", "40", "--set", "log.headless_s=0.1", folder=tmp_path
    )
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if "runs/one" in line:  # the last line; Python takes a while to end
            break
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    assert code == 0 and status(tmp_path) == "done"
    assert "steps/s" in err and "loss" in err
    log = (tmp_path / "runs" / "one" / "console.log").read_text()
    # Why it chose this size of the model.
    (choice,) = (event for event in recorded(tmp_path) if event.get("kind") == "choice")
    assert choice["text"] in err and choice["text"] in log
    (row,) = json.loads(call("runs", "--json", folder=tmp_path).stdout)["runs"]
    assert (row["name"], row["status"], row["step"]) == ("one", "done", 40)
    attached = call("attach", folder=tmp_path)
    assert attached.returncode == 0 and "40 steps" in attached.stdout and "40 steps" in "".join(lines)


@pytest.mark.promise
def test_events_as_lines(tmp_path: Path) -> None:
    options = (*EEG, "--run", "one", "--max-steps", "30", "--set", "log.window_s=0")
    captured = ("--kernels-every", "10", "--trace", "t.json")
    done = run("train", "--json", *options, *captured, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    # The profiler's own messages stay out of it.
    assert "USDT" not in done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert events[-1]["type"] == "end"
    windows = [event for event in events if event["type"] == "window"]
    assert sum(window["steps"] for window in windows) == 30
    for window in windows:
        top = [item["host_ns"] for name, item in window["phases"].items() if name in PHASES]
        assert sum(top) == window["wall_ns"]
    assert [event["type"] for event in recorded(tmp_path)] == [event["type"] for event in events]
    captures = [event for event in events if event["type"] == "kernels"]
    assert [event["step"] for event in captures] == [14, 24]
    for event in captures:
        assert event["busy_ns"] + sum(event["idle_ns"].values()) == event["wall_ns"]
        assert event["trace"] == str(tmp_path / "t.json")
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]


# Endings


@pytest.mark.promise
def test_a_second_process_is_refused_and_a_signal_checkpoints_then_stops(tmp_path: Path) -> None:
    """SIGHUP is ignored unless it is configured to stop the run."""
    process = begin(tmp_path, '"kind":"checkpoint"', "--set", "checkpoint.every_steps=10")
    second = call("train", "--resume", "one", folder=tmp_path)
    assert second.returncode == 2
    assert str(process.pid) in second.stderr
    process.send_signal(signal.SIGHUP)
    step = snapshot(tmp_path).step
    until(lambda: snapshot(tmp_path).step > step)
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == 143 and status(tmp_path) == "terminated"
    end = recorded(tmp_path)[-1]
    assert end["checkpoint"] == f"step-{end['step']:08d}"


@pytest.mark.promise
def test_a_configured_hangup_checkpoints_then_stops(tmp_path: Path) -> None:
    process = begin(tmp_path, '"type":"window"', "--set", "console.on_hangup=stop")
    process.send_signal(signal.SIGHUP)
    assert finish(process)[0] == 143
    assert status(tmp_path) == "terminated" and checkpoints(tmp_path)


@pytest.mark.promise
def test_interrupt_of_the_whole_group_with_loader_workers(tmp_path: Path) -> None:
    """Ctrl-C reaches the workers too; they must live until the checkpoint."""
    process = begin(tmp_path, '"type":"window"', "--set", "loader.workers=2", group=True)
    os.killpg(process.pid, signal.SIGINT)
    assert finish(process)[0] == 130
    assert status(tmp_path) == "interrupted" and checkpoints(tmp_path)


@pytest.mark.promise
def test_second_interrupt_stops_at_once(tmp_path: Path) -> None:
    # An evaluation that takes long: the first Ctrl-C waits for its end, the second does not.
    sets = ("evaluate.every_steps=5", "batch.micro=1", "workload.eval_fraction=0.45")
    slow = (word for each in sets for word in ("--set", each))
    process = begin(tmp_path, '"status":"evaluating"', *slow)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    assert finish(process)[0] == 130 and status(tmp_path) == "interrupted"
    assert not [event for event in recorded(tmp_path) if event.get("kind") == "evaluation"]
    assert not checkpoints(tmp_path)


@pytest.mark.promise
@pytest.mark.skipif(sys.platform != "linux", reason="looks at the process in /proc")
def test_ctrl_c_in_the_first_moments_is_silent(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ndd_console", "train", "--headless", "--run", "one", *ENDLESS]
    for tenths in (1, 3, 6):
        process = subprocess.Popen(
            command,
            cwd=tmp_path,
            env=environment(),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        # The interpreter's own start cannot be caught: wait until it has begun to import the program.
        maps = Path(f"/proc/{process.pid}/maps")
        deadline = time.monotonic() + LIMIT_S
        while maps.exists() and "_pydantic_core" not in maps.read_text() and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(tenths * 0.05)
        process.send_signal(signal.SIGINT)
        assert finish(process)[0] == 130
        shutil.rmtree(tmp_path / "runs", ignore_errors=True)


@pytest.mark.promise
def test_a_deleted_run_folder_ends_the_run_as_failed(tmp_path: Path) -> None:
    process = begin(tmp_path, '"type":"window"', "--set", "checkpoint.every_epochs=0")
    shutil.rmtree(tmp_path / "runs" / "one", ignore_errors=True)
    assert process.stderr is not None
    for line in process.stderr:
        if "deleted" in line:
            break
    process.send_signal(signal.SIGTERM)
    returned, out, _ = finish(process)
    assert returned == 1 and "failed" in out
    assert not (tmp_path / "runs" / "one").exists()


@pytest.mark.parametrize("as_json", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_run_whose_capture_fails_goes_on_in_a_new_process(tmp_path: Path, as_json: bool) -> None:
    command = capture_fails(tmp_path)
    done = run(*command, *["--json"] * as_json, folder=tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "speed.cuda_graph=false" in done.stderr
    failed, end = (event for event in recorded(tmp_path) if event["type"] == "end")
    assert failed["status"] == "failed" and 0 < failed["step"] < 30
    assert (end["status"], end["step"]) == ("done", 30)
    if as_json:
        printed = [json.loads(line) for line in done.stdout.splitlines()]
        assert [event["status"] for event in printed if event["type"] == "end"] == ["failed", "done"]
    else:
        assert done.stdout.count("done") == 1 and "failed" not in done.stdout


# Readers of the output


def test_reader_that_leaves_does_not_stop_the_run(tmp_path: Path) -> None:
    process = start("train", "--run", "one", "--json", *EEG, "--max-steps", "300", folder=tmp_path)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=150) == 0 and status(tmp_path) == "done"


@contextlib.contextmanager
def unread(folder: Path, *sets: str) -> Iterator[subprocess.Popen[str]]:
    """Run "one", whose standard output nobody reads. Its pipe is never closed."""
    read, write = os.pipe()
    with contextlib.suppress(OSError):  # where the size of a pipe cannot be set
        fcntl.fcntl(write, F_SETPIPE_SZ, 4096)
    process = forked.Popen(
        ["--runs", "runs", "train", "--run", "one", "--json", *ENDLESS, "--set", "log.window_s=0", *sets],
        cwd=folder, env=environment(), stdout=write, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    os.close(write)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()
        os.close(read)


@pytest.mark.promise
def test_reader_that_stops_reading_stops_neither_run_nor_record(tmp_path: Path) -> None:
    with unread(tmp_path, "--max-steps", "100"):
        wait_for(tmp_path, '"type":"end"')
        assert status(tmp_path) == "done"


def test_closed_standard_streams_do_not_change_the_status_of_a_run(tmp_path: Path) -> None:
    train = shlex.join(("train", "--headless", "--run", "one", "--max-steps", "3", *EEG))
    done = subprocess.run(
        ["sh", "-c", f"exec {sys.executable} -m ndd_console --runs runs {train} 0>&- 1>&- 2>&-"],
        cwd=tmp_path, env=environment(), timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and status(tmp_path) == "done"
    assert all(event["v"] for event in recorded(tmp_path))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize(
    ("arguments", "code"), [(("train", *EEG, "--run", "one", "--max-steps", "3"), 0), (("runs",), 1)]
)
def test_a_full_standard_output_is_a_warning_of_a_run_and_a_failure_of_a_list(
    tmp_path: Path, arguments: tuple[str, ...], code: int
) -> None:
    write_run(tmp_path / "runs" / "old", [])
    with (
        Path("/dev/full").open("w") as full,
        forked.Popen(
            ["--runs", "runs", *arguments], cwd=tmp_path, env=environment(), stdout=full, stderr=subprocess.PIPE,
            text=True,
        ) as process,
    ):  # fmt: skip
        returned, _, err = finish(process)
    assert (returned, "No space" in err) == (code, True)
