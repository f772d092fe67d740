"""Reads the captured output of a run as it grows."""

from __future__ import annotations

import re
from pathlib import Path

from ndd_engine.record.file import open_log
from ndd_engine.text import printable

# Read at most this much at once: of a longer log, its end.
_MOST_BYTES = 800_000
# Colours and cursor movements in the output of a script.
_ESCAPES = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]{0,200}(\x07|\x1b\\))")


class LogTail:
    """The lines of a text file, with control characters escaped. unfinished: the last line while it has no end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_to = 0
        self._rest = b""
        self.unfinished = ""

    def read(self) -> list[str]:
        """The lines since the last call; [] if there is no file."""
        try:
            with open_log(self._path) as file:
                end = file.seek(0, 2)
                if end < self._read_to:  # it was cut
                    self._read_to, self._rest = 0, b""
                if end - self._read_to > _MOST_BYTES:
                    self._read_to, self._rest = end - _MOST_BYTES, b""
                file.seek(self._read_to)
                new = file.read(end - self._read_to)
        except OSError:
            return []
        self._read_to += len(new)
        *lines, self._rest = (self._rest + new).split(b"\n")
        self._rest = self._rest[-_MOST_BYTES:]
        self.unfinished = _shown(self._rest)
        return [_shown(line) for line in lines]


def _shown(line: bytes) -> str:
    text = _ESCAPES.sub("", line.decode("utf-8", "replace"))
    # A progress bar rewrites its line: the last text in it counts.
    return printable(text.rstrip("\r").rpartition("\r")[2])
