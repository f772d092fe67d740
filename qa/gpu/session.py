"""Runs the parts one after the other: their time limits, their ends, and everything that they leave behind.

The files are kept up to date: each figure is in them as soon as it is known.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from . import page as pages
from .figures import one_line, read
from .page import Entry, Page, json_of
from .parts import Part
from .pytest_figures import VARIABLE
from .setup import EXIT_INTERRUPTED, EXIT_USAGE, HOW, ROOT, environment, say

# What is left of the whole time for a part to start at all.
LEAST_S = 10.0
# Of a part with failures, in the file of JSON.
LOG_LINES = 120
# After SIGINT a process may write what it has; after SIGKILL a process that hangs in the driver may never end.
GRACE_S = 5.0
REAP_S = 10.0
POLL_S = 0.25
_PR_SET_CHILD_SUBREAPER = 36


class Session:
    """Runs the parts and keeps the files up to date. end: of time.monotonic(). asked: the words of --only."""

    def __init__(
        self,
        wanted: tuple[Part, ...],
        device: str,
        effort: str,
        end: float,
        limit_s: float,
        path: Path,
        asked: tuple[str, ...] = (),
    ) -> None:
        self.device, self.effort, self.end, self.path, self.asked = device, effort, end, path, asked
        self.page = Page([Entry(part) for part in wanted], effort, limit_s, setup=os.environ.get(HOW, ""))
        self.folder = Path(tempfile.mkdtemp(prefix="ndd-gpu-"))
        self.stopped = ""
        self._began = end - limit_s
        self._seen = -1

    def run(self) -> int:
        """Returns the exit status."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._stop)
        try:
            self.page.write(self.path)  # not only after an hour
        except OSError as error:
            say(f"cannot write {self.path}: {error.strerror}")
            return EXIT_USAGE
        count = len(self.page.entries)
        for index, entry in enumerate(self.page.entries, start=1):
            if not self._allowed(entry):
                continue
            limit_s = min(entry.part.limit_s(self.effort), self.end - time.monotonic())
            say(f"{index:2} of {count}  {entry.part.section}: {entry.part.name} (up to {limit_s:.0f} s)")
            if entry.part.decides:
                say(f"          {entry.part.decides}")
            self._carry_out(entry, limit_s)
            why = f": {entry.why}" if entry.why else ""
            say(f"          {entry.state}{why}; {len(entry.figures)} figures")
            for figure in entry.failures:
                say(f"          {figure.verdict}: {figure.name}: {figure.value} {figure.why}")
        self.page.state = f"stopped by {self.stopped}" if self.stopped else "complete"
        self._write()
        say(self.page.summary())
        if self.page.failed:
            say(f"output of all parts: {self.folder}")
        else:
            shutil.rmtree(self.folder, ignore_errors=True)
        say(f"wrote {self.path} and {json_of(self.path).name}")
        if self.stopped:
            return EXIT_INTERRUPTED
        return 1 if self.page.failed else 0

    def _allowed(self, entry: Entry) -> bool:
        entry.state = pages.LEFT_OUT
        if self.stopped:
            entry.why = f"stopped by {self.stopped}"
        elif entry.part.named_only and not entry.part.words & {*self.asked}:
            entry.why = f"runs with --only '{entry.part.name}'"
        elif not entry.part.limit_s(self.effort):
            entry.why = "not part of --quick"
        elif entry.part.lacking:
            entry.why = f"needs {entry.part.lacking}, which is not installed"
        elif self.end - time.monotonic() < LEAST_S:
            entry.why = "no time left"
        else:
            return True
        return False

    def _carry_out(self, entry: Entry, limit_s: float) -> None:
        entry.state, self._seen = pages.RUNNING, -1
        slug = f"{self.page.entries.index(entry):02}-{entry.part.name}"
        out, log = self.folder / f"{slug}.jsonl", self.folder / f"{slug}.log"
        # A part stops by itself before its limit, and writes what it has.
        command = entry.part.command(sys.executable, str(out), self.device, self.effort, max(limit_s - 5, 5))
        begin = time.monotonic()
        why = self._run(command, entry, out, log, limit_s)
        entry.seconds = time.monotonic() - begin
        if entry.part.tests and why.startswith("exit status 1:"):
            why = ""  # some tests failed, and are figures
        if not why and not entry.figures:
            why = "no figures"
        entry.state, entry.why = (pages.FAILED, why) if why else (pages.DONE, "")
        told = bool(why or entry.failures)
        entry.log = [one_line(line, 200) for line in last_lines(log, LOG_LINES)] if told else []
        self._write()

    def _run(self, command: Sequence[str], entry: Entry, out: Path, log: Path, limit_s: float) -> str:
        """Run the process of a part; returns "" or why it did not run to its end. Raises nothing."""
        begin, before = time.monotonic(), _descendants()
        try:
            with log.open("wb") as output:
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT,
                    env={**environment(), VARIABLE: str(out)}, start_new_session=True,
                )  # fmt: skip
        except OSError as error:
            return f"could not be started: {error.strerror or error}"
        why = ""
        try:
            while process.poll() is None and not why:
                self._look(entry, out)
                if self.stopped:
                    why = "interrupted"
                elif time.monotonic() - begin > limit_s:
                    why = f"time limit of {limit_s:.0f} s"
                time.sleep(POLL_S)
        finally:
            killed = _end(process, before)
            self._look(entry, out)
        if why:
            return why if killed else f"{why}; the process cannot be killed (it hangs in the driver)"
        return ended(process.returncode, log)

    def _look(self, entry: Entry, out: Path) -> None:
        size = out.stat().st_size if out.exists() else 0
        if size != self._seen:
            self._seen, entry.figures = size, read(out)
            self._write()

    def _write(self) -> None:
        self.page.seconds = time.monotonic() - self._began
        try:
            self.page.write(self.path)
        except OSError as error:
            say(f"cannot write {self.path}: {error.strerror}")

    def _stop(self, number: int, _frame: object) -> None:
        self.stopped = signal.Signals(number).name
        os.write(2, b"stopping; what was measured is kept\n")  # print may be what was interrupted


def adopt() -> None:
    """Become the parent of processes whose parent died, so that none of them keeps the GPU busy. Linux only."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def ended(status: int | None, log: Path) -> str:
    """Why a process with this exit status failed, "" if it did not."""
    if not status:
        return ""
    last = last_lines(log, 1)
    if status < 0:
        with contextlib.suppress(ValueError):
            name = signal.Signals(-status).name
            hint = " (memory of the host may have run out)" if name == "SIGKILL" else ""
            return f"killed by {name}{hint}" + (f": {one_line(last[0])}" if last else "")
    return f"exit status {status}" + (f": {one_line(last[0])}" if last else "")


def last_lines(log: Path, count: int) -> list[str]:
    """The last lines of a log that are not empty."""
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(file.tell() - 16384, 0))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    return lines[-count:]


def _end(process: subprocess.Popen[bytes], before: set[psutil.Process]) -> bool:
    """Ask the process to end, then kill it and all that it leaves behind; whether it has ended.

    before: our descendants before it was started.
    """
    family = _descendants()
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    left = (family | _descendants()) - before
    for each in left:
        with contextlib.suppress(psutil.Error):
            each.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(REAP_S)
    psutil.wait_procs(left, timeout=REAP_S)
    return process.poll() is not None


def _descendants() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))
