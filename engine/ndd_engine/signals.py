"""What a signal handler and the code that it interrupts share."""

from __future__ import annotations

import threading
import time

_SLICE_S = 0.5


class SignalEvent(threading.Event):
    """An Event that a signal handler can set.

    The standard one has a lock that is not re-entrant. A handler that sets it while the main thread sets or waits for
    it, or a second handler within the first, waits for ever.
    """

    def __init__(self) -> None:
        super().__init__()
        self._cond = threading.Condition(threading.RLock())

    def wait(self, timeout: float | None = None) -> bool:
        """Also hears a handler that runs between the look at the flag and the sleep, after at most half a second."""
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            left = _SLICE_S if end is None else min(_SLICE_S, end - time.monotonic())
            if super().wait(max(0.0, left)) or (end is not None and time.monotonic() >= end):
                return self.is_set()
