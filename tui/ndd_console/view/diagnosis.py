"""The diagnosis page: every finding with its evidence, and the measurements that the rules use."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from ndd_engine.diagnose import CAUSES, Change, Finding
from ndd_engine.diagnose.view import SlowFunction, View
from ndd_engine.record.events import BaselineEvent, FunctionsEvent, KernelsEvent, LoaderEvent, StacksEvent
from ndd_engine.record.snapshot import Snapshot
from ndd_engine.text import MISSING, duration, finite, number, size

from .blocks import percent
from .findings import DiagnosisResult, title_room, title_row
from .rows import BLANK, cells, foreign, labelled, rule, shorten, wrap
from .style import Row

_LABEL = 12
_GLUE = "\x00"  # keeps an option and its value on one line
_TOP = 8  # functions and kernels
OWN_TIME = "in a usual step; without torch and without other functions of your code"
ENGINE = "_engine_run_backward"  # torch's function that runs all of backward
_pair = partial(labelled, indent=_LABEL)


def _pairs(facts: Iterable[tuple[str, str]], width: int) -> list[Row]:
    return [row for label, text in facts for row in _pair(label, text, width)]


def diagnosis_lines(
    snapshot: Snapshot, result: DiagnosisResult, name: str, can_try: bool, width: int
) -> list[Row]:
    """The findings, then the measurements. name: of the run, for the commands."""
    lines = _pair("", result.trouble, width, style="dim")
    for finding in result.findings:
        lines += [BLANK] if lines else []
        lines += [title_row(finding, width), *_finding(finding, name, can_try, width)]
    sections = (
        _code(snapshot, width),
        (_capture_title(snapshot.kernels), _kernels(snapshot.kernels, width)),
        ("forward and backward by module", _modules(snapshot.kernels, width)),
        ("forward and backward by line", _lines(snapshot.kernels, width)),
        ("forward and backward pass of one micro-batch", _baseline(snapshot.baseline, width)),
        ("data loader", _loader(snapshot.loader, width)),
    )
    for title, rows in sections:
        if not rows:
            continue
        lines += [BLANK, rule(title, width), *rows]
    return lines


def command_text(name: str, sets: Sequence[str]) -> str:
    """The command that measures a change."""
    edits = " ".join(f"--set {shlex.quote(item)}" for item in sets)
    return f"ndd-console try {shlex.quote(name)} {edits}"


def first_command(name: str, findings: Iterable[Finding]) -> str:
    """The command that measures the first change that can be tried; "" if there is none."""
    sets = [
        change.sets for finding in findings if not finding.leave for change in finding.changes if change.sets
    ]
    return command_text(name, sets[0]) if sets else ""


def _finding(finding: Finding, name: str, can_try: bool, width: int) -> list[Row]:
    cause = CAUSES.get(finding.cause, finding.cause)
    # Without a ceiling the cost has no upper bound, either.
    bounded = finding.share is not None and finding.ceiling is not None
    cost = f"; costs up to {percent(finding.share)} of the time" if bounded else ""
    # Repeat a title that does not fit into the heading.
    title = foreign(finding.title)
    facts = [("finding", title)] if cells(title) > title_room(finding, width) else []
    facts.append(("cause", f"{cause}, {finding.confidence}{cost}"))
    for index, item in enumerate(finding.evidence):
        facts.append(("" if index else "evidence", f"{item.text} ({item.source})"))
    rows = _pairs(facts, width)
    for index, change in enumerate(finding.changes):
        rows += _change(finding, change, "" if index else "change", name, width)
    if finding.sets and can_try and not finding.leave:
        rows += _pair("", "press t to select one of the settings and measure it", width, style="dim")
    if finding.leave:
        rows += _pair("leave as is", finding.leave, width)
    return rows


def _change(finding: Finding, change: Change, label: str, name: str, width: int) -> list[Row]:
    rows = _pair(label, finding.advice(change), width)
    if change.where:
        rows += _pair("", f"in {change.where}", width, style="bold")
    if change.sets:
        rows += _command(foreign(command_text(name, change.sets)), width)
    return rows


def _command(command: str, width: int) -> list[Row]:
    """A command that can be copied: continued lines end in a backslash."""
    indent = _LABEL if width >= 48 else 2
    lines = wrap(command.replace("--set ", f"--set{_GLUE}"), max(width - indent - 2, 1))
    lines = " \\\n".join(lines).replace(_GLUE, " ").splitlines()
    return [((" " * indent, "text"), (line, "bold")) for line in lines]


def _missing(text: str) -> list[Row]:
    return [((f"{MISSING}: {text}", "dim"),)]


def _code(snapshot: Snapshot, width: int) -> tuple[str, list[Row]]:
    """Functions of a profiled step; before there is one, and in old records, stack samples."""
    if snapshot.functions is not None:
        return "functions of your code", _functions(
            snapshot.functions, View(snapshot).functions, workers_of(snapshot), width
        )
    if snapshot.stacks is not None and snapshot.stacks.looks:
        return "stack samples", _stacks(snapshot.stacks, snapshot.kernels, width)
    off = setting(snapshot, "log", "profile_every_s") == 0
    text = "off: log.profile_every_s is 0" if off else "no step was profiled yet"
    return "functions of your code", _missing(text)


def setting(snapshot: Snapshot, section: str, name: str) -> object:
    """A value of the run's configuration; None if it has none."""
    table = snapshot.run.config.get(section) if snapshot.run is not None else None
    return table.get(name) if isinstance(table, dict) else None


def workers_of(snapshot: Snapshot) -> int:
    """Loader workers of the run; 0 if they are unknown."""
    value = setting(snapshot, "loader", "workers")
    return value if isinstance(value, int) else 0


def unseen(workers: int) -> str:
    """What a profiled step does not show."""
    what = "the loader worker" if workers == 1 else f"the {number(workers)} loader workers"
    return f"functions in {what} cannot be seen; loader.workers=0 shows them" if workers else ""


def _functions(
    found: FunctionsEvent, functions: Sequence[SlowFunction], workers: int, width: int
) -> list[Row]:
    """The functions of a profiled step by their own time, longest first."""
    rows: list[Row] = [((shorten(f"from step {found.step:,}, under Python's profiler", width), "dim"),)]
    if functions:
        rows.append((("share      time   calls  phase       function", "dim"),))
    for item in functions[:_TOP]:
        phase, calls = shorten(foreign(item.phase) or MISSING, 10), number(item.calls)
        lead = f"{percent(item.share):>5}  {duration(item.ns * 1e-9):>8}  {calls:>6}  {phase:<10}  "
        place = f"{foreign(item.file)}:{foreign(item.line)} in {foreign(item.name)}"
        called = f", called by {foreign(item.caller)}" if item.caller else ""
        room = max(width - cells(lead), 1)
        if cells(place + called) <= room:
            place += called
        elif cells(place) > room:  # shorten a path at its start
            place = "…" + place[len(place) - room + 1 :]
        rows.append(((lead + place, "text"),))
    notes = (OWN_TIME if functions else "no function of your code was called", unseen(workers))
    return [*rows, *(((line, "dim"),) for text in notes if text for line in wrap(text, width))]


def _stacks(stacks: StacksEvent, kernels: KernelsEvent | None, width: int) -> list[Row]:
    """Lines of code in which the training thread was sampled, most frequent first.

    Backward is one call of torch's engine: its modules are in a profiler capture.
    """
    where = "by module below" if kernels is not None and kernels.modules else "press k to see it by module"
    heading = f"{number(stacks.looks)} stack samples, latest at step {stacks.step:,}"
    rows: list[Row] = [((shorten(heading, width), "dim"),)]
    for frame in stacks.frames[:_TOP]:
        if len(frame) < 5:
            continue
        phase, file, line, function, samples = frame[:5]
        share = percent((finite(samples) or 0.0) / stacks.looks)
        place = f"{foreign(file)}:{foreign(line)} in {foreign(function)}"
        if function == ENGINE:
            place = f"backward pass: {where}"
        lead = f"{share:>5}  {shorten(foreign(phase), 10):<10}  "
        room = max(width - cells(lead), 1)
        if cells(place) > room:  # shorten a path at its start
            place = "…" + place[len(place) - room + 1 :]
        rows.append(((lead + place, "text"),))
    return rows


def _capture_title(kernels: KernelsEvent | None) -> str:
    if kernels is None:
        return "profiler capture"
    steps = f"{kernels.steps} step{'' if kernels.steps == 1 else 's'}"
    return f"profiler capture at step {kernels.step:,} ({foreign(kernels.method)}, {steps})"


def _kernels(kernels: KernelsEvent | None, width: int) -> list[Row]:
    """A profiler capture: busy and idle time by cause, and the longest kernels or operators."""
    if kernels is None or not kernels.wall_ns:
        return _missing("no capture yet; press k")
    wall = kernels.wall_ns
    steps = max(kernels.steps, 1)
    launches = number(kernels.launches / steps)
    busy = f"{percent(kernels.busy_ns / wall)} of the time, {launches} launches per step"
    if kernels.copy_ns:
        busy += f"; copying {percent(kernels.copy_ns / wall)}"
    causes = sorted(kernels.idle_ns.items(), key=lambda item: -item[1])
    idle = ", ".join(f"{cause} {percent(value / wall)}" for cause, value in causes if value > 0)
    rows = _pairs((("busy", busy), ("idle", idle or "none")), width)
    for index, item in enumerate(kernels.top[:_TOP]):
        if len(item) < 3:
            continue
        name, total, count = item[0], finite(item[1]) or 0.0, finite(item[2]) or 0.0
        mean, times = duration(total / steps * 1e-9), number(count / steps)
        figures = f"{percent(total / wall):>5}  {mean:>8}  {times:>6}x  "
        lead = ("" if index else "longest").ljust(_LABEL)
        room = max(width - _LABEL - cells(figures), 1)
        rows.append(((lead, "accent"), (figures, "text"), (shorten(foreign(name), room), "text")))
    if kernels.top:
        rows += _pair("", "share of the capture, time and count per step", width, style="dim")
    if kernels.trace:
        rows += _pair("trace", kernels.trace, width)
    return rows


def _modules(kernels: KernelsEvent | None, width: int) -> list[Row]:
    """Time of each module in forward and backward in a profiler capture, longest first; [] if it has none."""
    found = [] if kernels is None else module_rows(kernels)[: 2 * _TOP]
    return _by_owner(kernels, found, "module", "a module without the modules inside it", width)


def _lines(kernels: KernelsEvent | None, width: int) -> list[Row]:
    """The same by the line of the user's own code that calls a module."""
    found = [] if kernels is None else line_rows(kernels)[:_TOP]
    return _by_owner(kernels, found, "line", "a line with the modules that it calls", width)


def _by_owner(
    kernels: KernelsEvent | None, found: Sequence[ModuleTimes], title: str, note: str, width: int
) -> list[Row]:
    if kernels is None or not kernels.wall_ns or not found:
        return []
    steps = max(kernels.steps, 1)
    rows: list[Row] = [((f"share   forward  backward  {title}", "dim"),)]
    for row in found:
        forward, backward = (
            duration(ns / steps * 1e-9) if ns else "-" for ns in (row.forward_ns, row.backward_ns)
        )
        figures = f"{percent(row.total_ns / kernels.wall_ns):>5}  {forward:>8}  {backward:>8}  "
        room = max(width - cells(figures), 1)
        label = row.label
        if title == "line" and cells(label) > room:  # shorten a path at its start
            label = "…" + label[len(label) - room + 1 :]
        rows.append(((figures, "text"), (shorten(label, room), "text")))
    what = "kernels" if kernels.method == "kernels" else "operators"
    text = f"{what} of the capture, time per step; {note}"
    return [*rows, *(((line, "dim"),) for line in wrap(text, width))]


@dataclass(frozen=True, slots=True)
class ModuleTimes:
    """A module of a profiler capture, or a line that calls modules; calls: of forward in the capture."""

    name: str
    kind: str
    forward_ns: float
    backward_ns: float
    calls: float

    @property
    def total_ns(self) -> float:
        return self.forward_ns + self.backward_ns

    @property
    def label(self) -> str:
        """ "blocks.*.attention (Attention)"."""
        return self.name if self.kind in ("", self.name) else f"{self.name} ({self.kind})"


def module_rows(kernels: KernelsEvent) -> list[ModuleTimes]:
    """The modules of a capture, longest first; malformed rows of a record are left out."""
    found = []
    for row in kernels.modules:
        if len(row) >= 5:
            forward, backward, calls = (finite(value) or 0.0 for value in row[2:5])
            found.append(ModuleTimes(foreign(row[0]), foreign(row[1]), forward, backward, calls))
    return found


def line_rows(kernels: KernelsEvent) -> list[ModuleTimes]:
    """The lines of a capture that call modules, longest first; malformed rows of a record are left out."""
    found = []
    for row in kernels.lines:
        if len(row) >= 6:
            forward, backward, calls = (finite(value) or 0.0 for value in row[3:6])
            place = f"{foreign(row[0])}:{foreign(row[1])} in {foreign(row[2])}"
            found.append(ModuleTimes(place, "", forward, backward, calls))
    return found


def _ns(value: object) -> str:
    known = finite(value)
    return MISSING if known is None else duration(known * 1e-9)


def _items(count: int) -> str:
    return f"{number(count)} item{'' if count == 1 else 's'}"


def _baseline(baseline: BaselineEvent | None, width: int) -> list[Row]:
    if baseline is None:
        return _missing("not measured")
    facts = [("time", f"{_ns(baseline.micro_ns)} for {_items(baseline.micro)}, fastest of {baseline.runs}")]
    if baseline.other_micro is not None:
        facts.append(("", f"{_ns(baseline.other_ns)} for {_items(baseline.other_micro)}"))
    if baseline.operations is not None:
        facts.append(("operators", f"{number(baseline.operations)} in forward and backward"))
    if baseline.by_threads:
        pairs = [pair for pair in baseline.by_threads if len(pair) >= 2]
        text = ", ".join(f"{number(count)}: {_ns(value)}" for count, value, *_ in pairs)
        facts.append(("threads", f"{number(baseline.threads)} in this run; {text}"))
    return _pairs(facts, width)


def _loader(loader: LoaderEvent | None, width: int) -> list[Row]:
    if loader is None:
        return _missing("not measured")
    cached = "none" if loader.encoded is None else number(loader.encoded)
    one = f"{_ns(loader.item_ns)}, of which {_ns(loader.item_cpu_ns)} CPU time (mean of {loader.probed})"
    gather = f"{_ns(loader.gather_ns)} per micro-batch" if loader.gather_ns is not None else MISSING
    if not loader.in_memory:
        gather += ": the dataset cannot gather a whole batch at once"
    differ = "items come from a stream" if loader.stream else "items differ between epochs"
    facts = (
        ("items", f"{number(loader.items or None)}, {cached} cached"),
        ("", f"{differ} and cannot be cached" if loader.epochs_differ else ""),
        ("micro-batch", f"{_items(loader.micro)}, {size(loader.batch_bytes)}"),
        ("one item", one if loader.item_ns is not None else MISSING),
        ("collate", f"{_ns(loader.collate_ns)} per micro-batch"),
        ("gather", gather),
    )
    return _pairs(facts, width)
