"""The page of the diagnosis: every finding with all its evidence, and the measurements that the rules read."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from ndd_console.screens.diagnosis import Told
from ndd_engine.diagnose import CAUSES, Change, Finding
from ndd_engine.record.events import BaselineEvent, KernelsEvent, LoaderEvent, StacksEvent
from ndd_engine.record.snapshot import Snapshot
from ndd_engine.text import MISSING, duration, number, size

from .blocks import percent
from .findings import title_room, title_row
from .rows import cells, foreign, rule, shorten, wrap
from .style import Row

_LABEL = 12
_GLUE = "\x00"
_TOP_STACKS = 8
_TOP_KERNELS = 8


def diagnosis_lines(snapshot: Snapshot, told: Told, name: str, can_try: bool, width: int) -> list[Row]:
    """Findings, then what was measured for them. name: of the run, as the command line takes it."""
    lines: list[Row] = []
    if told.trouble:
        lines += _pair("", told.trouble, width, "dim")
    for finding in told.findings:
        lines += [
            *([()] if lines else []),
            title_row(finding, width),
            *_finding(finding, name, can_try, width),
        ]
    sections = (
        ("where in the code", _stacks(snapshot.stacks, width)),
        (_capture_title(snapshot.kernels), _kernels(snapshot.kernels, width)),
        ("forward and backward of one micro-batch by itself", _baseline(snapshot.baseline, width)),
        ("the loader", _loader(snapshot.loader, width)),
    )
    for title, rows in sections:
        lines += [(), rule(title, width), *rows]
    return lines


def command_text(name: str, sets: Sequence[str]) -> str:
    """The command that measures a change, to be copied."""
    edits = " ".join(f"--set {shlex.quote(item)}" for item in sets)
    return f"ndd-console try {shlex.quote(name)} {edits}"


def _pair(label: str, text: str, width: int, style: str = "text") -> list[Row]:
    """A label and its text, wrapped beside it; below it where it is narrow."""
    indent = _LABEL if width >= 48 else 2
    rows: list[Row] = [((label, "accent"),)] if label and indent < _LABEL else []
    for index, line in enumerate(wrap(text, max(width - indent, 1))):
        lead = label if index == 0 and indent == _LABEL else ""
        rows.append(((lead.ljust(indent), "accent"), (line, style)))
    return rows


def _finding(finding: Finding, name: str, can_try: bool, width: int) -> list[Row]:
    called = CAUSES.get(finding.cause, finding.cause)
    cost = f"; it costs at most {percent(finding.share)} of wall time" if finding.share is not None else ""
    # What the heading has no room for is told here.
    title, narrow = foreign(finding.title), cells(foreign(finding.title)) > title_room(finding, width)
    rows = _pair("finding", title, width) if narrow else []
    rows += _pair("cause", f"{foreign(called)}, {finding.confidence}{cost}", width)
    for index, item in enumerate(finding.evidence):
        label = "evidence" if index == 0 else ""
        rows += _pair(label, f"{foreign(item.text)} ({foreign(item.source)})", width)
    for index, change in enumerate(finding.changes):
        rows += _change(change, "change" if index == 0 else "", name, width)
    if finding.sets and can_try and not finding.leave:
        rows += _pair("", "press t to measure it here", width, "dim")
    if finding.leave:
        rows += _pair("leave it", foreign(finding.leave), width)
    return rows


def _change(change: Change, label: str, name: str, width: int) -> list[Row]:
    rows = _pair(label, foreign(change.text), width)
    if change.where:
        rows += _pair("", f"in {foreign(change.where)}", width, "bold")
    if change.sets:
        rows += _command(foreign(command_text(name, change.sets)), width)
    return rows


def _command(command: str, width: int) -> list[Row]:
    """A command that stays one when it is copied: a line that goes on ends in a backslash."""
    indent = _LABEL if width >= 48 else 2
    # An option and its value stay together.
    lines = wrap(command.replace("--set ", f"--set{_GLUE}"), max(width - indent - 2, 1))
    lines = [line.replace(_GLUE, " ") for line in lines]
    last = len(lines) - 1
    return [
        ((" " * indent, "text"), (line + (" \\" if index < last else ""), "bold"))
        for index, line in enumerate(lines)
    ]


def _stacks(stacks: StacksEvent | None, width: int) -> list[Row]:
    """Lines of code in which the training thread was seen, the most seen first."""
    if stacks is None or not stacks.looks:
        return [((MISSING + ": no stack samples (log.stacks_hz)", "dim"),)]
    rows: list[Row] = [
        ((shorten(f"{number(stacks.looks)} looks, the newest at step {stacks.step:,}", width), "dim"),)
    ]
    for frame in stacks.frames[:_TOP_STACKS]:
        if len(frame) < 5:
            continue
        phase, file, line, function, looks = frame[:5]
        share = percent(looks / stacks.looks if isinstance(looks, (int, float)) else None)
        place = f"{foreign(file)}:{foreign(line)} in {foreign(function)}"
        lead = f"{share:>5}  {shorten(foreign(phase), 10):<10}  "
        rows.append(((lead, "text"), (_keep_end(place, max(width - cells(lead), 1)), "text")))
    return rows


def _keep_end(text: str, width: int) -> str:
    """Of a place in the code the end says more than the beginning."""
    return text if cells(text) <= width else "…" + text[len(text) - width + 1 :]


def _capture_title(kernels: KernelsEvent | None) -> str:
    if kernels is None:
        return "profiler burst"
    steps = f"{kernels.steps} step{'' if kernels.steps == 1 else 's'}"
    return f"profiler burst at step {kernels.step:,} ({foreign(kernels.method)}, {steps})"


def _kernels(kernels: KernelsEvent | None, width: int) -> list[Row]:
    """What a burst saw: busy and idle time by cause, and what took longest."""
    if kernels is None or not kernels.wall_ns:
        return [((MISSING + ": none yet; k records one", "dim"),)]
    wall = kernels.wall_ns
    steps = max(kernels.steps, 1)
    busy = f"{percent(kernels.busy_ns / wall)} of the time, {number(kernels.launches / steps)} a step"
    if kernels.copy_ns:
        busy += f"; copying {percent(kernels.copy_ns / wall)}"
    rows = _pair("busy", busy, width)
    causes = sorted(kernels.idle_ns.items(), key=lambda item: -item[1])
    rows += _pair(
        "idle",
        ", ".join(f"{foreign(cause)} {percent(value / wall)}" for cause, value in causes if value > 0)
        or "none",
        width,
    )
    for index, item in enumerate(kernels.top[:_TOP_KERNELS]):
        if len(item) < 3:
            continue
        name, total, count = item[:3]
        figures = (
            f"{percent(total / wall):>5}  {duration(total / steps * 1e-9):>8}  {number(count / steps):>6}x  "
        )
        lead = "longest" if index == 0 else ""
        room = max(width - _LABEL - cells(figures), 1)
        rows.append(
            ((lead.ljust(_LABEL), "accent"), (figures, "text"), (shorten(foreign(name), room), "text"))
        )
    if kernels.top:
        rows += _pair("", "share of the burst, time and count in one step", width, "dim")
    if kernels.trace:
        rows += _pair("trace", foreign(kernels.trace), width)
    return rows


def _ns(value: float | None) -> str:
    return MISSING if value is None else duration(value * 1e-9)


def _items(count: int) -> str:
    return f"{number(count)} item{'' if count == 1 else 's'}"


def _baseline(baseline: BaselineEvent | None, width: int) -> list[Row]:
    if baseline is None:
        return [((MISSING + ": not measured", "dim"),)]
    text = f"{_ns(baseline.micro_ns)} for {_items(baseline.micro)}, the fastest of {baseline.runs}"
    rows = _pair("both passes", text, width)
    if baseline.other_micro is not None:
        rows += _pair("", f"{_ns(baseline.other_ns)} for {_items(baseline.other_micro)}", width)
    if baseline.operations is not None:
        rows += _pair("operators", f"{number(baseline.operations)} in one forward and backward pass", width)
    if baseline.by_threads:
        pairs = [pair for pair in baseline.by_threads if len(pair) >= 2]
        text = ", ".join(f"{number(count)}: {_ns(value)}" for count, value, *_ in pairs)
        rows += _pair("threads", f"{number(baseline.threads)} in this run; {text}", width)
    return rows


def _loader(loader: LoaderEvent | None, width: int) -> list[Row]:
    if loader is None:
        return [((MISSING + ": not measured", "dim"),)]
    kept = "none" if loader.encoded is None else number(loader.encoded)
    rows = _pair("items", f"{number(loader.items)}, {kept} encoded once and kept", width)
    if loader.epochs_differ:
        rows += _pair("", "they change every epoch and cannot be kept", width)
    rows += _pair("micro-batch", f"{_items(loader.micro)}, {size(loader.batch_bytes)}", width)
    one = f"{_ns(loader.item_ns)}, of it {_ns(loader.item_cpu_ns)} on the processor (mean of {loader.probed})"
    rows += _pair("one item", one if loader.item_ns is not None else MISSING, width)
    rows += _pair("joining", f"{_ns(loader.collate_ns)} a micro-batch", width)
    gather = f"{_ns(loader.gather_ns)} a micro-batch" if loader.gather_ns is not None else MISSING
    if not loader.in_memory:
        gather += ": the data cannot be taken in one gather"
    return rows + _pair("one gather", gather, width)
