"""The diagnosis of a snapshot: the findings, and the page with the measurements that the rules use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ndd_engine.diagnose import Finding, diagnose
from ndd_engine.record.snapshot import Snapshot
from ndd_engine.text import number, printable

from .blocks import Block, Facts, Text
from .finding import verdict
from .profile import ISOLATED, LOADER, absent, capture, code, isolated, loader_facts

MOST_EVENTS = 20
Rules = Callable[[Snapshot], tuple[Finding, ...]]


@dataclass(frozen=True, slots=True)
class DiagnosisResult:
    """Findings, most important first. trouble: the error message if the rules failed."""

    findings: tuple[Finding, ...] = ()
    trouble: str = ""


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


def diagnosis_blocks(snapshot: Snapshot, result: DiagnosisResult, name: str, can_try: bool) -> list[Block]:
    """The findings, then the measurements. name: of the run, for the commands."""
    blocks: list[Block] = [Text(result.trouble, "note")] if result.trouble else []
    blocks += [verdict(finding, name, index == 0) for index, finding in enumerate(result.findings)]
    if can_try and any(finding.sets and not finding.leave for finding in result.findings):
        blocks.append(Text("Press t to select one of the settings and measure it.", "note"))
    blocks.append(code(snapshot))
    captured = capture(snapshot.kernels) if snapshot.kernels is not None else []
    blocks += captured or [absent("Profiler capture", "no capture yet; press k")]
    baseline, loader = snapshot.baseline, snapshot.loader
    blocks.append(isolated(baseline) if baseline is not None else absent(ISOLATED, "not measured"))
    blocks.append(loader_facts(loader) if loader is not None else absent(LOADER, "not measured"))
    # On the live screen, they are cut at its edge.
    newest = [
        (f"step {number(each.mark.step)}", printable(each.mark.text))
        for each in snapshot.marks
        if each.mark.text
    ]
    if newest:
        blocks.append(Facts(tuple(reversed(newest[-MOST_EVENTS:])), "Newest events"))
    if len(newest) > MOST_EVENTS:
        blocks.append(Text("Earlier events are in the log (l on the live screen) and in the report.", "note"))
    return blocks
