"""What the steps of a side consist of, from the windows that its run records. Does not import torch."""

from __future__ import annotations

import threading

from ndd_engine.record.across import EXCHANGE, SKEW
from ndd_engine.record.events import Event, RanksEvent, WindowEvent
from ndd_engine.record.ranks import ASIDES


class Parts:
    """Adds up windows. Events arrive on the thread of the recorder; the other methods may be called on any.

    The parts of a step are its phases. Of several ranks they are means over the ranks without waiting for other ranks,
    which is "exchange" and "skew": together they are the step.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._steps = 0
        self._ns: dict[str, float] = {}
        self._several = False

    def clear(self) -> None:
        """Forget the windows so far."""
        with self._lock:
            self._steps, self._ns = 0, {}

    def hear(self, event: Event) -> None:
        """An event of the run."""
        with self._lock:
            if isinstance(event, RanksEvent) and event.steps:
                if not self._several:
                    self._several, self._steps, self._ns = True, 0, {}
                self._add(event.steps, _of_ranks(event))
            elif isinstance(event, WindowEvent) and event.steps and not self._several:
                self._add(event.steps, _of_window(event))

    def per_step(self) -> dict[str, float]:
        """Nanoseconds of each part of a step; {} without a window."""
        with self._lock:
            return {name: ns / self._steps for name, ns in self._ns.items()} if self._steps else {}

    def _add(self, steps: int, found: dict[str, float]) -> None:
        self._steps += steps
        for name, ns in found.items():
            self._ns[name] = self._ns.get(name, 0.0) + ns


def _of_window(window: WindowEvent) -> dict[str, float]:
    return {
        name: float(times["host_ns"])
        for name, times in window.phases.items()
        if "/" not in name and name not in ASIDES
    }


def _of_ranks(event: RanksEvent) -> dict[str, float]:
    means = {
        name: column[2] * 1e3 * event.steps
        for name, column in event.columns_us.items()
        if name not in (*ASIDES, "own", "wait", "cpu")
    }
    return {**means, EXCHANGE: float(event.exchange_ns), SKEW: float(event.skew_ns)}
