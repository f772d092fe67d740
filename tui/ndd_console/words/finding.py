"""A finding in words: a block for pages, reports and commands, one line for logs, and the page of the diagnosis."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ndd_engine.diagnose import CAUSES, Change, Finding, diagnose
from ndd_engine.record.event import MeasuredChange
from ndd_engine.record.events import DeathEvent, Event, FindingEvent, MarkEvent, StallEvent
from ndd_engine.record.figures import death_text
from ndd_engine.record.snapshot import Snapshot
from ndd_engine.text import number, percent, printable, times

from .blocks import COMMAND, PLACE, Block, NamedValues, Text, Tone, Verdict, at_most, interval_text
from .step import ISOLATED, absent, capture, code, isolated
from .workers import LOADER, loader_facts

POTENTIAL_GAIN = "upper bound: the speedup without this cause if no other bottleneck took its place"
# Causes that are not a problem; they take one line, in this style.
CALM = {"healthy": "good", "too-short": "dim"}


def ceiling_text(finding: Finding) -> str:
    """ "at most 2.3x", or what a trial has measured; "" if the gain has no bound."""
    seen = next((change.measured for change in finding.changes if change.sets), None)
    if seen is not None and seen.verdict == "faster" and seen.ratio is not None:
        return f"measured {times(seen.ratio)}"
    return "" if finding.ceiling is None else at_most(finding.ceiling)


def command_text(name: str, sets: Sequence[str], action: str = "try") -> str:
    """The command that measures a change to a run, or, with "train", that trains a configuration with it."""
    edits = " ".join(f"--set {shlex.quote(item)}" for item in sets)
    return f"ndd-console {action} {shlex.quote(name)} {edits}"


def first_command(name: str, findings: Iterable[Finding]) -> str:
    """The command that measures the first change that can be tried and was not; "" if there is none."""
    changes = (change for finding in findings if not finding.leave for change in finding.changes)
    sets = next((change.sets for change in changes if change.sets and change.measured is None), ())
    return command_text(name, sets) if sets else ""


def choices(finding: Finding) -> tuple[Change | None, Change | None]:
    """The change to measure, and one in the code or the machine that comes before it; either may be None."""
    setting = next((change for change in finding.changes if change.sets), None)
    first = next(iter(finding.changes), None)
    return setting, None if first is setting else first


def change_text(finding: Finding, change: Change) -> str:
    """The advice with its place, without a full stop: "hoist it (m.py:3 in f)"."""
    text = finding.advice(change).rstrip(".")
    return f"{text} ({change.where})" if change.where and change.where not in text + finding.title else text


def measured_text(measured: MeasuredChange) -> str:
    """ "faster 1.42x (1.35 to 1.49)"."""
    return f"{measured.verdict} {interval_text(measured.ratio, measured.low, measured.high)}".strip()


def evidence_text(finding: Finding) -> str:
    text = "; ".join(item.text.rstrip(".") for item in finding.evidence)
    return text[:1].upper() + text[1:]


def verdict(finding: Finding, name: str = "", main: bool = False) -> Verdict:
    """The whole finding. name: of the run that the commands measure; "" leaves them out."""
    rows = [("evidence", f"{item.text} ({item.source})") for item in finding.evidence]
    for change in finding.changes:
        rows.append(("try", finding.advice(change)))
        if change.measured is not None:
            rows.append(("measured", measured_text(change.measured)))
        if change.where:
            rows.append((PLACE, change.where))
        if change.sets and name:
            rows.append((COMMAND, command_text(name, change.sets)))
    if finding.leave:
        rows.append(("leave as is", finding.leave))
    label = CAUSES.get(finding.cause, finding.cause)
    badges = [*([] if finding.title.startswith(label) else [label]), finding.confidence]
    # Without a ceiling the cost is unbounded, too.
    if finding.share is not None and finding.ceiling is not None:
        badges.append(f"costs up to {percent(finding.share)} of the time")
    calm = finding.cause in CALM or finding.leave
    tone: Tone = "good" if finding.cause == "healthy" else "" if calm else "warn"
    return Verdict(finding.title, tuple(badges), ceiling_text(finding), tuple(rows), tone, main)


def finding_line(finding: Finding) -> str:
    """ "finding: …, at most 1.42x; try loader.workers=4"; "" for a run too short to judge."""
    if finding.cause == "too-short":
        return ""
    line = f"finding: {finding.title}"
    if finding.ceiling is not None:
        line += f", {at_most(finding.ceiling)}"
    if finding.leave:
        return f"{line}; leave as is: {finding.leave}"
    setting, other = choices(finding)
    if setting is not None and setting.measured is not None:
        return f"{line}; {' '.join(setting.sets)} was measured: {measured_text(setting.measured)}"
    if other is not None:
        line += f"; {change_text(finding, other)}"
    if setting is None:
        return line
    condition = f" {finding.condition}," if finding.condition else ""
    return f"{line};{' or' if other is not None else ''}{condition} try {' '.join(setting.sets)}"


def event_line(event: FindingEvent) -> str:
    """The line of a recorded finding, or "finding cleared: …"."""
    if event.gone:
        return f"finding cleared: {event.text}"
    return finding_line(event.finding or Finding(event.cause, event.text, (), "possible"))


def urgent_line(event: Event) -> str:
    """What is told at once, also beside the output of a script: a stall, a death, a limit, or no more observation.

    "" for other events.
    """
    match event:
        case StallEvent(kind="input"):  # somebody types
            return ""
        case StallEvent():
            return f"{event.text}; {event.advice}" if event.advice else event.text
        case DeathEvent():
            return death_text(event)
        case MarkEvent(data={"observed": "no more"}):
            return event.text
        case FindingEvent(gone=False, finding=Finding(cause="open-files") as finding):
            return finding_line(finding)
    return ""


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
                text = printable(f"the diagnosis failed: {type(error).__name__}: {text}")
                result = DiagnosisResult((), text)
            if self._latest is not None and self._latest[1] == result:
                result = self._latest[1]
            self._latest = (snapshot, result)
        return self._latest[1]


def finding_blocks(result: DiagnosisResult, name: str) -> list[Block]:
    """Every finding, the bottleneck first. name: of the run, for the commands."""
    trouble: list[Block] = [Text(result.trouble, "warn")] if result.trouble else []
    return trouble + [verdict(finding, name, index == 0) for index, finding in enumerate(result.findings)]


def proposed_text(snapshot: Snapshot) -> str:
    """The settings that the findings of a run propose, as options; "" without any."""
    changes = (change.sets for finding in Diagnosis().of(snapshot).findings for change in finding.changes)
    return ", or ".join(dict.fromkeys(" ".join(f"--set {one}" for one in sets) for sets in changes if sets))


def diagnosis_blocks(snapshot: Snapshot, result: DiagnosisResult, name: str, can_try: bool) -> list[Block]:
    """The findings, then the measurements. name: of the run, for the commands."""
    blocks = finding_blocks(result, name)
    if can_try and any(finding.sets and not finding.leave for finding in result.findings):
        blocks.append(Text("Press t to select one of the settings and measure it.", "note"))
    blocks.append(code(snapshot))
    captured = capture(snapshot.kernels) if snapshot.kernels is not None else []
    none = "none in this run" if snapshot.final else "no capture yet; press k"
    blocks += captured or [absent("Profiler capture", none)]
    baseline, loader = snapshot.baseline, snapshot.loader
    blocks.append(isolated(baseline) if baseline is not None else absent(ISOLATED, "not measured"))
    blocks.append(loader_facts(loader) if loader is not None else absent(LOADER, "not measured"))
    # On the live screen, they are cut at its edge.
    told = (each.mark for each in snapshot.marks if each.mark.text)
    newest = [(f"step {number(mark.step)}", printable(mark.text)) for mark in told]
    if newest:
        blocks.append(NamedValues(tuple(reversed(newest[-MOST_EVENTS:])), "Newest events"))
    if len(newest) > MOST_EVENTS:
        blocks.append(Text("Earlier events are in the log (l on the live screen) and in the report.", "note"))
    return blocks
