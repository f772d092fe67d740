"""Runs the diagnosis on a live run, and reports when a finding appears, changes or disappears.

The rules see recent windows, so a finding near its threshold flickers with the noise: only findings that two
consecutive checks agree on are reported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ndd_engine.record.events import FindingEvent
from ndd_engine.record.snapshot import Snapshot

from .finding import Finding
from .rules import diagnose

# A finding is unchanged while its possible gain (ceiling - 1) stays within this factor.
MATERIAL = 2.0
LEAST_GAIN = 0.02
# The finding for "not enough data yet".
UNTOLD = "too-short"
HEALTHY = "healthy"


class FindingWatch:
    """Call it with a Snapshot every few seconds; it returns the events to record. Not thread-safe."""

    def __init__(self, look: Callable[[Snapshot], Sequence[Finding]] = diagnose) -> None:
        self._look = look
        self._before: dict[str, Finding] = {}
        self._told: dict[str, Finding] = {}

    def __call__(self, snapshot: Snapshot, last: bool = False) -> list[FindingEvent]:
        """Return what changed. last: no check follows, so findings count without a second one.

        Raises whatever a rule raises.
        """
        found = self._look(snapshot)
        # "healthy" is only reported if there is nothing else.
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
            events.append(FindingEvent(step, cause, finding.title, False, finding))
        for cause in [cause for cause in self._told if cause not in now and cause not in before]:
            gone = self._told.pop(cause)
            if cause != HEALTHY:  # the finding that replaces it says so
                events.append(FindingEvent(step, cause, gone.title, True, gone))
        return events


def _changed(told: Finding, now: Finding) -> bool:
    advice = (told.sets, bool(told.leave), told.from_steps is None)
    if advice != (now.sets, bool(now.leave), now.from_steps is None):
        return True
    if told.ceiling is None or now.ceiling is None:
        return told.ceiling is not now.ceiling
    gains = sorted((told.ceiling - 1, now.ceiling - 1))
    return gains[1] > MATERIAL * max(gains[0], LEAST_GAIN)
