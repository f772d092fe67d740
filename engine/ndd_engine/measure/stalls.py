"""Tells where a loop that makes no progress is."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

from ndd_engine.record.events import Event, MarkEvent
from ndd_engine.record.figures import stalled_text
from ndd_watch.own import innermost

from .clock import PhaseClock
from .own_code import OwnCode

# Without a phase change for so long, a loop is reported as stalled; again whenever the time has doubled.
STALLED_S = 30.0
PERIOD_S = 1.0


class StallWatch:
    """Watches a thread's phases from another one. step: returns the optimizer steps done; paused: whether to rest."""

    def __init__(
        self, thread: int, clock: PhaseClock, put: Callable[[Event], None], step: Callable[[], int],
        paused: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._watched, self._clock, self._put, self._step, self._paused = thread, clock, put, step, paused
        self._own = OwnCode()
        self._next_s = STALLED_S
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._work, name="ndd-stalls", daemon=True)

    def start(self) -> None:
        """Start watching."""
        self._thread.start()

    def stop(self) -> None:
        """Stop watching; safe to call twice."""
        self._stopping.set()
        self._thread.join(2.0)

    def look(self) -> None:
        """Report a stall, if there is one. Never raises."""
        with suppress(Exception):
            seconds = self._clock.unchanged_ns * 1e-9
            if seconds < STALLED_S or self._paused():
                self._next_s = STALLED_S
            elif seconds >= self._next_s:
                self._next_s = 2 * seconds
                text = stalled_text(seconds, self._clock.current, self._place())
                self._put(MarkEvent("warning", self._step(), text))

    def _place(self) -> tuple[str, int, str] | None:
        """The line in the user's own code, or that of a library if there is none."""
        found = innermost(self._watched, self._own) or innermost(self._watched, lambda code: True)
        return None if found is None else (self._own.short(found[0]), *found[1:])

    def _work(self) -> None:
        while not self._stopping.wait(PERIOD_S):
            self.look()
