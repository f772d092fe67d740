"""Runs the program in a pseudo-terminal and reads it through a terminal emulator."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import termios
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import ptyprocess
import pyte

from ndd_engine.record.rundir import all_runs
from tests import forked
from tests.cli import program
from tests.cli.program import ENDLESS as ENDLESS
from tests.waiting import LIMIT_S


class Terminal:
    """One program in one terminal. `text` is the visible screen. rows, columns: 0 if the terminal does not know."""

    def __init__(
        self, *arguments: str, runs: Path, columns: int = 80, rows: int = 24, **environment: str
    ) -> None:
        env = program.environment(TERM="xterm-256color", **environment)
        self.process = forked.in_terminal(["--runs", str(runs), *arguments], env, rows, columns)
        self._runs = runs
        self.screen = pyte.Screen(columns or 80, rows or 24)
        self._stream = pyte.ByteStream(self.screen)
        self.raw = b""
        self.ended = False

    @property
    def text(self) -> str:
        return "\n".join(self.screen.display)

    def pump(self, seconds: float = 0.05) -> None:
        """Read the output of the program for about this long."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0 and not self.ended:
            ready, _, _ = select.select([self.process.fd], [], [], left)
            if ready:
                try:
                    data = os.read(self.process.fd, 65536)
                except OSError:
                    data = b""
                if not data:
                    self.ended = True
                    return
                self.raw += data
                # The emulator knows no kitty keyboard protocol and prints its sequences.
                self._stream.feed(data.replace(b"\x1b[>", b"\x1b[?").replace(b"\x1b[<u", b""))

    @property
    def words(self) -> str:
        """The text on the screen without line breaks."""
        return "".join(self.screen.display)

    def until(self, condition: str | Callable[[str], bool]) -> str:
        """Wait until the screen shows a text or meets a condition. On failure, report the screen."""
        wanted = (lambda text: condition in text) if isinstance(condition, str) else condition
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            self.pump()
            if wanted(self.text):
                return self.text
            if self.ended:
                break
        raise AssertionError(f"not on the screen: {condition}\n{self.text}")

    def press(self, keys: str) -> None:
        os.write(self.process.fd, keys.encode())

    def resize(self, columns: int, rows: int) -> None:
        self.screen.resize(rows, columns)
        self.process.setwinsize(rows, columns)

    def wait(self) -> int:
        """The exit status: 128 + N for signal N."""
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            self.pump()
            if not self.process.isalive():
                self.pump()
                return int(
                    self.process.exitstatus
                    if self.process.exitstatus is not None
                    else 128 + self.process.signalstatus
                )
        raise AssertionError(f"still running\n{self.text}")

    def echoes(self) -> bool:
        """Whether the terminal is in its normal mode again."""
        return bool(termios.tcgetattr(self.process.fd)[3] & termios.ECHO)

    def hang_up(self) -> None:
        """Close the terminal, as when an ssh connection is lost."""
        os.close(self.process.fd)
        self.process.closed = True
        self.ended = True

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        # A run that left its terminal outlives the test otherwise.
        owners = [run.live_owner() for run in all_runs(self._runs)]
        children: list[psutil.Process] = []
        with contextlib.suppress(psutil.Error):
            children = psutil.Process(self.process.pid).children(recursive=True)
        pids = [self.process.pid, *(child.pid for child in children), *(one["pid"] for one in owners if one)]
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(OSError, ptyprocess.PtyProcessError):
            self.process.close(force=True)
