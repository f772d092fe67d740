"""A run that can detach from its terminal: the shell waits for a small parent process, the run is its child.

To detach, the child starts its own session, so that no hang-up reaches it, and the parent exits, so that the shell's
prompt returns. If the child is killed, the parent restores the terminal. Killing the parent kills the child.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import termios
from collections.abc import Callable
from typing import Any

from .terminal import LostTerminal

_PR_SET_PDEATHSIG = 1
# Leave the alternate screen, show the cursor, end mouse and paste modes, wrap lines, reset colours.
_MODES_OFF = (1000, 1003, 1006, 1015, 2004, 1004)
_RESTORE = (
    "\x1b[<u\x1b[?1049l\x1b[?25h" + "".join(f"\x1b[?{mode}l" for mode in _MODES_OFF) + "\x1b[?7h\x1b[0m"
)


class Leash:
    """The child's connection to the parent. Call `detach` once, from the main thread."""

    def __init__(self, pipe: int | None) -> None:
        self._pipe = pipe

    def tell(self, name: str) -> None:
        """Send the name of the run for the parent's messages."""
        self._write(f"run {name}\n")

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
    before = _terminal_state()
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

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to the child as well
    for forwarded in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(forwarded, forward)
    run, buffer = "", b""
    while True:
        select.select([pipe], [], [])
        data = os.read(pipe, 4096)
        if not data:
            break
        *lines, buffer = (buffer + data).split(b"\n")
        for line in lines:
            word, _, rest = line.decode(errors="replace").partition(" ")
            if word == "run":
                run = rest
            elif word == "detached":
                if rest:
                    LostTerminal(2).write(rest + "\n")
                return 0
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        _restore(-code, run, before)
        return 128 - code
    return code


def _restore(number: int, run: str, before: list[Any] | None) -> None:
    """After a kill: restore the terminal and print how to resume the run."""
    terminal = LostTerminal(2)
    if before is not None:
        terminal.write(_RESTORE)
        with contextlib.suppress(termios.error):
            termios.tcsetattr(0, termios.TCSANOW, before)
    name = signal.Signals(number).name if number in set(signal.Signals) else str(number)
    terminal.write(f"ndd-console: the process was killed by {name}")
    terminal.write(f"; resume with: ndd-console train --resume {run}\n" if run else "\n")


def _terminal_state() -> list[Any] | None:
    with contextlib.suppress(termios.error, OSError):
        return termios.tcgetattr(0)
    return None


def _die_with_parent(wanted: bool) -> None:
    # kill -9 of the parent must end the run.
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL if wanted else 0, 0, 0, 0)
