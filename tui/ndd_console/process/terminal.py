"""The terminal: its capabilities and its loss, captured output, and a run that can detach from it.

The shell waits for a small parent process; the run is its child. To detach, the child starts its own session, so that
no hang-up reaches it, and the parent exits, so that the shell's prompt returns. However the child ends, the parent
restores the terminal and says what happened. Killing the parent kills the child.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import select
import signal
import sys
import termios
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TextIO

from ndd_console.view.style import Look
from ndd_console.widgets.foreground import allow_background, terminal_mode
from ndd_engine.errors import EXIT_DONE, EXIT_FAILED
from ndd_engine.record.rundir import resume_text

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.2
# Leave the alternate screen, show the cursor, end mouse and paste modes, wrap lines, reset colours.
_MODES_OFF = (1000, 1003, 1006, 1015, 2004, 1004)
_RESTORE = (
    "\x1b[<u\x1b[?1049l\x1b[?25h" + "".join(f"\x1b[?{mode}l" for mode in _MODES_OFF) + "\x1b[?7h\x1b[0m"
)


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
    terminal = os.environ.get("TERM", "dumb")
    return terminal != "dumb" and all(stream is not None and stream.isatty() for stream in streams)


class LostTerminal(io.TextIOBase):
    """A terminal that may disappear: after a failed write, later writes are discarded.

    An exception would end the screen's writer thread while its queue is full.
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


@contextmanager
def captured(log: Path) -> Iterator[tuple[LostTerminal, TextIO]]:
    """Redirect descriptors 1 and 2 to a log. Yields the real terminal, and the log for Python's prints.

    Native libraries and child processes write there and would damage the screen.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    handles, streams = (os.dup(1), os.dup(2)), (sys.__stdout__, sys.__stderr__)
    redirect(log)
    terminal = LostTerminal(handles[0])
    # Textual draws on sys.__stderr__ and reads the size from sys.__stdout__.
    sys.__stdout__ = sys.__stderr__ = terminal  # type: ignore[misc,assignment]
    stream: TextIO = open(1, "w", buffering=1, closefd=False, encoding="utf-8", errors="replace")  # noqa: SIM115
    try:
        yield terminal, stream
    finally:
        stream.flush()
        sys.__stdout__, sys.__stderr__ = streams  # type: ignore[misc]
        for target, handle in zip((1, 2), handles, strict=True):
            if not terminal.lost:  # else later output belongs into the log, too
                os.dup2(handle, target)
            os.close(handle)


def silence(log: Path) -> None:
    """For a detached run: redirect descriptors 1 and 2 to the log and 0 to /dev/null, permanently."""
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123
        os.dup2(nothing.fileno(), 0)
    redirect(log)


def redirect(log: Path) -> None:
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)


def restart(root: Path, words: Sequence[str]) -> NoReturn:
    """Execute `ndd-console train` with these words in place of this process. root: folder of the runs.

    Nothing of this process stays: its memory on the GPU, its lock of the run and its files are closed.
    """
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.execv(sys.executable, [sys.executable, "-m", "ndd_console", "--runs", str(root), "train", *words])


def restart_text(words: Sequence[str]) -> str:
    return f"this process cannot continue to train; restarting: ndd-console train {' '.join(words)}"


class Leash:
    """The child's connection to the parent. Call `detach` once, from the main thread."""

    def __init__(self, pipe: int | None) -> None:
        self._pipe = pipe

    def tell(self, name: str) -> None:
        self._write(f"run {name}\n")

    def screen(self, shown: bool) -> None:
        """A screen opens or has closed: the parent restores the terminal if this process ends before it closes."""
        self._write(f"screen {'open' if shown else 'closed'}\n")

    def detach(self, farewell: str = "") -> None:
        """Detach from the terminal; the parent prints `farewell` and exits."""
        _die_with_parent(False)
        with contextlib.suppress(OSError):
            os.setsid()  # fails for a group leader, which is only a run without a parent
        self._write(f"detached {farewell}\n")

    def _write(self, line: str) -> None:
        if self._pipe is not None:
            with contextlib.suppress(OSError):
                os.write(self._pipe, line.encode())


def supervised(work: Callable[[Leash], int]) -> int:
    """Run `work` in a child process and return its exit status. Call before any thread is started."""
    if not hasattr(os, "fork"):
        return work(Leash(None))
    before = terminal_mode(0)
    read, write = os.pipe()
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        os.close(read)
        _die_with_parent(True)
        if os.getppid() != parent:
            return 1
        return work(Leash(write))
    os.close(write)
    return _wait(child, read, before)


def _wait(child: int, pipe: int, before: list[Any] | None) -> int:
    """The parent: forward signals until the child detaches or ends. Returns its exit status."""

    def forward(number: int, _frame: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)
            os.kill(child, signal.SIGCONT)  # job control may have stopped it

    suspended = False

    def suspend(*_: object) -> None:
        nonlocal suspended
        suspended = True

    # The terminal sends these two to the child as well.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTSTP, suspend)
    for forwarded in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(forwarded, forward)
    messages = _Messages(pipe)
    status = None
    while status is None:
        messages.read(_POLL_S)
        farewell = messages.newest.get("detached")
        if farewell is not None:
            if farewell:
                LostTerminal(2).write(farewell + "\n")
            return EXIT_DONE
        # Other processes, such as loader workers, may keep the pipe open.
        ended, wait_status = os.waitpid(child, os.WUNTRACED | (os.WNOHANG if messages.open else 0))
        if ended and not os.WIFSTOPPED(wait_status):
            status = wait_status
        elif ended and suspended:
            # Not before the child, which restores the terminal: the shell's prompt would go with its screen.
            suspended = False
            os.kill(os.getpid(), signal.SIGSTOP)
    messages.read(0)
    code, run = os.waitstatus_to_exitcode(status), messages.newest.get("run", "")
    if code < 0:
        names = {number.value: number.name for number in signal.Signals}
        _restore(f"the process was killed by {names.get(-code, -code)}", run, before)
        return 128 - code
    if messages.newest.get("screen") == "open":
        _restore(f"the process ended without closing the screen (exit status {code})", run, before)
        return code or EXIT_FAILED
    return code


class _Messages:
    """What the child has sent. newest: first word of a line -> the rest of the newest; open: whether more may come."""

    def __init__(self, pipe: int) -> None:
        self._pipe, self._buffer, self.open = pipe, b"", True
        self.newest: dict[str, str] = {}

    def read(self, timeout_s: float) -> None:
        while self.open and select.select([self._pipe], [], [], timeout_s)[0]:
            data = os.read(self._pipe, 4096)
            self.open = bool(data)
            *lines, self._buffer = (self._buffer + data).split(b"\n")
            for line in lines:
                word, _, rest = line.decode(errors="replace").partition(" ")
                self.newest[word] = rest
            timeout_s = 0


def _restore(what: str, run: str, before: list[Any] | None) -> None:
    """Restore the terminal; print what happened and how to resume the run."""
    terminal = LostTerminal(2)
    if before is not None:
        allow_background()
        terminal.write(_RESTORE)
        with contextlib.suppress(termios.error):
            termios.tcsetattr(0, termios.TCSANOW, before)
    terminal.write(f"ndd-console: {what}")
    terminal.write(f"; {resume_text(run)}\n" if run else "\n")


def _die_with_parent(wanted: bool) -> None:
    # kill -9 of the parent must end the run.
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL if wanted else 0, 0, 0, 0)
