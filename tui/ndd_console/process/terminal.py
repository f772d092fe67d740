"""The terminal: what it can show, keeping foreign output off it, and noticing when it is gone."""

from __future__ import annotations

import io
import os
import select
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO


@dataclass(frozen=True)
class Capabilities:
    """What may be drawn. ssh: reached over a connection, so the mouse and anything that moves are off."""

    ascii_only: bool
    monochrome: bool
    ssh: bool


def capabilities(ascii_only: bool) -> Capabilities:
    """Read from the environment: locale, NO_COLOR, TERM, SSH_CONNECTION."""
    encoding = (sys.stdout.encoding or "").lower().replace("-", "")
    return Capabilities(
        ascii_only=ascii_only or encoding != "utf8" or os.environ.get("TERM") == "linux",
        monochrome=bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") in ("dumb", "vt100"),
        ssh="SSH_CONNECTION" in os.environ,
    )


def interactive() -> bool:
    """Whether a screen can be shown: both ends are a terminal that can move its cursor."""
    return sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def follow_terminal() -> None:
    """Where COLUMNS and LINES are exported, they would be believed more than the terminal, and a resize never seen."""
    for name in ("COLUMNS", "LINES"):
        os.environ.pop(name, None)


class LostTerminal(io.TextIOBase):
    """A terminal that may vanish: once a write fails, later ones go nowhere instead of failing.

    The screen's writer thread must not die with its queue full; the app is told of the loss elsewhere.
    """

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self.lost = False

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    def write(self, text: str) -> int:
        data = text.encode("utf-8", "replace")
        while data and not self.lost:
            try:
                data = data[os.write(self._handle, data) :]
            except OSError:
                self.lost = True
        return len(text)

    def flush(self) -> None:
        """Nothing is held back."""

    def fileno(self) -> int:
        return self._handle

    def isatty(self) -> bool:
        return not self.lost and os.isatty(self._handle)


class Captured:
    """While the screen is up, everything written to descriptors 1 and 2 goes to the log instead.

    Native libraries and child processes write there and would tear the screen. `stream` is the log for Python's
    own prints; `terminal` is the real terminal. Use as a context manager.
    """

    def __init__(self, log: Path) -> None:
        self._log = log

    def __enter__(self) -> Captured:
        sys.stdout.flush()
        sys.stderr.flush()
        self._saved = (os.dup(1), os.dup(2))
        self._python = (sys.__stdout__, sys.__stderr__)
        self.redirect(self._log)
        self.terminal = LostTerminal(self._saved[0])
        # Textual draws on sys.__stderr__ and asks sys.__stdout__ for the size.
        sys.__stdout__ = sys.__stderr__ = self.terminal  # type: ignore[misc,assignment]
        self.stream: TextIO = open(1, "w", buffering=1, closefd=False, encoding="utf-8", errors="replace")
        return self

    def redirect(self, log: Path) -> None:
        """From now on into another log."""
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        os.close(handle)

    def __exit__(self, *_: object) -> None:
        self.stream.flush()
        sys.__stdout__, sys.__stderr__ = self._python  # type: ignore[misc]
        if self.terminal.lost:
            # Nobody reads it any more: what is still said belongs to the log.
            for handle in self._saved:
                os.close(handle)
            return
        for target, handle in zip((1, 2), self._saved, strict=True):
            os.dup2(handle, target)
            os.close(handle)


def silence(log: Path) -> None:
    """For a run that goes on without a terminal: descriptors 1 and 2 to the log, 0 to nothing, for good."""
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123
        os.dup2(nothing.fileno(), 0)
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)


class HangupWatch:
    """Calls back once when the terminal behind a descriptor is gone, even where no SIGHUP arrives."""

    def __init__(self, descriptor: int, lost: Callable[[], None]) -> None:
        self._descriptor = descriptor
        self._lost = lost
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="ndd-hangup", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._descriptor, 0)  # hang-up and errors are always reported
        if any(events & select.POLLNVAL for _, events in poll.poll(0)):
            return  # a system that cannot poll a terminal (macOS) says so at once; there SIGHUP has to do
        while not self._stop.is_set():
            if any(
                events & (select.POLLHUP | select.POLLERR | select.POLLNVAL) for _, events in poll.poll(500)
            ):
                if not self._stop.is_set():
                    self._lost()
                return
