"""Host counters by psutil for systems without /proc (macOS): the same keys, null if psutil does not provide them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from .counters import HostCounters, Json, Note, server_pids
from .host import Host


class PsutilCounters(HostCounters):
    """Reads what psutil provides."""

    def __init__(self, host: Host, run_dir: Path | None, note: Note, ranks: Sequence[int] = ()) -> None:
        super().__init__(host, run_dir, note, ranks)
        self._own = psutil.Process()
        self._offspring: list[psutil.Process] = []
        self._of_ranks: list[psutil.Process] = []

    def _parts(self, body: Json, fresh: bool, slow: bool) -> Iterable[tuple[str, Callable[[], Json]]]:
        return (
            ("cpu_percent", self._read_cores),
            ("process_cpu_percent", lambda: self._read_processes(slow)),
            ("memory_available_bytes", lambda: self._memory(psutil.virtual_memory().available)),
            ("disk_free_bytes", lambda: self._read_space(slow)),
        )

    def _read_cores(self) -> Json:
        percents = psutil.cpu_percent(percpu=True)
        if self._count == 0 or not percents:
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
        self.children = tuple(process.pid for process in alive)
        return {
            "process_cpu_percent": self._percent("processes", spent),
            "ranks_cpu_percent": self._percent("ranks", self._ranks_spent(slow)) if self._ranks else None,
            "rss_bytes": self._own.memory_info().rss,
            "workers": workers,
            "workers_rss_bytes": rss,
        }

    def _ranks_spent(self, slow: bool) -> float:
        """Seconds of CPU time of the other ranks and their descendants."""
        if slow:
            self._of_ranks = []
            for pid in self._ranks:
                with suppress(psutil.Error):
                    rank = psutil.Process(pid)
                    self._of_ranks += [rank, *rank.children(recursive=True)]
        spent = 0.0
        for process in self._of_ranks:
            with suppress(psutil.Error):
                times = process.cpu_times()
                spent += times.user + times.system
        return spent

    def _percent(self, key: str, spent: float) -> float | None:
        """CPU time since the last sample, of one core. spent: seconds so far."""
        earlier = self._since(key, spent)
        return round(max(100 * (spent - earlier[0]) / earlier[1], 0.0), 1) if earlier else None
