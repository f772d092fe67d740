"""Processes that can tell nothing: a call holds the interpreter lock, or they are stopped."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from ndd_engine.record.events import MarkEvent, parse
from ndd_engine.script import silence

SUBJECT = Path(__file__).parents[1] / "observe" / "subjects" / "locks.py"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


def started(folder: Path, seconds: int, **more: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "ndd_console", "run", "--headless", "--run", "it", "--", sys.executable, str(SUBJECT),
         str(seconds)],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**os.environ, "NDD_WATCH_WINDOW_S": "0.1", "NDD_WATCH_STALLED_S": "1", "NO_COLOR": "1", **more},
    )  # fmt: skip


def warnings(folder: Path) -> list[str]:
    path = folder / "runs" / "it" / "events.jsonl"
    found = [parse(line) for line in path.read_bytes().splitlines()] if path.exists() else []
    events = [item[1] for item in found if item is not None]
    return [event.text for event in events if isinstance(event, MarkEvent) and event.kind == "warning"]


def test_a_call_that_keeps_the_interpreter_lock(tmp_path: Path) -> None:
    running = started(tmp_path, 5 if silence.find() is None else 15)
    out, _ = running.communicate(timeout=120)
    assert running.returncode == 0, out.decode()
    (first, *_) = [text for text in warnings(tmp_path) if text.startswith("silent for ")]
    if silence.find() is None:
        assert f"{silence.LOCKED}; {silence.INSTALL}" in first
    else:
        assert "locks.py:12 in stuck holds Python's interpreter lock" in first


def test_a_stopped_process_is_named_as_such_and_goes_on(tmp_path: Path) -> None:
    running = started(tmp_path, 1)
    records, deadline = tmp_path / "runs" / "it" / "ranks", time.monotonic() + 60
    found: list[Path] = []
    while not found and time.monotonic() < deadline:
        time.sleep(0.01)
        found = [path for path in records.glob("pid-*.jsonl") if path.stat().st_size]
    pid = int(found[0].stem.removeprefix("pid-"))

    def named() -> bool:
        return any(
            f"(process {pid})" in text and "it is stopped by a signal" in text for text in warnings(tmp_path)
        )

    os.kill(pid, signal.SIGSTOP)
    try:
        while not named() and time.monotonic() < deadline:
            time.sleep(0.1)
    finally:
        os.kill(pid, signal.SIGCONT)
    out, _ = running.communicate(timeout=60)
    assert running.returncode == 0, out.decode()
    assert named(), warnings(tmp_path)


def test_nothing_is_said_of_one_that_ended_or_whose_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(silence, "find", lambda: None)
    looks = silence.Silence(tmp_path, after_s=0.0)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        looks.heard("pid-1", "window", child.pid)
        usage = shutil.disk_usage(tmp_path)
        with monkeypatch.context() as full:
            full.setattr(shutil, "disk_usage", lambda _: usage._replace(free=0))
            assert list(looks.look(3)) == []
        ((name, event),) = looks.look(3)
        assert name == "pid-1" and event.step == 3 and str(child.pid) in event.text
        looks.heard("pid-1", "end", child.pid)
        assert list(looks.look(3)) == []
        looks.heard("pid-1", "window", child.pid)
    finally:
        child.kill()
        child.wait()
    assert list(looks.look(3)) == []
    assert not psutil.pid_exists(child.pid)


def test_the_line_in_a_dump_is_that_of_the_script_and_cannot_steer_a_terminal() -> None:
    def frame(name: str, file: str, line: int) -> dict[str, object]:
        return {"name": name, "filename": file, "short_filename": file, "line": line, "locals": None}

    idle = {"owns_gil": False, "active": False, "frames": [frame("wait", "/x/threading.py", 1)]}
    busy = {
        "owns_gil": True, "active": True,
        "frames": [frame("search", "/usr/lib/python3.11/re.py", 4), frame("clean", "/home/me/\x1b[2Jdata.py", 7)],
    }  # fmt: skip
    assert silence.held_at([idle, busy]) == (
        "\\x1b[2Jdata.py:7 in clean holds Python's interpreter lock, in search"
    )
    assert silence.held_at([idle]) == silence.FREE
