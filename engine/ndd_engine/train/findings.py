"""Watches what the diagnosis says of a run that trains, and tells when a finding comes, changes or goes.

The rules look at recent windows, so a finding at the edge of its threshold comes and goes with the noise: what is
told has held in two looks in a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ndd_engine.diagnose import Finding, diagnose
from ndd_engine.record.events import FindingEvent
from ndd_engine.record.snapshot import Snapshot

# A ceiling that moved by less than this is the same finding.
MATERIAL = 0.2
# Says that there is nothing to say yet.
UNTOLD = "too-short"
HEALTHY = "healthy"


class FindingWatch:
    """Called with Snapshots now and then, returns the events to record. Not for several threads at once."""

    def __init__(self, look: Callable[[Snapshot], Sequence[Finding]] = diagnose) -> None:
        self._look = look
        self._before: dict[str, Finding] = {}
        self._told: dict[str, Finding] = {}

    def __call__(self, snapshot: Snapshot, last: bool = False) -> list[FindingEvent]:
        """What is new. last: no look follows, so what is found now need not be seen twice.

        Raises what a rule raises.
        """
        found = self._look(snapshot)
        # "healthy" is a verdict: behind anything else it says nothing.
        now = {
            finding.cause: finding
            for place, finding in enumerate(found)
            if finding.cause != UNTOLD and (finding.cause != HEALTHY or place == 0)
        }
        before, self._before = self._before, now
        step, events = snapshot.step, []
        for cause, finding in now.items():
            told = self._told.get(cause)
            if told is not None and not _changed(told, finding):
                continue
            if not last and (cause not in before or (told is not None and not _changed(told, before[cause]))):
                continue
            self._told[cause] = finding
            events.append(FindingEvent(step, cause, finding.title, False, finding.to_dict()))
        for cause in [cause for cause in self._told if cause not in now and cause not in before]:
            gone = self._told.pop(cause)
            if cause != HEALTHY:  # what comes instead says so
                events.append(FindingEvent(step, cause, gone.title, True, gone.to_dict()))
        return events


def _changed(told: Finding, now: Finding) -> bool:
    if told.ceiling is None or now.ceiling is None:
        return told.ceiling is not now.ceiling
    return abs(now.ceiling / told.ceiling - 1) > MATERIAL
