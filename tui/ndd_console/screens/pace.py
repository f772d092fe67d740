"""Limits how often a screen is drawn, so that it takes little CPU time from the training thread."""

from __future__ import annotations

import time
from collections.abc import Callable

# Share of one core that the screen may use, and the longest time between two updates.
SHARE = 0.0075
SLOWEST_S = 1.0
# Accept a tick that is this much too early instead of waiting for the next one.
EARLY = 0.9


class Pace:
    """Decides at every tick of a timer whether to draw. cpu: CPU seconds of the screen's thread."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, cpu: Callable[[], float] = time.thread_time
    ) -> None:
        self._clock, self._cpu = clock, cpu
        self._drawn_s = clock()
        self._spent_s = cpu()

    def due(self) -> bool:
        """Whether to draw now: the CPU time since the last update is below `SHARE` of the time that has passed."""
        now, spent = self._clock(), self._cpu()
        wait_s = min((spent - self._spent_s) / SHARE, SLOWEST_S)
        if now - self._drawn_s < EARLY * wait_s:
            return False
        self._drawn_s, self._spent_s = now, spent
        return True
