"""Reads events.jsonl: opens only regular files, skips what it cannot read, and counts it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from ndd_engine.files import open_regular

from .event import other_version
from .events import Event, decode

FOLD_MARK = b'"type":"fold"'
# Maximum bytes of a line. An event has a few hundred, a fold event up to 100 KB.
MAX_LINE = 8 * 1024 * 1024


def open_log(path: Path) -> BinaryIO:
    """Open for reading. Raises OSError, also for anything but a regular file."""
    return os.fdopen(open_regular(path), "rb")


class EventLog:
    """The events of a log from `offset` on.

    damaged: number of lines that were skipped so far because they are no event, or one with values of the wrong type.
    replaced: set when another file has taken the place of the one that was read; it is read from its beginning.
    refused: why a record of another version is not read, or "".
    """

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path, self.offset = path, offset
        self.damaged = 0
        self.replaced = False
        self.refused = ""
        self._file: tuple[int, int] | None = None
        self._too_long = False  # the line at `offset` began before it

    def new(self) -> Iterator[tuple[float, Event]]:
        """(Unix time in seconds, event) of each line since the last call, without folded states and unknown types.

        A line that is incomplete is read next time. Raises OSError if the file cannot be read.
        """
        with open_log(self.path) as file:
            status = os.fstat(file.fileno())
            if self._file is not None and self._file != (status.st_dev, status.st_ino):
                self.offset, self._too_long, self.replaced = 0, False, True
            self._file = status.st_dev, status.st_ino
            file.seek(self.offset)
            while line := file.readline(MAX_LINE):
                if self.offset == 0 and (found := other_version(line)):
                    self.refused = found
                    return
                whole = line.endswith(b"\n")
                if not whole and len(line) < MAX_LINE and not self._too_long:
                    return
                self.offset += len(line)
                if self._too_long or not whole:
                    self.damaged += not self._too_long
                    self._too_long = not whole
                elif FOLD_MARK not in line[:40]:
                    try:
                        item = decode(line)
                    except ValueError:
                        self.damaged += 1
                        continue
                    if item is not None:
                        yield item


def damage_text(count: int) -> str:
    """ "3 lines of events.jsonl are damaged and were skipped"; "" without damage."""
    if not count:
        return ""
    lines, were = (
        ("1 line", "is damaged and was") if count == 1 else (f"{count:,} lines", "are damaged and were")
    )
    return f"{lines} of events.jsonl {were} skipped"
