"""Profiles the same step on all ranks, and tells rank 0 which functions take the time on the others.

A rank alone that profiles a step would hold up the others, and would be taken for a slow one.
"""

from __future__ import annotations

import json

from ndd_engine.measure.functions import NEVER, FunctionProfiles
from ndd_engine.record.events import FunctionsEvent
from ndd_engine.text import printable

from .notes import Notes

_CHARS = 160  # of a place that is sent


class AgreedProfiles(FunctionProfiles):
    """Profiles a step after a vote for it. Rank 0 asks for one when it is due.

    last_step: the last profiled step, counted from 1.
    """

    last_step = 0
    _wished_ns = NEVER

    def wished(self, step: int) -> bool:
        """Whether a step should be profiled now that so many are done."""
        return self._clock.now() >= self._wished_ns and step >= self._next_step

    def agreed(self) -> None:
        """All ranks profile the next step."""
        self.due_ns = 0

    def start(self, step: int) -> None:
        super().start(step)
        self._postpone()

    def begin(self, step: int) -> None:
        super().begin(step)
        if self.active:
            self.last_step = step + 1
        elif not self.due_ns:
            self._wait()

    def _wait(self) -> None:
        super()._wait()
        self._postpone()

    def _postpone(self) -> None:
        self._wished_ns, self.due_ns = self.due_ns, NEVER


class Places:
    """For each rank and phase, the file, line and function that took most of a profiled step."""

    def __init__(self, notes: Notes, rank: int) -> None:
        self._notes, self._rank = notes, rank
        self._mine: dict[str, str] = {}

    def tell(self, event: FunctionsEvent) -> None:
        """Make the functions of this rank known to rank 0."""
        longest: dict[str, tuple[float, str]] = {}
        for file, line, name, _calls, _ns, own_ns, _caller, phase in event.functions:
            if own_ns > longest.get(phase, (0.0, ""))[0]:
                longest[phase] = own_ns, printable(f"{file}:{line} {name}")[:_CHARS]
        self._mine = {phase: place for phase, (_ns, place) in longest.items()}
        if self._rank:
            self._notes.put(f"places/{self._rank}", json.dumps(self._mine))

    def of(self, rank: int) -> dict[str, str]:
        """The places of a rank by phase; {} as long as they are not known."""
        if rank == self._rank:
            return self._mine
        return dict(json.loads(self._notes.get(f"places/{rank}") or "{}"))
