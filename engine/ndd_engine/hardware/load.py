"""How much of the cores other processes use."""

from __future__ import annotations

import time

import psutil

from ndd_engine.record.snapshot import FULL, OTHERS

from .gpus import usable_cores

# Stolen time is used by other virtual machines, and disturbs like other processes.
_BUSY = ("user", "nice", "system", "irq", "softirq", "steal")


class LoadWatch:
    """CPU time of other processes: that of the usable cores minus that of this process and its descendants."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._cores = usable_cores() or frozenset(range(psutil.cpu_count() or 1))
        self.restart()

    def restart(self) -> None:
        """Start measuring."""
        self._begin = self._look()

    def foreign(self) -> float:
        """Average number of cores used by other processes since `restart`. Resolution: 10 ms of CPU time."""
        return self._used()[0]

    def taken(self) -> str:
        """That other processes used cores since `restart`, and none was left; "" otherwise."""
        foreign, busy = self._used()
        if foreign < OTHERS or busy < FULL * len(self._cores):
            return ""
        return f"other processes used {min(foreign, len(self._cores)):.1f} of {len(self._cores)} cores"

    def _used(self) -> tuple[float, float]:
        """Cores used since `restart`: (by other processes, by all)."""
        now, busy, own = self._look()
        t0, busy0, own0 = self._begin
        elapsed = max(now - t0, 1e-9)
        return max((busy - busy0) - (own - own0), 0.0) / elapsed, (busy - busy0) / elapsed

    def _look(self) -> tuple[float, float, float]:
        times = psutil.cpu_times(percpu=True)
        busy = sum(
            float(getattr(spent, name, 0.0))
            for core, spent in enumerate(times)
            if core in self._cores
            for name in _BUSY
        )
        own = 0.0
        for process in (self._process, *self._process.children(recursive=True)):
            try:
                # The time of a reaped child is in its parent's children_*.
                own += sum(process.cpu_times()[:4])
            except psutil.Error:
                continue
        return time.perf_counter(), busy, own
