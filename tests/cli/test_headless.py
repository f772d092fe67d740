"""A run without a terminal: log lines, events, signals, and what other commands print about it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ndd_console.output import run_log
from ndd_console.output.run_log import Output
from ndd_engine.record.events import PHASES
from ndd_engine.record.reader import RunReader
from ndd_engine.record.rundir import RunDir
from tests.waiting import contains, until

from .program import ENDLESS, capture_fails, environment, run, start

pytestmark = [pytest.mark.long, pytest.mark.timeout(150)]

F_SETPIPE_SZ = 1031


def wait_for(folder: Path, text: str, seconds: float = 150) -> None:
    """Until the record of run "one" holds a text."""
    events = folder / "runs" / "one" / "events.jsonl"
    until(lambda: contains(events, text), seconds, f"not in the record: {text}")


def status(folder: Path) -> str:
    reader = RunReader(RunDir(folder / "runs" / "one"))
    reader.poll()
    return reader.snapshot().status


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=150)
    return process.returncode, out, err


@pytest.mark.promise
def test_without_a_terminal_train_runs_headless_and_logs(tmp_path: Path) -> None:
    done = run("train", "--max-steps", "40", "--set", "log.headless_s=0.2", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search("no CUDA GPU: size", done.stderr)  # the model size it chose, and why
    assert "steps/s" in done.stderr and "loss" in done.stderr
    assert "done: finished all 40 steps" in done.stdout and "checkpoints" in done.stdout
    log = (tmp_path / "runs" / "chartext-001" / "console.log").read_text()
    assert re.search("no CUDA GPU: size", log)
    runs = json.loads(run("runs", "--json", folder=tmp_path).stdout)["runs"]
    assert runs[0]["name"] == "chartext-001" and runs[0]["status"] == "done" and runs[0]["step"] == 40
    assert "chartext-001" in run("runs", folder=tmp_path).stdout
    attached = run("attach", folder=tmp_path)
    assert attached.returncode == 0 and "done: finished all 40 steps" in attached.stdout


@pytest.mark.promise
def test_events_as_lines(tmp_path: Path) -> None:
    done = run(
        "train",
        "--json",
        "--workload",
        "eeg",
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
    recorded = (tmp_path / "runs" / "eeg-001" / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["type"] for line in recorded] == [event["type"] for event in events]


@pytest.mark.promise
@pytest.mark.parametrize(
    ("number", "code", "word"),
    [
        (signal.SIGINT, 130, "interrupted"),
        (signal.SIGTERM, 143, "terminated"),
        (signal.SIGHUP, 143, "terminated"),
    ],
)
def test_signal_checkpoints_then_stops(tmp_path: Path, number: signal.Signals, code: int, word: str) -> None:
    process = start("train", "--run", "one", *ENDLESS, "--set", "console.on_hangup=stop", folder=tmp_path)
    wait_for(tmp_path, '"type":"window"')
    process.send_signal(number)
    returned, out, err = finish(process)
    assert returned == code and "Traceback" not in err
    assert word in out and "checkpoint at step" in out
    assert status(tmp_path) == word
    assert list((tmp_path / "runs" / "one" / "checkpoints").glob("step-*.pt"))


@pytest.mark.promise
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
    assert returned == 130 and "immediately" in out and "Traceback" not in err
    assert status(tmp_path) == "interrupted"


@pytest.mark.promise
def test_a_late_interrupt_does_not_replace_the_exit_status(tmp_path: Path) -> None:
    process = start(
        "train", "--run", "one", "--set", "workload.size=tiny", "--max-steps", "3", folder=tmp_path
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "runs/one" in line:  # the last line; Python takes a while to end
            break
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert finish(process)[0] == 0
    assert status(tmp_path) == "done"


@pytest.mark.promise
def test_hangup_does_not_stop_a_headless_run(tmp_path: Path) -> None:
    process = start("train", "--run", "one", *ENDLESS, folder=tmp_path)
    wait_for(tmp_path, '"type":"window"')
    process.send_signal(signal.SIGHUP)
    wait_for(tmp_path, '"epoch":1,')
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == 143


@pytest.mark.promise
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


@pytest.mark.promise
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


@pytest.mark.promise
def test_reader_that_stops_reading_stops_neither_run_nor_record(tmp_path: Path) -> None:
    every_step = ("--set", "log.window_s=0", "--set", "checkpoint.every_epochs=0")
    process = start(
        "train", "--run", "one", "--json", *ENDLESS, *every_step, "--max-steps", "400", folder=tmp_path
    )
    wait_for(tmp_path, '"type":"end"')
    assert status(tmp_path) == "done"
    process.kill()
    process.communicate()


@pytest.mark.parametrize("as_json", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["json", "text"])
def test_a_run_whose_reader_stopped_reading_exits_with_its_status(tmp_path: Path, as_json: bool) -> None:
    """Standard output is a full pipe that nobody reads and nobody closes."""
    read, write = os.pipe()
    with contextlib.suppress(OSError):  # where the size of a pipe cannot be set
        fcntl.fcntl(write, F_SETPIPE_SZ, 4096)
    os.set_blocking(write, False)
    with contextlib.suppress(BlockingIOError):
        while os.write(write, b"x" * 64):
            pass
    os.set_blocking(write, True)
    more = ("--json",) if as_json else ()
    command = [
        sys.executable,
        "-m",
        "ndd_console",
        "--runs",
        str(tmp_path / "runs"),
        "train",
        "--headless",
        "--run",
    ]
    process = subprocess.Popen(
        [*command, "one", *more, "--workload", "eeg", "--set", "run.epochs=100000", "--set", "run.threads=1"],
        cwd=tmp_path, env=environment(), stdout=write, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    wait_for(tmp_path, '"type":"window"')
    process.send_signal(signal.SIGTERM)
    returned, _, err = finish(process)
    os.close(read)
    os.close(write)
    assert returned == 143 and "Traceback" not in err, err
    assert "not written to standard output: its reader stopped reading" in err
    assert status(tmp_path) == "terminated"


def test_the_end_is_the_last_document_for_a_reader_that_was_too_slow(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(run_log, "PATIENT_LINES", 2)
    read, write = os.pipe()
    with contextlib.suppress(OSError):  # where the size of a pipe cannot be set
        fcntl.fcntl(write, F_SETPIPE_SZ, 4096)
    with os.fdopen(write, "w") as stream:
        output = Output(stream, "output")
        lines = [f"{number} {'x' * 3000}" for number in range(20)]
        for line in lines:
            output.data(line)
        seen: list[bytes] = []
        reader = threading.Thread(
            target=lambda: seen.append(b"".join(iter(lambda: os.read(read, 4096), b"")))
        )
        reader.start()
        lost = output.finish()
    reader.join()
    os.close(read)
    words = seen[0].decode().splitlines()
    assert words[-1] == lines[-1] and words[0] == lines[0] and len(words) < len(lines)
    assert f"{len(lines) - len(words)} lines were not written to standard output" in lost


@pytest.mark.timeout(60)
def test_a_signal_handler_may_write_while_its_thread_writes(tmp_path: Path) -> None:
    said, ended = 0, threading.Event()
    before = signal.getsignal(signal.SIGUSR1)
    with (tmp_path / "out").open("w") as stream:
        output = Output(stream, "output")

        def interrupt() -> None:
            while not ended.wait(0.0005):
                os.kill(os.getpid(), signal.SIGUSR1)

        signal.signal(signal.SIGUSR1, lambda *_: output.say("signal"))
        sender = threading.Thread(target=interrupt)
        sender.start()
        try:
            while said < 20_000:
                output.say("line")
                said += 1
        finally:
            ended.set()
            sender.join()
            signal.signal(signal.SIGUSR1, before)
        output.finish()
    assert "signal" in (tmp_path / "out").read_text()


@pytest.mark.promise
@pytest.mark.parametrize("as_json", [False, True])
def test_a_run_whose_capture_fails_goes_on_in_a_new_process(tmp_path: Path, as_json: bool) -> None:
    command = capture_fails(tmp_path)
    done = run(*command, *["--json"] * as_json, folder=tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    told = "restarting: ndd-console train --resume one --set speed.cuda_graph=false"
    assert told in done.stderr and "speed.cuda_graph true -> false" in done.stderr
    lines = (tmp_path / "runs/one/events.jsonl").read_text().splitlines()
    failed, end = (line for line in map(json.loads, lines) if line["type"] == "end")
    assert "cannot be captured: planted" in failed["reason"] and 0 < failed["step"] < 30
    assert (end["status"], end["step"]) == ("done", 30)
    if as_json:
        assert [json.loads(line)["status"] for line in done.stdout.splitlines() if '"type":"end"' in line] == [
            "failed", "done",
        ]  # fmt: skip
    else:
        assert done.stdout.count("done") == 1 and "failed" not in done.stdout


@pytest.mark.promise
@pytest.mark.parametrize("closed", [(1,), (0, 1, 2)])
def test_closed_standard_streams_do_not_change_the_status_of_a_run(
    tmp_path: Path, closed: tuple[int, ...]
) -> None:
    shell = " ".join(f"{number}>&-" for number in closed)
    train = "train --headless --run one --max-steps 3 --workload eeg"
    done = subprocess.run(
        ["sh", "-c", f"exec {sys.executable} -m ndd_console --runs runs {train} {shell}"],
        cwd=tmp_path,
        env=environment(),
        timeout=90,
        check=False,
    )
    assert done.returncode == 0
    assert status(tmp_path) == "done"
    # The record contains nothing but events: none of its files had the number of a standard stream.
    assert all(
        json.loads(line)["v"] for line in (tmp_path / "runs/one/events.jsonl").read_text().splitlines()
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_standard_output_is_a_warning_of_a_run_and_a_failure_of_a_list(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        for arguments, code in (
            (("train", "--headless", "--run", "one", "--max-steps", "3", "--workload", "eeg"), 0),
            (("runs",), 1),
        ):
            done = subprocess.run(
                [sys.executable, "-m", "ndd_console", "--runs", "runs", *arguments],
                cwd=tmp_path, env=environment(), stdout=full, stderr=subprocess.PIPE, text=True, check=False,
            )  # fmt: skip
            assert (done.returncode, "No space left on device" in done.stderr) == (code, True)
            assert "Traceback" not in done.stderr


@pytest.mark.promise
def test_a_deleted_run_folder_ends_the_run_as_failed(tmp_path: Path) -> None:
    process = start("train", "--run", "one", *ENDLESS, "--set", "checkpoint.every_epochs=0", folder=tmp_path)
    wait_for(tmp_path, '"type":"window"')
    shutil.rmtree(tmp_path / "runs" / "one", ignore_errors=True)
    assert process.stderr is not None
    for line in process.stderr:
        if "was deleted or moved during training" in line:
            break
    process.send_signal(signal.SIGTERM)
    returned, out, err = finish(process)
    assert returned == 1 and "Traceback" not in err, err
    assert "failed: the run folder" in out and "was deleted or moved during training" in out
    assert not (tmp_path / "runs" / "one").exists()


@pytest.mark.promise
@pytest.mark.skipif(sys.platform != "linux", reason="looks at the process in /proc")
def test_ctrl_c_in_the_first_moments_is_silent(tmp_path: Path) -> None:
    for tenths in range(1, 8):
        process = start("train", "--headless", "--run", "one", *ENDLESS, folder=tmp_path)
        # The interpreter's own start cannot be caught: wait until it has begun to import the program.
        maps = Path(f"/proc/{process.pid}/maps")
        deadline = time.monotonic() + 30
        while maps.exists() and "_pydantic_core" not in maps.read_text() and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(tenths * 0.03)
        process.send_signal(signal.SIGINT)
        returned, _, err = finish(process)
        assert returned == 130 and "Traceback" not in err, err
        shutil.rmtree(tmp_path / "runs", ignore_errors=True)
