"""Where the thread that trains is: of this rank, and of another rank of this host that cannot tell it itself.

A rank that holds the interpreter lock in a call outside of Python cannot run Python code. A signal to its watching
thread, which waits for that lock, makes faulthandler write the stacks of all threads; no call of the training is
interrupted. A rank that was stopped runs nothing at all: its stack is read from outside with py-spy, if it is there.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import IO, Any

import torch

from ndd_engine.measure import spy
from ndd_engine.text import printable

# A frame: file, line, function.
Frame = tuple[str, int, str]
# Frames of a stack that are told, the innermost first.
KEPT = 12
# For the stacks to be written.
WRITTEN_S = 0.5
# For py-spy; a rank that hangs is to be named within a few seconds.
SPY_S = 3.0
_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parents[1]), "/ndd_console/"
_THREADING = str(Path(threading.__file__))
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)")
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')


def frames_of(frame: FrameType | None) -> list[Frame]:
    """The stack that ends with this frame, the innermost first."""
    found: list[Frame] = []
    while frame is not None:
        found.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return found


def place(stack: Sequence[Frame]) -> str:
    """File, line and function of the innermost frame outside torch, or of the engine if there is no other."""
    ours = ""
    for file, line, name in stack:
        if not file.startswith((_TORCH, "<")) and file != _THREADING:
            text = words(file, line, name)
            if not any(folder in file for folder in _OURS):
                return text
            ours = ours or text
    return ours or "an unknown line"


def words(file: str, line: int, name: str) -> str:
    """A frame in words."""
    return printable(f"{'/'.join(Path(file).parts[-2:])}:{line} {name}")


class Listening:
    """Lets other processes ask for the stack of a thread of this one.

    told: what they need for that; None where the signal is used for something else, or there is no such signal.
    """

    def __init__(self, thread: int, asked: int) -> None:
        """thread: its identifier. asked: the native id of a thread that waits in Python, which receives the signal."""
        self.told: dict[str, int] | None = None
        self._file: IO[bytes] | None = None
        number = getattr(signal, "SIGRTMAX", 0) - 2
        with contextlib.suppress(OSError, ValueError, RuntimeError, AttributeError):
            if number > 0 and signal.getsignal(number) == signal.SIG_DFL:
                self._file = tempfile.TemporaryFile()  # noqa: SIM115  as long as this listens
                faulthandler.register(number, self._file, all_threads=True)
                self._number = number
                self.told = {
                    "pid": os.getpid(), "asked": asked, "thread": thread,
                    "signal": number, "file": self._file.fileno(),
                }  # fmt: skip

    def stop(self) -> None:
        """Listen no more."""
        if self.told is not None:
            faulthandler.unregister(self._number)
            self.told = None
        if self._file is not None:
            self._file.close()


def stack_of(told: dict[str, Any], stopped: bool) -> list[Frame]:
    """The stack of the thread that trains of another rank on this host, the innermost frame first; [] if unknown.

    told: see Listening. stopped: it does not react to signals.
    """
    found: list[Frame] = []
    with contextlib.suppress(Exception):  # it may end at any moment
        if not stopped:
            found = _asked(told)
        if not found and (path := spy.find()) is not None:
            for thread in spy.threads(path, told["pid"], SPY_S):
                if thread["thread_id"] == told["thread"]:
                    found = [
                        (str(each["filename"]), int(each["line"]), str(each["name"]))
                        for each in thread["frames"]
                    ]
    return found


def _asked(told: dict[str, Any]) -> list[Frame]:
    """Ask by the signal. Raises OSError."""
    pid, number = int(told["pid"]), int(told["signal"])
    if not _catches(pid, number):
        return []  # it would end
    path = Path(f"/proc/{pid}/fd/{told['file']}")
    before = path.stat().st_size
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.tgkill(pid, int(told["asked"]), number):
        return []
    deadline, size = time.monotonic() + WRITTEN_S, before
    while time.monotonic() < deadline:
        time.sleep(0.05)
        last, size = size, path.stat().st_size
        if size == last > before:
            break
    with path.open("rb") as file:
        file.seek(before)
        return parsed(file.read(1 << 20).decode(errors="replace"), int(told["thread"]))


def _catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def parsed(text: str, thread: int) -> list[Frame]:
    """The stack of a thread in what faulthandler wrote, the innermost frame first. thread: its identifier."""
    found: list[Frame] = []
    inside = False
    for line in text.splitlines():
        if (head := _THREAD.match(line)) is not None:
            inside = int(head[1], 16) == thread
        elif inside and (frame := _FRAME.match(line)) is not None:
            found.append((frame[1], int(frame[2]), frame[3]))
    return found
