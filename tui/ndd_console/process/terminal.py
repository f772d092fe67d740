"""The terminal: its capabilities, capturing output, and detecting its loss."""

from __future__ import annotations

import io
import os
import select
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from ndd_console.view.style import Look


def capabilities(ascii_only: bool) -> Look:
    """Detect the capabilities from the locale, NO_COLOR, TERM and SSH_CONNECTION."""
    encoding = (sys.stdout.encoding or "").lower().replace("-", "")
    return Look(
        ascii_only=ascii_only or encoding != "utf8" or os.environ.get("TERM") == "linux",
        monochrome=bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") in ("dumb", "vt100"),
        ssh="SSH_CONNECTION" in os.environ,
        links=os.environ.get("TERM") not in ("dumb", "linux", "vt100") and "SSH_CONNECTION" not in os.environ,
    )


def interactive() -> bool:
    """Whether a screen can be shown: standard input and output are a terminal that is not dumb."""
    streams = (sys.stdin, sys.stdout)  # None if closed
    return (
        all(stream is not None and stream.isatty() for stream in streams)
        and os.environ.get("TERM", "dumb") != "dumb"
    )


class LostTerminal(io.TextIOBase):
    """A terminal that may disappear: after a failed write, later writes are discarded.

    An exception would end the screen's writer thread while its queue is full. `HangupWatch` reports the loss.
    """

    encoding = "utf-8"

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self.lost = False

    def write(self, text: str) -> int:
        data = text.encode("utf-8", "replace")
        while data and not self.lost:
            try:
                data = data[os.write(self._handle, data) :]
            except OSError:
                self.lost = True
        return len(text)

    def flush(self) -> None:
        """Writes are not buffered."""

    def fileno(self) -> int:
        return self._handle

    def isatty(self) -> bool:
        return not self.lost and os.isatty(self._handle)


class Captured:
    """Context manager that redirects descriptors 1 and 2 to a log while the screen is shown.

    Native libraries and child processes write there and would damage the screen. `stream`: the log, for Python's
    prints; `terminal`: the real terminal.
    """

    def __init__(self, log: Path) -> None:
        self._log = log

    def __enter__(self) -> Captured:
        sys.stdout.flush()
        sys.stderr.flush()
        self._saved = (os.dup(1), os.dup(2))
        self._python = (sys.__stdout__, sys.__stderr__)
        redirect(self._log)
        self.terminal = LostTerminal(self._saved[0])
        # Textual draws on sys.__stderr__ and reads the size from sys.__stdout__.
        sys.__stdout__ = sys.__stderr__ = self.terminal  # type: ignore[misc,assignment]
        self.stream: TextIO = open(1, "w", buffering=1, closefd=False, encoding="utf-8", errors="replace")
        return self

    def __exit__(self, *_: object) -> None:
        self.stream.flush()
        sys.__stdout__, sys.__stderr__ = self._python  # type: ignore[misc]
        if self.terminal.lost:
            # Keep the redirection: later output belongs into the log.
            for handle in self._saved:
                os.close(handle)
            return
        for target, handle in zip((1, 2), self._saved, strict=True):
            os.dup2(handle, target)
            os.close(handle)


def silence(log: Path) -> None:
    """For a detached run: redirect descriptors 1 and 2 to the log and 0 to /dev/null, permanently."""
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123
        os.dup2(nothing.fileno(), 0)
    redirect(log)


def redirect(log: Path) -> None:
    """Redirect descriptors 1 and 2 to a log."""
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)


@contextmanager
def hangup_watch(descriptor: int, lost: Callable[[], None]) -> Iterator[None]:
    """Calls `lost` once when the terminal of a descriptor is lost, even if no SIGHUP arrives."""
    stop = threading.Event()

    def watch() -> None:
        poll = select.poll()
        poll.register(descriptor, 0)  # hang-ups and errors are always reported
        if any(events & select.POLLNVAL for _, events in poll.poll(0)):
            return  # macOS cannot poll a terminal; there only SIGHUP reports the loss
        gone = select.POLLHUP | select.POLLERR | select.POLLNVAL
        while not stop.is_set():
            if any(events & gone for _, events in poll.poll(500)):
                if not stop.is_set():
                    lost()
                return

    threading.Thread(target=watch, name="ndd-hangup", daemon=True).start()
    yield
    stop.set()
