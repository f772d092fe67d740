"""The stack of a process that cannot tell it itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.waiting import LIMIT_S

from ndd_engine.measure import stalls
from ndd_engine.train.parallel.hang import StackRequests, parsed, place, stack_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
# A thread that waits, and a call of three seconds that keeps the interpreter lock.
SUBJECT = """
import ctypes, json, threading, time
from ndd_engine.train.parallel.hang import StackRequests

def stuck():
    begin = time.monotonic()
    ctypes.PyDLL(None).sleep(3)
    return time.monotonic() - begin

waiting = threading.Thread(target=threading.Event().wait, daemon=True)
waiting.start()
listening = StackRequests(threading.get_ident(), waiting.native_id)
print(json.dumps(listening.address), flush=True)
print(stuck(), flush=True)
listening.stop()
"""


@pytest.fixture
def subject(tmp_path: Path) -> subprocess.Popen[str]:
    path = tmp_path / "subject.py"
    path.write_text(SUBJECT)
    return subprocess.Popen([sys.executable, str(path)], stdout=subprocess.PIPE, text=True)


@pytest.mark.long
def test_a_call_that_holds_the_interpreter_lock_is_read_and_not_interrupted(
    subject: subprocess.Popen[str],
) -> None:
    assert subject.stdout is not None
    told = json.loads(subject.stdout.readline())
    time.sleep(0.3)
    # A signal that it does not listen to would end it.
    assert stack_of({**told, "signal": told["signal"] - 1}, stopped=False) == [] or stalls.find() is not None
    stack = stack_of(told, stopped=False)
    assert [frame["name"] for frame in stack] == ["stuck", "<module>"]
    assert place(stack).split("subject.py:")[1] == "7 stuck"
    assert float(subject.stdout.readline()) > 2.9
    assert subject.wait(LIMIT_S) == 0


@pytest.mark.slow
@pytest.mark.long
def test_a_stopped_process_is_read_with_py_spy_alone(subject: subprocess.Popen[str]) -> None:
    assert subject.stdout is not None
    told = json.loads(subject.stdout.readline())
    os.kill(subject.pid, signal.SIGSTOP)
    stack = stack_of(told, stopped=True)
    os.kill(subject.pid, signal.SIGCONT)
    assert bool(stack) == (stalls.find() is not None)
    assert subject.wait(LIMIT_S) == 0


def test_a_signal_that_is_used_already_is_left_alone() -> None:
    number = signal.SIGRTMAX - 2
    before = signal.signal(number, lambda *_: None)
    try:
        assert StackRequests(1, 1).address is None
    finally:
        signal.signal(number, before)


def test_the_stack_of_one_thread_in_what_faulthandler_writes() -> None:
    text = """Thread 0x00007f0000000001 (most recent call first):
  File "/a/loader.py", line 3 in read
Current thread 0x00007f0000000002 (most recent call first):
  File "/a b/work.py", line 12 in inner
  File "/a b/work.py", line 20 in <module>
"""
    assert [(frame["line"], frame["name"]) for frame in parsed(text, 0x7F0000000002)] == [
        (12, "inner"),
        (20, "<module>"),
    ]
    assert parsed(text, 5) == []
    assert place([]) == "an unknown line"
