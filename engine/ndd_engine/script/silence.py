"""Notices processes whose observer tells nothing any more although they live, and asks py-spy where they are.

The observer's thread tells something every few seconds, also while the training hangs. It cannot while a call of native
code holds Python's interpreter lock (a regular expression, an extension) or the process is stopped. py-spy reads the
stack from outside.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import psutil

from ndd_engine.measure.spy import UnreadableError, find, threads
from ndd_engine.record.events import MarkEvent
from ndd_engine.text import duration, printable

# More than what lies between two lines of a process that hangs; told again whenever the time has doubled.
SILENT_S = 1.2 * float(os.environ.get("NDD_WATCH_STALLED_S", "10"))
# If this program itself could not run for so long, such as after Ctrl-Z, the processes most likely could not either.
PAUSED_S = 3.0
# With less space than this, the lines may be missing because the disk is full.
LEAST_FREE = 1 << 20
INSTALL = "pip install 'ndd-console[py-spy]' to see its line"
LOCKED = "perhaps a call of native code holds Python's interpreter lock, or its records cannot be written"
FREE = "no thread holds Python's interpreter lock: perhaps the records cannot be written"
# Files of a Python and of installed packages, whichever Python runs the script.
_FOREIGN = re.compile(r"^<|/lib(64)?/python\d|/(site|dist)-packages/|/_?ndd_watch/")


@dataclass
class _Process:
    """heard: when it wrote a line, on the monotonic clock; told: seconds of silence after which it was reported."""

    pid: int
    heard: float
    told: float = 0.0


class _Question(threading.Thread):
    """Asks py-spy where a process is. answer: what it says. The process is not stopped for that."""

    def __init__(self, spy: str, name: str, pid: int, silent_s: float) -> None:
        super().__init__(name="ndd-spy", daemon=True)
        self.process, self.pid, self.silent_s, self.answer = name, pid, silent_s, LOCKED
        self._spy = spy

    def run(self) -> None:
        try:
            self.answer = held_at(threads(self._spy, self.pid))
        except UnreadableError as error:
            self.answer = f"{LOCKED}; py-spy cannot read it: {error}"
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            self.answer = f"{LOCKED}; py-spy cannot read it: {type(error).__name__}"


class Silence:
    """The processes of this host. folder: of their records. Never raises."""

    def __init__(self, folder: Path, after_s: float = SILENT_S) -> None:
        self._folder, self._after_s = folder, after_s
        self._processes: dict[str, _Process] = {}
        self._questions: list[_Question] = []
        self._spy = find()
        self._looked = time.monotonic()

    def heard(self, name: str, kind: str, pid: int) -> None:
        """A process of this host has written a line. pid: 0 for one of another host."""
        if kind in ("end", "unobserved") or not pid:
            self._processes.pop(name, None)
        else:
            self._processes[name] = _Process(pid, time.monotonic())

    def look(self, step: int) -> Iterator[tuple[str, MarkEvent]]:
        """(process, warning) of those that have been silent for too long, also if they have gone on since."""
        now = time.monotonic()
        paused_s, self._looked = now - self._looked, now
        for name, process in list(self._processes.items()):
            if paused_s > PAUSED_S:
                process.heard = min(process.heard + paused_s, now)
            silent_s = now - process.heard
            if silent_s < max(self._after_s, 2 * process.told):
                continue
            why = _why(process.pid)
            if why is None or self._full():
                continue
            process.told = silent_s
            if why or self._spy is None:
                yield name, _warning(step, process.pid, silent_s, why or f"{LOCKED}; {INSTALL}")
            elif all(question.process != name for question in self._questions):
                question = _Question(self._spy, name, process.pid, silent_s)
                question.start()
                self._questions.append(question)
        for question in [one for one in self._questions if not one.is_alive()]:
            self._questions.remove(question)
            yield question.process, _warning(step, question.pid, question.silent_s, question.answer)

    def _full(self) -> bool:
        try:
            return shutil.disk_usage(self._folder).free < LEAST_FREE
        except OSError:
            return True


def _warning(step: int, pid: int, silent_s: float, why: str) -> MarkEvent:
    return MarkEvent("warning", step, f"silent for {duration(silent_s)}: {why} (process {pid})")


def readable_by(pid: int) -> dict[str, str]:
    """The environment of a script whose stack this process and what it starts may read; {} without py-spy."""
    # Linux with Yama lets only ancestors read a process, unless it names others.
    return {"NDD_WATCH_TRACER": str(pid)} if find() else {}


def held_at(threads: list[dict[str, Any]]) -> str:
    """What a dump of py-spy shows: the line at which a thread holds the interpreter lock."""
    running = [thread for thread in threads if thread.get("owns_gil")]
    running += [thread for thread in threads if thread.get("active") and thread not in running]
    if not running:
        return FREE
    frames = running[0]["frames"]
    own = next((frame for frame in frames if not _FOREIGN.search(frame["filename"])), frames[0])
    place = f"{PurePath(own['filename']).name}:{int(own['line'])} in {own['name']}"
    inside = f", in {frames[0]['name']}" if frames[0] is not own else ""
    lock = "holds Python's interpreter lock" if running[0].get("owns_gil") else "computes"
    return printable(f"{place} {lock}{inside}")


def _why(pid: int) -> str | None:
    """The reason if the system knows it, "" if it does not; None if the process is gone."""
    try:
        status = psutil.Process(pid).status()
    except psutil.Error:
        return None
    if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
        return None
    if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
        return "it is stopped by a signal or a debugger"
    if status == psutil.STATUS_DISK_SLEEP:
        return "it waits for a disk, a network file system or a driver"
    return ""
