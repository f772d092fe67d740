"""Python's garbage collection: how long it stops the training, and collecting at chosen steps instead.

A collection holds the interpreter lock, so one that another thread begins stops the training just the same.
"""

from __future__ import annotations

import contextlib
import gc
import time
from dataclasses import dataclass
from typing import Any

from . import clock as phase
from .clock import PhaseClock


@dataclass
class Pauses:
    """Collections: how many, their time and the longest one, in nanoseconds."""

    count: int = 0
    ns: int = 0
    longest_ns: int = 0


class Collector:
    """Times every collection between `start` and `stop`; with every_steps > 0 it also decides when one is made.

    every_steps: 0 leaves the moment to Python. `scheduled` says whether it is ours.
    """

    def __init__(self, every_steps: int = 0) -> None:
        self.every_steps = every_steps
        self.scheduled = False
        self._pauses = Pauses()
        self._began: int | None = None
        self._was_enabled = True

    def start(self) -> None:
        """Begin to watch, and take over where steps are given."""
        gc.callbacks.append(self._heard)
        if self.every_steps:
            self._was_enabled = gc.isenabled()
            gc.disable()
            self.scheduled = True

    def stop(self) -> None:
        """Leave everything as it was; safe to call twice, or without a start."""
        with contextlib.suppress(ValueError):
            gc.callbacks.remove(self._heard)
        if self.scheduled:
            self.scheduled = False
            if self._was_enabled:
                gc.enable()

    def after_step(self, step: int, clock: PhaseClock) -> None:
        """Collect when it is due after optimizer step `step`; the time counts as "other"."""
        if self.scheduled and step % self.every_steps == 0:
            clock.enter(phase.OTHER)
            gc.collect()

    def take(self) -> Pauses:
        """The collections since the last call."""
        taken, self._pauses = self._pauses, Pauses()
        return taken

    def _heard(self, moment: str, _info: dict[str, Any]) -> None:
        now = time.perf_counter_ns()
        if moment == "start":
            self._began = now
        elif self._began is not None:
            spent, self._began = now - self._began, None
            pauses = self._pauses
            pauses.count += 1
            pauses.ns += spent
            pauses.longest_ns = max(pauses.longest_ns, spent)
