"""Notices processes whose observer tells nothing any more although they live, and asks py-spy where they are.

The observer's thread tells something every few seconds, also while the training hangs. It cannot while a call of native
code holds Python's interpreter lock (a regular expression, an extension) or the process is stopped. py-spy reads the
stack from outside.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ndd_engine.record.events import MarkEvent
from ndd_engine.text import duration, printable

# More than what lies between two lines of a process that hangs; told again whenever the time has doubled.
SILENT_S = 1.2 * float(os.environ.get("NDD_WATCH_STALLED_S", "10"))
# py-spy reads the symbols of the interpreter first.
LIMIT_S = 30.0
# If this program itself could not run for so long, such as after Ctrl-Z, the processes most likely could not either.
PAUSED_S = 3.0
# With less space than this, the lines may be missing because the disk is full.
LEAST_FREE = 1 << 20
LOCKED = "perhaps a call of native code holds Python's interpreter lock"
INSTALL = "pip install 'ndd-console[py-spy]' to see its line"
# Files of a Python and of installed packages, whichever Python runs the script.
_FOREIGN = re.compile(r"^<|/lib(64)?/python\d|/(site|dist)-packages/|/_?ndd_watch/")


@dataclass
class _Process:
    """heard: when it wrote a line, on the monotonic clock; told: seconds of silence after which it was reported."""

    pid: int
    heard: float
    told: float = 0.0
    place: str = ""
    asked: threading.Thread | None = None


class Silence:
    """The processes of this host. folder: of their records. Never raises."""

    def __init__(self, folder: Path, after_s: float = SILENT_S) -> None:
        self._folder, self._after_s = folder, after_s
        self._processes: dict[str, _Process] = {}
        self._spy = find()
        self._looked = time.monotonic()

    def heard(self, name: str, kind: str, pid: int) -> None:
        """A process of this host has written a line. pid: 0 for one of another host."""
        if kind in ("end", "unobserved") or not pid:
            self._processes.pop(name, None)
        else:
            self._processes[name] = _Process(pid, time.monotonic())

    def look(self, step: int) -> Iterator[tuple[str, MarkEvent]]:
        """(process, warning) of those that have been silent for too long."""
        now = time.monotonic()
        paused_s, self._looked = now - self._looked, now
        if paused_s > PAUSED_S:
            for process in self._processes.values():
                process.heard += paused_s
        for name, process in list(self._processes.items()):
            silent_s = now - process.heard
            if silent_s < max(self._after_s, 2 * process.told):
                continue
            why = _why(process.pid)
            if why is None or self._full():
                continue
            if not why and self._spy and process.asked is None:
                process.asked = threading.Thread(target=self._ask, args=(process,), daemon=True)
                process.asked.start()
            if process.asked is not None and process.asked.is_alive():
                continue  # until it has answered
            process.asked, process.told = None, silent_s
            place, process.place = process.place, ""
            text = f"no sign of process {process.pid} for {duration(silent_s)}: "
            text += why or place or (LOCKED if self._spy else f"{LOCKED}; {INSTALL}")
            yield name, MarkEvent("warning", step, text)

    def _ask(self, process: _Process) -> None:
        assert self._spy is not None
        try:
            found = subprocess.run(
                [self._spy, "dump", "--json", "--pid", str(process.pid)],
                stdin=subprocess.DEVNULL, capture_output=True, timeout=LIMIT_S, check=False,
            )  # fmt: skip
            if found.returncode:
                error = (found.stderr.decode(errors="replace").strip().splitlines() or [""])[-1]
                process.place = f"{LOCKED}; py-spy cannot read it: {printable(error)[:200]}"
            else:
                process.place = held_at(json.loads(found.stdout))
        except (OSError, subprocess.SubprocessError, ValueError, LookupError, TypeError, AttributeError):
            process.place = ""

    def _full(self) -> bool:
        try:
            return shutil.disk_usage(self._folder).free < LEAST_FREE
        except OSError:
            return True


def find() -> str | None:
    """The path of py-spy: in the environment of this program, or else on PATH."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")


def held_at(threads: list[dict[str, Any]]) -> str:
    """What a dump of py-spy shows: the line at which a thread holds the interpreter lock; "" if none does."""
    running = [thread for thread in threads if thread.get("owns_gil")]
    running += [thread for thread in threads if thread.get("active") and thread not in running]
    if not running:
        return ""
    frames = running[0]["frames"]
    own = next((frame for frame in frames if not _FOREIGN.search(frame["filename"])), frames[0])
    place = f"{own['filename']}:{int(own['line'])} in {own['name']}"
    inside = f", in {frames[0]['name']}" if frames[0] is not own else ""
    lock = "holds Python's interpreter lock" if running[0].get("owns_gil") else "computes"
    return printable(f"{lock} at {place}{inside} (py-spy)")


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
