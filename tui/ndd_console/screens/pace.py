"""How often a screen is drawn: less often where that takes more of a core than it may."""

from __future__ import annotations

import time
from collections.abc import Callable

# Of one core, what a screen beside a training thread may take, and how long it may be without news for that.
SHARE = 0.0075
SLOWEST_S = 1.0
# A timer that comes this much early is not worth waiting for the next one.
EARLY = 0.9


class Pace:
    """Asked at each tick of a timer. cpu: seconds that the screen's thread has computed so far."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, cpu: Callable[[], float] = time.thread_time
    ) -> None:
        self._clock, self._cpu = clock, cpu
        self._drawn_s = clock()
        self._spent_s = cpu()

    def due(self) -> bool:
        """Whether to draw now: what was computed since the last time, painting it included, has been waited for."""
        now, spent = self._clock(), self._cpu()
        wait_s = min((spent - self._spent_s) / SHARE, SLOWEST_S)
        if now - self._drawn_s < EARLY * wait_s:
            return False
        self._drawn_s, self._spent_s = now, spent
        return True
