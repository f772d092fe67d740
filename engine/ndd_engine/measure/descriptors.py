"""Counts the open descriptors of a process from outside, and tells of which kind the newest are."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import PurePath

from ndd_engine.hardware.process_state import newest_files, open_files, open_files_limit
from ndd_engine.record.process_events import DescriptorsEvent
from ndd_engine.text import printable

# From one count to the next: at first, for so long, and later.
LOOK_S, FIRST_S, RARE_LOOK_S = 0.2, 30.0, 1.0
# A number is recorded when it has changed by so many, and by this part.
LEAST_CHANGE, LEAST_PART = 8, 0.02
# Descriptors whose kind is looked at, and the part of them that decides it.
NEWEST, MOST_OF = 64, 0.5
_DIGITS = re.compile(r"\d+")


class Descriptors:
    """Of one process at a time. Never raises.

    where: of a kind, such as "file", the line of the script that keeps them.
    """

    def __init__(self, where: Callable[[str], str] = lambda _: "") -> None:
        self._where = where
        self._begun = time.monotonic()
        self._next = 0.0
        self._pid = 0
        self.told: DescriptorsEvent | None = None

    def look(self, pid: int, step: int) -> DescriptorsEvent | None:
        """What is to be recorded now, if anything is."""
        now = time.monotonic()
        if pid != self._pid:
            self._pid, self.told, self._next = pid, None, 0.0
        if now < self._next:
            return None
        self._next = now + (LOOK_S if now - self._begun < FIRST_S else RARE_LOOK_S)
        count = open_files(pid)
        if not count:
            return None
        limit = open_files_limit(pid)
        if self.told is None:
            self.told = DescriptorsEvent(step, count, limit)
            return self.told
        if abs(count - self.told.open) < max(LEAST_CHANGE, LEAST_PART * self.told.open):
            return None
        kinds, path = kinds_of(newest_files(pid, min(NEWEST, max(count - self.told.open, LEAST_CHANGE))))
        before = self.told
        where = before.where or (self._where(max(kinds, key=kinds.__getitem__)) if kinds else "")
        self.told = DescriptorsEvent(step, count, limit, kinds, path, where)
        return self.told

    def full(self, step: int) -> DescriptorsEvent | None:
        """What is recorded at the end of a process that has reached the limit."""
        told = self.told
        if told is None or told.limit is None:
            return None
        return DescriptorsEvent(step, told.limit, told.limit, told.kinds, told.path, told.where)


def kinds_of(files: Sequence[str]) -> tuple[dict[str, int], str]:
    """(kind -> number, what the paths have in common) of what descriptors refer to."""
    special = ("shared memory", "socket", "pipe", "anon_inode")
    kinds = Counter(file if file in special else "file" for file in files)
    paths = [file for file in files if file not in special]
    alike = Counter(_DIGITS.sub("N", file) for file in paths)
    path = ""
    if alike:
        common, times = alike.most_common(1)[0]
        if times >= MOST_OF * len(paths):
            path = _common([file for file in paths if _DIGITS.sub("N", file) == common])
    return dict(kinds), printable("/".join(PurePath(path).parts[-2:]))


def _common(paths: Sequence[str]) -> str:
    """Paths that differ in digits only as one, with N for those."""
    numbers = zip(*(_DIGITS.findall(path) for path in paths), strict=True)
    told = iter([found[0] if len(set(found)) == 1 else "N" for found in numbers])
    return _DIGITS.sub(lambda _: next(told), paths[0])
