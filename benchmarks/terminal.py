"""Runs a program in a real pseudo-terminal, and records what it writes and when."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pexpect

# The screen sends this query at start; modern terminals answer yes, and updates are then wrapped in two sequences.
_SYNC_QUERY, _SYNC_ANSWER = b"\x1b[?2026$p", b"\x1b[?2026;2$y"
# Variables that affect drawing.
_NOT_INHERITED = ("SSH_CONNECTION", "NO_COLOR", "COLUMNS", "LINES", "NDD_RUNS", "TERM_PROGRAM", "ESCDELAY")
_READ = 65536


@dataclass(frozen=True)
class Chunk:
    """What arrived in one read. t: unix seconds; tick: perf_counter seconds."""

    t: float
    tick: float
    data: bytes


class Terminal:
    """Spawns `argv` in an 80x24 truecolor terminal. Use as a context manager."""

    def __init__(
        self, argv: Sequence[str], columns: int = 80, rows: int = 24, folder: Path | None = None, **more: str
    ) -> None:
        """folder: the working directory. more: environment variables."""
        environment = {name: value for name, value in os.environ.items() if not _left_out(name)}
        environment |= {"TERM": "xterm-256color", "COLORTERM": "truecolor", "LC_ALL": "C.UTF-8", **more}
        self.spawned = time.perf_counter()
        self.child: pexpect.spawn = pexpect.spawn(
            argv[0], list(argv[1:]), env=environment, cwd=folder, dimensions=(rows, columns), timeout=None
        )
        self._descriptor = int(self.child.child_fd)
        self._tail = b""
        self.ended = False

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.child.close(force=True)

    def read(self, timeout_s: float) -> Chunk | None:
        """The next output of the program; None after the timeout, or at its end (`ended`)."""
        ready, _, _ = select.select([self._descriptor], [], [], max(timeout_s, 0.0))
        if not ready:
            return None
        tick, t = time.perf_counter(), time.time()
        try:
            data = os.read(self._descriptor, _READ)
        except OSError:
            data = b""  # on Linux, the other side is closed
        if not data:
            self.ended = True
            return None
        if _SYNC_QUERY in self._tail + data:
            self.press(_SYNC_ANSWER)
            self._tail = b""
        else:
            self._tail = data[-len(_SYNC_QUERY) :]
        return Chunk(t, tick, data)

    def press(self, keys: bytes) -> None:
        """Type."""
        os.write(self._descriptor, keys)

    def wait_for(self, expected: bytes, timeout_s: float) -> float | None:
        """perf_counter when `expected` arrived, None after the timeout."""
        return self.wait_for_all((expected,), timeout_s)[0]

    def wait_for_all(self, expected: Sequence[bytes], timeout_s: float) -> list[float | None]:
        """The same for several texts, in any order."""
        seen = b""
        arrived: list[float | None] = [None] * len(expected)
        deadline = time.perf_counter() + timeout_s
        while not self.ended and (left := deadline - time.perf_counter()) > 0:
            chunk = self.read(left)
            if chunk is None:
                continue
            seen = (seen + chunk.data)[-2 * _READ :]
            arrived = [
                chunk.tick if at is None and text in seen else at
                for at, text in zip(arrived, expected, strict=True)
            ]
            if None not in arrived:
                break
        return arrived

    def drain(self, seconds: float) -> None:
        """Read output for a while, like a terminal."""
        deadline = time.perf_counter() + seconds
        while not self.ended and (left := deadline - time.perf_counter()) > 0:
            self.read(left)

    def wait_end(self, timeout_s: float) -> float | None:
        """perf_counter when the program closed the terminal, None after the timeout."""
        deadline = time.perf_counter() + timeout_s
        while not self.ended and (left := deadline - time.perf_counter()) > 0:
            self.read(left)
        return time.perf_counter() if self.ended else None


class Screen(Terminal):
    """A terminal, and what it shows."""

    def __init__(
        self, argv: Sequence[str], columns: int = 80, rows: int = 24, folder: Path | None = None, **more: str
    ) -> None:
        import pyte  # the other benchmarks do without

        self.screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self.screen)
        super().__init__(argv, columns, rows, folder, **more)

    def read(self, timeout_s: float) -> Chunk | None:
        chunk = super().read(timeout_s)
        if chunk is not None:
            # The emulator knows no kitty keyboard protocol and prints its sequences.
            self._stream.feed(chunk.data.replace(b"\x1b[>", b"\x1b[?").replace(b"\x1b[<u", b""))
        return chunk


def _left_out(name: str) -> bool:
    return name in _NOT_INHERITED or name.startswith("TEXTUAL")
