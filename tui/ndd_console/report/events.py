"""Events over time: findings, evaluations, checkpoints, warnings, pauses and trials."""

from __future__ import annotations

import math
from collections.abc import Iterable

from ndd_console.words.blocks import Block, SpanRow, Spans, Table, Text, clip
from ndd_engine.diagnose import CAUSES
from ndd_engine.text import duration, number

from .model import Report, pauses

_ROWS = 60
_SPAN_ROWS = 24
_FIGURES = frozenset({0, 1})
_HOVER = 160  # characters of a text under the pointer
# Kind of a mark -> (name of its row, colour).
_MARKS = {
    "evaluation": ("evaluations", "purple"),
    "checkpoint": ("checkpoints", "green"),
    "warning": ("warnings", "vermillion"),
    "error": ("errors", "vermillion"),
    "compile": ("compilations", "indigo"),
    "recompile": ("recompilations", "wine"),
}
_LISTED = (*_MARKS, "pause", "resume", "choice", "note")

Span = tuple[float, float, str]


def findings(report: Report) -> list[Block]:
    """When each finding was present, as the run recorded it."""
    data = report.data
    if not data.findings:
        return [Text("The run recorded no findings.", "note")]
    present: dict[str, tuple[float, str]] = {}
    spans: dict[str, list[Span]] = {}
    rows = []
    for at, event in data.findings:
        cause = str(event.cause)
        present_at = spans.setdefault(cause, [])
        if event.gone:
            begin, text = present.pop(cause, (at.x, event.text))
            present_at.append((begin, at.x, str(text)))
        else:
            present.setdefault(cause, (at.x, event.text))
        state = "cleared" if event.gone else "found"
        rows.append((duration(at.x), number(at.step), state, CAUSES.get(cause, cause), str(event.text)))
    for cause, (begin, text) in present.items():
        spans[cause].append((begin, data.x, str(text)))
    tints = {"healthy": "green", "too-short": "grey"}
    drawn = tuple(
        SpanRow(CAUSES.get(cause, cause), tints.get(cause, "orange"), _merged(present_at, data.x))
        for cause, present_at in list(spans.items())[:_SPAN_ROWS]
    )
    columns = ("after", "step", "", "cause", "finding")
    table = Table("Changes", columns, tuple(rows), _FIGURES).newest(_ROWS)
    return [Spans("When each finding was present", drawn, report.time), table]


def events(report: Report) -> list[Block]:
    """Marks, pauses, profiler captures and trials on the time axis, and the newest marks as a table."""
    data = report.data
    groups: list[tuple[str, str, list[Span]]] = []
    for kind, (name, tint) in _MARKS.items():
        marked = data.marked(kind)
        spans = [(at.x - _seconds(mark.data.get("seconds")), at.x, str(mark.text)) for at, mark in marked]
        groups.append((name, tint, spans))
    # A trial after the end of the run took none of its time.
    tried = [
        (at.x - (_seconds(trial.seconds) if at.x < data.x else 0.0), at.x, str(trial.text))
        for at, trial in data.trials
    ]
    captures = [(at.x, at.x, f"profiler capture at step {number(event.step)}") for at, event in data.captures]
    groups += [
        ("pauses", "grey", [(a, b, f"paused for {duration(b - a)}") for a, b in pauses(data)]),
        ("profiler captures", "sky", captures),
        ("trials", "blue", tried),
        ("resumed", "teal", [(at.x, at.x, f"resumed from step {number(at.step)}") for at in data.resumed]),
    ]
    rows = tuple(SpanRow(name, tint, _merged(spans, data.x)) for name, tint, spans in groups if spans)
    out: list[Block] = [Spans("Timeline", rows, report.time)] if rows else []
    marks = data.marked(*_LISTED)
    if marks:
        cells = tuple((duration(at.x), number(at.step), str(mark.kind), str(mark.text)) for at, mark in marks)
        out.append(Table("Log", ("after", "step", "kind", "event"), cells, _FIGURES).newest(_ROWS))
    return out or [Text("Nothing but steps was recorded.", "note")]


def _seconds(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) and 0 < value < math.inf else 0.0


def _merged(spans: Iterable[Span], whole_s: float) -> tuple[Span, ...]:
    """The spans in order; those too close to tell apart become one."""
    near = 0.003 * whole_s
    out: list[tuple[float, float, str, int]] = []
    for begin, end, text in sorted(spans):
        begin = max(begin, 0.0)
        if out and begin - out[-1][1] < near and (end - begin < near or begin < out[-1][1]):
            first, last, shown, count = out[-1]
            out[-1] = (first, max(last, end), shown, count + 1)
        else:
            out.append((begin, end, clip(text, _HOVER), 1))
    return tuple(
        (begin, end, text if count == 1 else f"{text} (and {count - 1} more)")
        for begin, end, text, count in out
    )
