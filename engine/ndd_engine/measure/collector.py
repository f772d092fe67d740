"""Times Python's garbage collections, and optionally runs them at chosen steps.

A collection holds the interpreter lock, so it stops the training whichever thread starts it.
"""

from __future__ import annotations

import gc

from ndd_watch.garbage import Garbage, Pauses

from . import clock as phase
from .clock import PhaseClock


class Collector:
    """Times every collection between `start` and `stop`; with every_steps > 0 it also runs them.

    every_steps: 0 leaves collecting to Python. `scheduled`: whether Python's own collecting is switched off.
    """

    def __init__(self, every_steps: int = 0) -> None:
        self.every_steps = every_steps
        self.scheduled = False
        self._garbage = Garbage()
        self._was_enabled = True

    def start(self) -> None:
        """Start timing, and take over collecting if every_steps is set."""
        self._garbage.begin()
        if self.every_steps:
            self._was_enabled = gc.isenabled()
            gc.disable()
            self.scheduled = True

    def stop(self) -> None:
        """Restore Python's own collecting; safe to call twice or without `start`."""
        self._garbage.end()
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
        """The collections since the last call."""
        return self._garbage.take()
