"""Evaluates the rules once per snapshot; an error in a rule does not break the screen."""

from __future__ import annotations

from collections.abc import Callable

from ndd_console.view.findings import DiagnosisResult
from ndd_engine.diagnose import Finding, diagnose
from ndd_engine.record.snapshot import Snapshot
from ndd_engine.text import printable

Rules = Callable[[Snapshot], tuple[Finding, ...]]


class Diagnosis:
    """Evaluates the rules and caches the result for the latest snapshot."""

    def __init__(self, rules: Rules = diagnose) -> None:
        self._rules = rules
        self._latest: tuple[Snapshot, DiagnosisResult] | None = None

    def of(self, snapshot: Snapshot) -> DiagnosisResult:
        """The findings of this snapshot. An equal result is the same object as before, so nothing is redrawn."""
        if self._latest is None or self._latest[0] is not snapshot:
            try:
                result = DiagnosisResult(self._rules(snapshot))
            except Exception as error:  # noqa: BLE001  a defect in a rule must not break the screen
                text = " ".join(str(error).split())
                result = DiagnosisResult(
                    (), printable(f"the diagnosis failed: {type(error).__name__}: {text}")
                )
            if self._latest is not None and self._latest[1] == result:
                result = self._latest[1]
            self._latest = (snapshot, result)
        return self._latest[1]
