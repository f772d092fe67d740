"""Times Python's garbage collections, and optionally runs them at chosen steps.

A collection holds the interpreter lock, so it stops the training whichever thread starts it.
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
    """Number of collections, their total time and the longest one, in nanoseconds."""

    count: int = 0
    ns: int = 0
    longest_ns: int = 0


class Collector:
    """Times every collection between `start` and `stop`; with every_steps > 0 it also runs them.

    every_steps: 0 leaves collecting to Python. `scheduled`: whether Python's own collecting is switched off.
    """

    def __init__(self, every_steps: int = 0) -> None:
        self.every_steps = every_steps
        self.scheduled = False
        self._pauses = Pauses()
        self._began: int | None = None
        self._was_enabled = True

    def start(self) -> None:
        """Start timing, and take over collecting if every_steps is set."""
        gc.callbacks.append(self._heard)
        if self.every_steps:
            self._was_enabled = gc.isenabled()
            gc.disable()
            self.scheduled = True

    def stop(self) -> None:
        """Restore Python's own collecting; safe to call twice or without `start`."""
        with contextlib.suppress(ValueError):
            gc.callbacks.remove(self._heard)
        if self.scheduled:
            self.scheduled = False
            if self._was_enabled:
                gc.enable()

    def after_step(self, step: int, clock: PhaseClock) -> None:
        """Collect if it is due after optimizer step `step`; the time counts as `other`."""
        if self.scheduled and step % self.every_steps == 0:
            clock.enter(phase.OTHER)
            gc.collect()

    def take(self) -> Pauses:
        """Return the collections since the last call."""
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
