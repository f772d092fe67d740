"""Reads what the observer writes: one JSON file per process, each appended to by that process alone."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ndd_engine.files import open_regular

# Formats that are understood, and the bytes of the longest line.
VERSION = 1
LONGEST = 1 << 20
# Bytes that are read from a file at a time: a script that ran without us may have left much.
MOST = 1 << 24

Line = dict[str, Any]


class Records:
    """Follows the files of a folder. damaged: lines that could not be read; names: the processes so far."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._places: dict[str, int] = {}
        self.damaged = 0

    @property
    def names(self) -> tuple[str, ...]:
        """The processes, the one that leads first: rank 0, else the first that trained."""
        return tuple(sorted(self._places, key=_rank))

    def new(self) -> Iterator[tuple[str, Line]]:
        """(process, line) of everything that was written since the last call, in order for each process."""
        try:
            found = sorted(
                (entry.name for entry in os.scandir(self._folder) if entry.name.endswith(".jsonl")), key=_rank
            )
        except OSError:  # nothing has trained yet
            return
        for name in found:
            yield from ((name.removesuffix(".jsonl"), line) for line in self._lines(name))

    def _lines(self, name: str) -> Iterator[Line]:
        key = name.removesuffix(".jsonl")
        begin = self._places.setdefault(key, 0)
        try:
            with os.fdopen(open_regular(self._folder / name, os.O_RDONLY), "rb") as file:
                file.seek(begin)
                data = file.read(MOST)
        except OSError:
            return
        whole = data.rfind(b"\n") + 1
        if not whole and len(data) >= LONGEST:
            whole, self.damaged = len(data), self.damaged + 1  # no line is that long
            data = b""
        self._places[key] = begin + whole
        for text in data[:whole].splitlines():
            line = decoded(text)
            if line is None:
                self.damaged += 1
            else:
                yield line


def decoded(text: bytes) -> Line | None:
    """A line of a record; None if it is damaged or of another version."""
    if len(text) > LONGEST:
        return None
    try:
        line = json.loads(text, parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        return None
    known = isinstance(line, dict) and line.get("v") == VERSION and isinstance(line.get("type"), str)
    time_ok = known and isinstance(line.get("t"), (int, float))
    return line if time_ok else None


def _rank(name: str) -> tuple[int, int, str]:
    kind, _, number = name.removesuffix(".jsonl").partition("-")
    return (0 if kind == "rank" else 1, int(number) if number.isdecimal() else 0, name)
