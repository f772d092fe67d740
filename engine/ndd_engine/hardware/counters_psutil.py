"""Host counters by psutil for systems without /proc (macOS): the same keys, null if psutil does not provide them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import psutil

from .counters import HOST_KEYS, SHORTEST_S, SLOW_EVERY, Json, Note, server_pids
from .host import Host


class PsutilCounters:
    """Like counters.LinuxCounters. Not thread-safe."""

    def __init__(self, host: Host, run_dir: Path | None, note: Note) -> None:
        self._host, self._run_dir, self._note = host, run_dir, note
        self._own = psutil.Process()
        self._offspring: list[psutil.Process] = []
        self._spent: tuple[float, float] | None = None
        self._disk_free: int | None = None
        self._count = 0

    @property
    def children(self) -> tuple[int, ...]:
        """Process ids of the descendants, as of the last search."""
        return tuple(process.pid for process in self._offspring)

    def read(self, fresh: bool = False) -> Json:
        """All counters.HOST_KEYS; rates are since the last call, null at the first."""
        body: Json = dict.fromkeys(HOST_KEYS)
        slow = fresh or self._count % SLOW_EVERY == 0
        first, self._count = self._count == 0, self._count + 1
        parts: tuple[tuple[str, Callable[[], Json]], ...] = (
            ("cpu_percent", lambda: self._read_cores(first)),
            ("process_cpu_percent", lambda: self._read_processes(slow)),
            ("memory_available_bytes", self._read_memory),
            ("disk_free_bytes", lambda: self._read_space(slow)),
        )
        for signal, part in parts:
            try:
                body.update(part())
            except Exception as error:  # noqa: BLE001 - the observer never raises; the signal stays null
                self._note(signal, error)
        return body

    def close(self) -> None:
        """Nothing stays open."""

    def _read_cores(self, first: bool) -> Json:
        percents = psutil.cpu_percent(percpu=True)
        if first or not percents:
            return {}
        return {
            "cpu_percent": round(sum(percents) / len(percents), 1),
            "cpu_per_core": [round(percent) for percent in percents],
        }

    def _read_processes(self, slow: bool) -> Json:
        if slow:
            self._offspring = self._own.children(recursive=True)
        times = self._own.cpu_times()
        spent, rss, workers, alive = times.user + times.system, 0, 0, []
        servers = server_pids()
        for process in self._offspring:
            try:
                with process.oneshot():
                    times = process.cpu_times()
                    if process.pid not in servers:
                        rss += process.memory_info().rss
                        workers += 1
            except psutil.Error:
                continue
            spent += times.user + times.system
            alive.append(process)
        self._offspring = alive
        now, percent = time.monotonic(), None
        if self._spent is None:
            self._spent = (spent, now)
        elif now - self._spent[1] >= SHORTEST_S:
            percent = round(max(100 * (spent - self._spent[0]) / (now - self._spent[1]), 0.0), 1)
            self._spent = (spent, now)
        return {
            "process_cpu_percent": percent,
            "rss_bytes": self._own.memory_info().rss,
            "workers": workers,
            "workers_rss_bytes": rss,
        }

    def _read_memory(self) -> Json:
        return {
            "memory_available_bytes": psutil.virtual_memory().available,
            "memory_limit_bytes": self._host.memory_limit_bytes or self._host.memory_total_bytes,
        }

    def _read_space(self, slow: bool) -> Json:
        if self._run_dir is not None and slow:
            self._disk_free = psutil.disk_usage(str(self._run_dir)).free
        return {"disk_free_bytes": self._disk_free}
