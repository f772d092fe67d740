"""What the rules say about the newest snapshot: asked once a snapshot, and never able to break a screen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ndd_engine.diagnose import Finding, diagnose
from ndd_engine.record.snapshot import Snapshot
from ndd_engine.text import printable

Rules = Callable[[Snapshot], tuple[Finding, ...]]


@dataclass(frozen=True, slots=True)
class Told:
    """Findings, the verdict first; or `trouble`, the defect that kept the rules from saying anything."""

    findings: tuple[Finding, ...] = ()
    trouble: str = ""


NOTHING = Told()


class Diagnosis:
    """Asks the rules and keeps their answer while the snapshot is the same object."""

    def __init__(self, rules: Rules = diagnose) -> None:
        self._rules = rules
        self._asked: tuple[Snapshot, Told] | None = None

    def of(self, snapshot: Snapshot) -> Told:
        """The findings of this snapshot. Equal ones are the same object as before, so that nothing is redrawn."""
        if self._asked is None or self._asked[0] is not snapshot:
            told = self._ask(snapshot)
            if self._asked is not None and self._asked[1] == told:
                told = self._asked[1]
            self._asked = (snapshot, told)
        return self._asked[1]

    def _ask(self, snapshot: Snapshot) -> Told:
        try:
            return Told(self._rules(snapshot))
        except Exception as error:  # noqa: BLE001  a rule with a defect must not take the screen with it
            text = " ".join(str(error).split())
            return Told((), printable(f"the diagnosis failed: {type(error).__name__}: {text}"))
