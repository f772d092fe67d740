"""Finds other processes that use the cores of this run; searches rarely, and only while cores are in use."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from ndd_engine.text import printable

# Minimum cores used by others to start a search.
NOTICEABLE = 0.3
# Minimum cores used by a process to report it.
LEAST = 0.05
MOST = 3
# Samples from one search to the next.
EVERY = 5
# A search may take at most this share of the time, however many processes there are.
SHARE = 1e-3
# Minimum seconds between the two measurements: CPU time is counted in ticks of 10 ms.
_APART_S = 0.2

# (process id, start time in ticks): process ids are reused.
_Key = tuple[int, int]


class Neighbours:
    """Finds the busiest other processes by reading /proc twice, one sample apart. Not thread-safe.

    cores: those that this process may run on; processes on other cores are ignored.
    """

    def __init__(self, root: Path, cores: frozenset[int]) -> None:
        self._proc, self._cores = root / "proc", cores
        self._tick = os.sysconf("SC_CLK_TCK")
        self._first: tuple[dict[_Key, int], float] | None = None
        self._found: list[dict[str, Any]] | None = None
        self._samples = EVERY
        self._spent = 0.0
        self._next = 0.0

    def read(self, others: float | None) -> list[dict[str, Any]] | None:
        """Call once per sample with the cores that others used in it (None if unknown).

        Returns [{"pid", "name", "cores"}, …], the busiest first; empty if none is visible (other containers); None
        while others use few cores or before the first search. Raises OSError without /proc.
        """
        self._samples += 1
        now = time.monotonic()
        if self._first is not None:
            if now - self._first[1] >= _APART_S:
                self._finish(now)
        elif others is None or others <= NOTICEABLE:
            self._found = None
        elif self._samples >= EVERY and now >= self._next:
            self._samples = 0
            begin = time.thread_time()
            ticks = {key: spent for key, spent, _, _, _ in self._processes()}
            self._spent = time.thread_time() - begin
            self._first = (ticks, now)
        return self._found

    def _finish(self, now: float) -> None:
        assert self._first is not None
        (before, then), self._first = self._first, None
        begin = time.thread_time()
        processes = list(self._processes())
        ours = family(os.getpid(), {key[0]: parent for key, _, parent, _, _ in processes})
        found: list[dict[str, Any]] = []
        for key, spent, _, core, name in processes:
            # A new process started between the two reads.
            cores = (spent - before.get(key, 0)) / self._tick / (now - then)
            if cores >= LEAST and key[0] not in ours and core in self._cores:
                found.append({"pid": key[0], "name": name, "cores": round(cores, 2)})
        found.sort(key=lambda item: float(item["cores"]), reverse=True)
        self._found = found[:MOST]
        self._spent += time.thread_time() - begin
        self._next = now + self._spent / SHARE

    def _processes(self) -> list[tuple[_Key, int, int, int, str]]:
        """(key, ticks of CPU time, parent, last core, name) of each process; see proc_pid_stat(5)."""
        found = []
        for entry in os.listdir(self._proc):  # noqa: PTH208 - names are all that is needed
            if not entry.isdecimal():
                continue
            try:
                text = (self._proc / entry / "stat").read_bytes()
                left, right = text.index(b"("), text.rindex(b")")
                words = text[right + 2 :].split()
                name = printable(text[left + 1 : right].decode(errors="replace"))
                key = (int(entry), int(words[19]))
                found.append((key, int(words[11]) + int(words[12]), int(words[1]), int(words[36]), name))
            except (OSError, ValueError, IndexError):
                continue  # it has ended, or is hidden
        return found


def family(pid: int, parents: dict[int, int]) -> set[int]:
    """The process and its descendants."""
    offspring: dict[int, list[int]] = {}
    for child, parent in parents.items():
        offspring.setdefault(parent, []).append(child)
    family, waiting = {pid}, [pid]
    while waiting:
        children = offspring.get(waiting.pop(), [])
        family.update(children)
        waiting.extend(children)
    return family
