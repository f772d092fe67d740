"""Profiles an evaluation and a checkpoint, so that a report says which function takes their time.

The first long evaluation is profiled from LATE_NS on, or else the second one from its beginning, or its end if it is
long; of checkpoints the second one. After that, so rarely that it costs little.
"""

from __future__ import annotations

from typing import Any, Callable

from .clock import CHECKPOINT, EVALUATE, NAMES, now
from .collecting import Collecting

# An evaluation of unknown length is profiled from this time on, and an evaluation for no longer than this.
LATE_NS, MOST_NS = 2 * 10**9, 10 * 10**9
# From one profile to the next: so many times its length.
RARELY = 100
# A profile of less than this part of an evaluation is taken again with the next one.
SHORT = 4


class Asides:
    """begin: begins a profile; whether that is possible. end: ends it; returns its figures. put: records them."""

    def __init__(
        self,
        begin: Callable[[], bool],
        end: Callable[[str], dict[str, Any]],
        put: Callable[[dict[str, Any]], None],
    ) -> None:
        self._begin, self._end, self._put = begin, end, put
        # The phase that goes on, when it and its profile began; 0 for none.
        self._open: int | None = None
        self._since = self._profiled = 0
        # Nanoseconds of the last one, and when the next one is profiled, by phase.
        self._lengths: dict[int, int] = {}
        self._due: dict[int, int] = {EVALUATE: 0, CHECKPOINT: 0}
        self._found: dict[str, Any] = {}
        # Looks at what an evaluation keeps; None where nobody looks.
        self.collecting: Collecting | None = None

    def begins(self, phase: int) -> None:
        """An evaluation or a checkpoint begins."""
        if self._open is None:
            self._open, self._since = phase, now()
            if self.collecting is not None:
                self.collecting.begins()
            self.goes_on()

    def goes_on(self) -> None:
        """It makes progress: a time to begin or to end."""
        phase, t = self._open, now()
        if phase is None:
            return
        if self._profiled:
            self.overdue()
            return
        if phase == EVALUATE and self.collecting is not None:
            self.collecting.goes_on(t)
            if t < self.collecting.until:
                return
        known = self._lengths.get(phase)
        after = LATE_NS if known is None else known - MOST_NS
        if t > self._due[phase] and t - self._since >= after and self._begin():
            self._profiled = now()

    def overdue(self) -> None:
        """Something was heard: end a profile that is long enough."""
        if self._profiled and self._open is not None and now() - self._profiled > MOST_NS:
            self._take(self._open)

    def ends(self, phase: int) -> None:
        """It ends."""
        if phase == self._open:
            if self._profiled:
                self._take(phase)
            self._lengths[phase] = now() - self._since
            self._open = None
            if self.collecting is not None:
                self.collecting.ends()

    def settle(self, are_steps: bool) -> None:
        """Record the profile, unless what looked like evaluations turned out to be parts of steps."""
        found, self._found = self._found, {}
        if found and not (are_steps and found["inside"] == NAMES[EVALUATE]):
            self._put(found)

    def finish(self) -> None:
        """The process ends."""
        if self._open is not None:
            self.ends(self._open)
        self.settle(False)

    def _take(self, phase: int) -> None:
        begun, self._profiled = self._profiled, 0
        found = {**self._end(NAMES[phase]), "inside": NAMES[phase]}
        t = now()
        if SHORT * (t - begun) > t - self._since:  # else it began too late to tell
            self._due[phase] = t + RARELY * (t - begun)
        if found["functions"] or found["calls"]:
            self._found = found
