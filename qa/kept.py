"""Results that are kept line by line, so that a command that is interrupted can be continued."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def append(path: Path, line: str) -> None:
    """Add a line to a record, complete or not at all, after ending a torn one."""
    torn = path.exists() and path.stat().st_size and not path.read_bytes().endswith(b"\n")
    with path.open("ab", buffering=0) as file:
        file.write(f"{chr(10) if torn else ''}{line}\n".encode())


def read_lines(record: Path, make: Callable[[str], T]) -> list[T]:
    """What `make` returns for each line of a record; torn and strange lines are ignored."""
    found = []
    for line in record.read_text("utf-8", "replace").splitlines() if record.exists() else ():
        with suppress(ValueError, TypeError, KeyError):
            found.append(make(line))
    return found
