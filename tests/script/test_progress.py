"""Processes that can tell nothing: a call holds the interpreter lock, or they are stopped."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import psutil
import pytest
from script_help import SUBJECTS, events, start
from tests.waiting import LIMIT_S, contains, until

from ndd_engine.measure.stalls import STOPPED, place_of
from ndd_engine.record.events import StallEvent
from ndd_engine.script import records

SUBJECT = SUBJECTS / "locks.py"
WORDS = ("run", "--headless", "--run", "it", "--", sys.executable, str(SUBJECT))
SOON = {"NDD_WATCH_WINDOW_S": "0.1", "NDD_WATCH_STALLED_S": "1"}
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


def warned(folder: Path, *words: str) -> bool:
    """Whether a stall of the run has all of these words."""
    stalls = [one for one in events(folder, "it") if isinstance(one, StallEvent)]
    return any(all(word in stall.text for word in words) for stall in stalls)


@pytest.mark.slow
@pytest.mark.long
def test_a_call_that_keeps_the_interpreter_lock(tmp_path: Path) -> None:
    running = start(tmp_path, *WORDS, "15", **SOON)
    _, said = running.communicate(timeout=LIMIT_S)
    assert running.returncode == 0, said
    assert warned(tmp_path, "locks.py:12 in", "stuck", "interpreter")


@pytest.mark.long
def test_a_stopped_process_is_named_as_such_and_goes_on(tmp_path: Path) -> None:
    running = start(tmp_path, *WORDS, "1", **SOON)
    found: list[int] = []

    def trains() -> list[int]:
        children = psutil.Process(running.pid).children(recursive=True)
        found[:] = [one.pid for one in children if one.cmdline()[1:2] == [str(SUBJECT)]]
        return found

    until(trains)
    until(lambda: contains(tmp_path / "runs" / "it" / "events.jsonl", '"window"'))
    (pid,) = found
    os.kill(pid, signal.SIGSTOP)
    try:
        until(lambda: warned(tmp_path, STOPPED, str(pid)))
    finally:
        os.kill(pid, signal.SIGCONT)
    _, said = running.communicate(timeout=LIMIT_S)
    assert running.returncode == 0, said


HANGS = Path(__file__).parents[2] / "qa" / "scripts" / "hangs.py"


@pytest.mark.long
@pytest.mark.promise
def test_a_worker_that_hangs_is_named_at_once_and_first_in_the_summary(tmp_path: Path) -> None:
    running = start(
        tmp_path, "run", "--headless", "--run", "it", "--", sys.executable, str(HANGS), "storage", "1", **SOON
    )
    until((tmp_path / "runs" / "it" / "events.jsonl").exists)
    until(lambda: warned(tmp_path, "loader worker 1", "items.bin", "hangs.py"))
    running.terminate()
    _, said = running.communicate(timeout=LIMIT_S)
    lines = [line for line in said.splitlines() if "no progress for" in line]
    assert lines[0].startswith("ndd-console: no progress for")
    assert lines[-1].startswith("finding: no progress for")
    assert "FIFO" in lines[-1]


@pytest.mark.long
def test_a_worker_that_is_killed_is_named_with_its_signal_and_no_frame_of_ours(tmp_path: Path) -> None:
    words = ("run", "--headless", "--run", "it", "--", sys.executable, str(HANGS), "killed", "20")
    running = start(tmp_path, *words, SCRIPT_S="100")
    _, said = running.communicate(timeout=LIMIT_S)
    assert running.returncode == 1
    assert "loader worker" in next(line for line in said.splitlines() if line.startswith("finding: "))
    assert "SIGKILL" in said or "Killed" in said  # the system may forget it before anybody looks
    assert not [line for line in said.splitlines() if line.lstrip().startswith("File") and "ndd_" in line]


def frame(name: str, file: str, line: int = 1) -> dict[str, object]:
    return {"name": name, "filename": file, "short_filename": file, "line": line, "locals": None}


def test_the_line_in_a_stack_is_that_of_the_script() -> None:
    library, own = frame("search", "/usr/lib/python3.11/re.py", 4), frame("clean", "/home/me/data.py", 7)
    assert place_of([library, own]) == ("/home/me/data.py", 7, "clean")
    assert place_of([library]) == ("/usr/lib/python3.11/re.py", 4, "search")
    assert place_of([]) is None


def test_the_phase_of_a_stack_is_that_of_the_outermost_function_that_has_one() -> None:
    torch = "/x/lib/python3.11/site-packages/torch"
    loop, item = frame("<module>", "/home/me/train.py"), frame("__getitem__", "/home/me/data.py")
    call = frame("_wrapped_call_impl", f"{torch}/nn/modules/module.py")
    loader = frame("__next__", f"{torch}/utils/data/dataloader.py")
    assert records.phase_of([call, item, loader, loop], set()) == "data_wait"
    assert records.phase_of([item, call, loop], set()) == "forward"
    assert records.phase_of([item, loop], set()) == "other"
    assert records.phase_of([call, item, loop], {("/home/me/data.py", "__getitem__")}) == "data_wait"
