"""Host counters at minimal cost: a few reads of files that stay open.

Every read releases the interpreter lock and must reacquire it from the training thread, so fewer reads matter more
than faster parsing. Searching /proc for child processes is expensive and done rarely.
"""

from __future__ import annotations

import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import psutil

from .cgroup import read_limits
from .host import Host
from .neighbours import Neighbours, family

Json = dict[str, Any]

HOST_KEYS = (
    "cpu_percent",
    "cpu_per_core",
    "process_cpu_percent",
    "ranks_cpu_percent",
    "rss_bytes",
    "workers",
    "workers_rss_bytes",
    "memory_available_bytes",
    "memory_limit_bytes",
    "disk_free_bytes",
    "disk_read_bytes_s",
    "disk_write_bytes_s",
    "neighbours",
    "cpu_throttled",
)

# Minimum seconds for a rate: the kernel counts CPU time in ticks of 10 ms.
SHORTEST_S = 0.05
SLOW_EVERY = 5
_SEARCH_S = 5.0
# Maximum share of the time for searching /proc.
_SEARCH_SHARE = 1e-3

Note = Callable[[str, Exception], None]


class HostCounters(ABC):
    """Host counters of one system. Not thread-safe.

    note: called with (counter, error) for every part that failed and is null. ranks: process ids of the other ranks of
    this run on this host. children: process ids of the descendants, as of the last search.
    """

    def __init__(self, host: Host, run_dir: Path | None, note: Note, ranks: Sequence[int] = ()) -> None:
        self._host, self._run_dir, self._note, self._ranks = host, run_dir, note, tuple(ranks)
        self._before: dict[str, Any] = {}
        self._count = 0
        self._disk_free: int | None = None
        self.children: tuple[int, ...] = ()

    def read(self, fresh: bool = False) -> Json:
        """All HOST_KEYS; rates are since the last call, null at the first. fresh: search for child processes now."""
        body: Json = dict.fromkeys(HOST_KEYS)
        slow = fresh or self._count % SLOW_EVERY == 0
        for signal, part in self._parts(body, fresh, slow):
            try:
                body.update(part())
            except Exception as error:  # noqa: BLE001 - the observer never raises; the signal stays null
                self._note(signal, error)
        self._count += 1
        return body

    @abstractmethod
    def _parts(self, body: Json, fresh: bool, slow: bool) -> Iterable[tuple[str, Callable[[], Json]]]:
        """(counter, function that reads it and others) in order. body: what was read so far."""

    def close(self) -> None:  # noqa: B027 - most systems keep nothing open
        """Close the files; a later read reopens them."""

    def _since(self, key: str, value: Any) -> tuple[Any, float] | None:
        """(previous value, seconds since then), and store this value; None at first or after less than SHORTEST_S."""
        now = time.monotonic()
        before = self._before.get(key)
        if before is not None and now - before[1] < SHORTEST_S:
            return None
        self._before[key] = (value, now)
        return (before[0], now - before[1]) if before is not None else None

    def _memory(self, available: int | None) -> Json:
        limit = self._host.memory_limit_bytes or self._host.memory_total_bytes
        return {"memory_available_bytes": available, "memory_limit_bytes": limit}

    def _read_space(self, slow: bool) -> Json:
        if self._run_dir is not None and slow:
            self._disk_free = None
            self._disk_free = psutil.disk_usage(str(self._run_dir)).free
        return {"disk_free_bytes": self._disk_free}


class LinuxCounters(HostCounters):
    """Reads /proc and the control groups. root: folder with proc/ and sys/."""

    def __init__(
        self,
        host: Host,
        run_dir: Path | None,
        note: Note,
        ranks: Sequence[int] = (),
        root: Path = Path("/"),
    ) -> None:
        super().__init__(host, run_dir, note, ranks)
        self._root = root
        self._of_ranks: tuple[int, ...] = ()  # the other ranks and their descendants, as of the last search
        self._files: dict[Path, int] = {}
        self._page = os.sysconf("SC_PAGE_SIZE")
        self._tick = os.sysconf("SC_CLK_TCK")
        self._limits = read_limits(root)
        try:
            self._cores = frozenset(os.sched_getaffinity(0))
        except (AttributeError, OSError):
            self._cores = frozenset(range(host.logical_cores))
        self._next_search = 0.0
        self._inactive: dict[Path, int] = {}
        self._neighbours = Neighbours(root, self._cores, self._ranks)

    def _parts(self, body: Json, fresh: bool, slow: bool) -> Iterable[tuple[str, Callable[[], Json]]]:
        return (
            ("cpu_percent", self._read_cores),
            ("process_cpu_percent", lambda: self._read_processes(fresh)),
            ("memory_available_bytes", lambda: self._read_memory(slow)),
            ("disk_free_bytes", lambda: self._read_space(slow)),
            ("disk_read_bytes_s", self._read_io),
            ("neighbours", lambda: self._read_neighbours(body)),
            ("cpu_throttled", self._read_throttled),
        )

    def close(self) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def _bytes(self, path: Path, most: int = 4096) -> bytes:
        """The first `most` bytes of a file, through a descriptor that stays open."""
        descriptor = self._files.get(path)
        if descriptor is None:
            descriptor = self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return os.pread(descriptor, most, 0)

    def _forget(self, path: Path) -> None:
        descriptor = self._files.pop(path, None)
        if descriptor is not None:
            os.close(descriptor)

    def _read_cores(self) -> Json:
        times: dict[int, tuple[int, int]] = {}
        for line in self._bytes(self._root / "proc/stat", 1 << 16).split(b"\n"):
            if not line.startswith(b"cpu"):
                break  # what follows (interrupts) is long
            words = line.split()
            if words[0] == b"cpu" or (core := int(words[0][3:])) not in self._cores:
                continue
            # user nice system idle iowait irq softirq steal; guest time is part of user already
            spent = [int(word) for word in words[1:9]]
            times[core] = (sum(spent), spent[3] + spent[4])
        quota, usage = self._limits.cpu_quota, self._limits.cpu_usage
        share = self._quota_share(usage, quota) if usage and quota == self._host.usable_cpus else None
        earlier = self._since("cores", times)
        if earlier is None:
            return {}
        percents = []
        for core, (total, idle) in sorted(times.items()):
            before = earlier[0].get(core, (0, 0))
            elapsed = total - before[0]
            # iowait may run backwards on some kernels
            percents.append(
                min(max(100 * (1 - (idle - before[1]) / elapsed), 0.0), 100.0) if elapsed > 0 else 0.0
            )
        if quota is None or quota != self._host.usable_cpus:
            share = sum(percents) / len(percents) if percents else None
        return {
            "cpu_percent": None if share is None else round(share, 1),
            "cpu_per_core": [round(percent) for percent in percents],
        }

    def _quota_share(self, usage: Path, quota: float | None) -> float | None:
        """Percent of the quota that the control group used."""
        if not quota:
            return None
        text = self._bytes(usage)
        seconds = int(text.split()[1]) / 1e6 if text.startswith(b"usage_usec") else int(text) / 1e9
        earlier = self._since("quota", seconds)
        return min(100 * (seconds - earlier[0]) / (earlier[1] * quota), 100.0) if earlier else None

    def _read_processes(self, fresh: bool) -> Json:
        now = time.monotonic()
        if fresh or now >= self._next_search:
            self._search(now)
        own = self._stat(self._root / "proc/self/stat")
        cpu, theirs, rss, workers, gone = {0: own[0]}, {}, 0, 0, []
        servers = server_pids()
        for pid in self.children:
            try:
                spent, size = self._stat(self._root / f"proc/{pid}/stat")
            except (OSError, IndexError, ValueError):  # it ended: search again next time
                gone.append(pid)
                continue
            cpu[pid] = spent
            if pid not in servers:
                rss += size
                workers += 1
        for pid in self._of_ranks:
            try:
                theirs[pid] = self._stat(self._root / f"proc/{pid}/stat")[0]
            except (OSError, IndexError, ValueError):
                gone.append(pid)
        if gone:
            self._drop(gone)
            self._next_search = 0.0
        return {
            "process_cpu_percent": self._percent("processes", cpu),
            "ranks_cpu_percent": self._percent("ranks", theirs) if self._ranks else None,
            "rss_bytes": own[1],
            "workers": workers,
            "workers_rss_bytes": rss,
        }

    def _percent(self, key: str, cpu: dict[int, int]) -> float | None:
        """CPU time of these processes since the last sample, of one core. cpu: ticks by process."""
        earlier = self._since(key, cpu)
        if earlier is None:
            return None
        # New processes count from now on, without their earlier CPU time.
        ticks: int = sum(spent - earlier[0].get(pid, spent) for pid, spent in cpu.items())
        return round(100 * ticks / self._tick / earlier[1], 1)

    def _stat(self, path: Path) -> tuple[int, int]:
        """(ticks of CPU time, resident bytes) of a process; see proc_pid_stat(5)."""
        text = self._bytes(path)
        words = text[text.rindex(b")") + 2 :].split()
        if words[0] == b"Z":
            raise ValueError("it has ended")
        return int(words[11]) + int(words[12]), int(words[21]) * self._page

    def _search(self, now: float) -> None:
        """Find the descendants; schedule the next search by the cost of this one, soon while there are none."""
        start = time.thread_time()
        found = tuple(descendants(self._root))
        alive = [rank for rank in self._ranks if (self._root / f"proc/{rank}").exists()]
        of_ranks = tuple(pid for rank in alive for pid in (rank, *descendants(self._root, rank)))
        self._drop([pid for pid in (*self.children, *self._of_ranks) if pid not in {*found, *of_ranks}])
        self.children, self._of_ranks = found, of_ranks
        self._next_search = now + max(
            _SEARCH_S if found else 0.0, (time.thread_time() - start) / _SEARCH_SHARE
        )

    def _drop(self, pids: list[int]) -> None:
        for pid in pids:
            self._forget(self._root / f"proc/{pid}/stat")
        self.children = tuple(pid for pid in self.children if pid not in pids)
        self._of_ranks = tuple(pid for pid in self._of_ranks if pid not in pids)

    def _read_memory(self, slow: bool) -> Json:
        available = None
        for line in self._bytes(self._root / "proc/meminfo", 1024).split(b"\n"):
            if line.startswith(b"MemAvailable:"):
                available = int(line.split()[1]) * 1024
                break
        for group, limit in self._limits.memory:
            modern = (group / "memory.current") in self._files or (group / "memory.current").exists()
            usage = int(self._bytes(group / ("memory.current" if modern else "memory.usage_in_bytes")))
            if slow or group not in self._inactive:  # expensive: the kernel sums it over all cores
                key = b"inactive_file " if modern else b"total_inactive_file "
                lines = self._bytes(group / "memory.stat", 1 << 14).split(b"\n")
                self._inactive[group] = next(
                    (int(line.split()[1]) for line in lines if line.startswith(key)), 0
                )
            # Inactive file pages count as free: the kernel reclaims them first.
            free = max(limit - max(usage - self._inactive[group], 0), 0)
            available = free if available is None else min(available, free)
        return self._memory(available)

    def _read_io(self) -> Json:
        """Bytes per second read from and written to storage by this process, without its workers."""
        counts = dict(line.split(b": ") for line in self._bytes(self._root / "proc/self/io").splitlines())
        now = (int(counts[b"read_bytes"]), int(counts[b"write_bytes"]))
        earlier = self._since("io", now)
        if earlier is None:
            return {}
        (read, written), seconds = earlier
        return {
            "disk_read_bytes_s": round((now[0] - read) / seconds),
            "disk_write_bytes_s": round((now[1] - written) / seconds),
        }

    def _read_neighbours(self, body: Json) -> Json:
        """The busiest other processes, if others use a noticeable part of the cores."""
        used, own, ranks = body["cpu_percent"], body["process_cpu_percent"], body["ranks_cpu_percent"]
        known = used is not None and own is not None and not (self._ranks and ranks is None)
        others = used / 100 * self._host.usable_cpus - (own + (ranks or 0.0)) / 100 if known else None
        return {"neighbours": self._neighbours.read(others)}

    def _read_throttled(self) -> Json:
        """Share of time in which the CPU quota throttled the cgroup, 0..1; null without a quota.

        The kernel sums the throttled time over all cores, so it is taken relative to the requested CPU time, or to
        the elapsed time if the group needed less than a core.
        """
        stat, usage = self._limits.cpu_stat, self._limits.cpu_usage
        if stat is None or usage is None:
            return {}
        held = _counted(self._bytes(stat), (b"throttled_usec", 1e-6), (b"throttled_time", 1e-9))
        if held is None:
            return {}
        text = self._bytes(usage)
        spent = _counted(text, (b"usage_usec", 1e-6))
        if spent is None:
            spent = int(text) * 1e-9
        earlier = self._since("throttled", (held, spent))
        if earlier is None:
            return {}
        (held_before, spent_before), seconds = earlier
        withheld = max(held - held_before, 0.0)
        wanted = withheld + max(spent - spent_before, 0.0)
        share = min(withheld / wanted, withheld / seconds) if withheld else 0.0
        return {"cpu_throttled": round(share, 4)}


def _counted(text: bytes, *names: tuple[bytes, float]) -> float | None:
    """The first of the named counters in a file of "name number" lines, times its unit; None if none is there."""
    counters = dict(line.split(b" ", 1) for line in text.splitlines() if b" " in line)
    return next((int(counters[name]) * unit for name, unit in names if name in counters), None)


def server_pids() -> set[int]:
    """Helper processes of multiprocessing, which load no data."""
    found = set()
    for module, server, pid in (
        ("multiprocessing.forkserver", "_forkserver", "_forkserver_pid"),
        ("multiprocessing.resource_tracker", "_resource_tracker", "_pid"),
    ):
        number = getattr(getattr(sys.modules.get(module), server, None), pid, None)
        if isinstance(number, int):
            found.add(number)
    return found


def descendants(root: Path = Path("/"), of: int | None = None) -> list[int]:
    """Running descendants of this process, or of another one; empty if /proc cannot be read."""
    own = os.getpid()
    if (root / f"proc/self/task/{own}/children").exists():
        found: list[int] = []
        waiting = ["self" if of is None else str(of)]
        while waiting:
            for pid in _children_of(root / "proc" / waiting.pop() / "task"):
                found.append(pid)
                waiting.append(str(pid))
        return found
    return _by_parent(root, own if of is None else of)


def _children_of(tasks: Path) -> list[int]:
    """Children of a process: each of its threads lists those that it started."""
    found: list[int] = []
    try:
        for task in os.listdir(tasks):  # noqa: PTH208 - names are all that is needed
            found.extend(int(word) for word in (tasks / task / "children").read_bytes().split())
    except OSError:
        pass  # it ended meanwhile
    return found


def _by_parent(root: Path, of: int) -> list[int]:
    """Descendants of a process by the parent ids of all processes, for kernels that do not list children."""
    parents: dict[int, int] = {}
    try:
        names = os.listdir(root / "proc")  # noqa: PTH208 - names are all that is needed
    except OSError:
        return []
    for name in names:
        if not name.isdecimal():
            continue
        try:
            text = (root / "proc" / name / "stat").read_bytes()
        except OSError:
            continue
        words = text[text.rindex(b")") + 2 :].split(maxsplit=2)
        if words[0] != b"Z":
            parents[int(name)] = int(words[1])
    return sorted(family(of, parents) - {of})
