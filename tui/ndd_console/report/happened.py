"""What happened: findings that came and went, trials with their intervals, and marks on the time axis."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from ndd_console.view.interval import VERDICTS
from ndd_engine.diagnose import CAUSES
from ndd_engine.record.events import TrialEvent
from ndd_engine.text import MISSING, duration, number, size

from .blocks import Block, Facts, IntervalRow, Intervals, SpanRow, Spans, Table, Text, Tone
from .model import Report, pauses
from .plots import interval_words
from .safe import clip

_ROWS = 60
_TRIALS = 40
_WORDS = 160  # of a text that stands under the pointer
# Kind of a mark -> (name of its row, colour).
_MARKS = {
    "evaluation": ("evaluations", "purple"),
    "checkpoint": ("checkpoints", "green"),
    "warning": ("warnings", "vermillion"),
    "error": ("errors", "vermillion"),
    "compile": ("compilations", "indigo"),
    "recompile": ("compiled again", "wine"),
}
_TOLD = (
    "evaluation",
    "checkpoint",
    "warning",
    "error",
    "compile",
    "recompile",
    "pause",
    "resume",
    "choice",
    "note",
)
_TONES: dict[str, Tone] = {"good": "good", "warn": "warn", "bad": "bad"}
_EFFECT = {True: "yes", False: "NO", None: MISSING}

Span = tuple[float, float, str]


def findings(report: Report) -> list[Block]:
    """When each finding held, as the run itself recorded it."""
    data = report.data
    if not data.findings:
        return [Text("The run recorded no finding.", "note")]
    open_since: dict[str, tuple[float, str]] = {}
    spans: dict[str, list[Span]] = {}
    rows = []
    for at, event in data.findings:
        cause = str(event.cause)
        if event.gone:
            begin, text = open_since.pop(cause, (at.x, event.text))
            spans.setdefault(cause, []).append((begin, at.x, clip(str(text), _WORDS)))
        else:
            open_since.setdefault(cause, (at.x, event.text))
            spans.setdefault(cause, [])
        name = CAUSES.get(cause, cause)
        rows.append(
            (duration(at.x), number(at.step), "gone" if event.gone else "came", name, str(event.text))
        )
    for cause, (begin, text) in open_since.items():
        spans[cause].append((begin, data.x, clip(str(text), _WORDS)))
    tints = {"healthy": "green", "too-short": "grey"}
    drawn = tuple(
        SpanRow(CAUSES.get(cause, cause), tints.get(cause, "orange"), _merged(found, data.x))
        for cause, found in list(spans.items())[:24]
    )
    note = f"The newest {_ROWS} of {number(len(rows))}." if len(rows) > _ROWS else ""
    columns = ("after", "step", "", "cause", "finding")
    return [
        Spans("When each finding held", drawn, report.time),
        Table("Findings as they came and went", columns, tuple(rows[-_ROWS:]), frozenset({0, 1}), note),
    ]


def trials(report: Report) -> list[Block]:
    """Every trial of this run: the gain with its interval, what it did to memory and to the loss."""
    found = [trial for _, trial in report.data.trials][-_TRIALS:]
    if not found:
        return [Text("No change was tried on this run.", "note")]
    out: list[Block] = []
    intervals = [row for trial in found if (row := _interval(trial)) is not None]
    if intervals:
        note = (
            "Speed with the change over without it, in items a second, measured in paired blocks A B B A. The bar is "
            f"the {found[-1].confidence:.0%} interval; one that contains 1 shows no difference."
        )
        out.append(Intervals("Speed with each change", tuple(intervals), note))
    rows = tuple(
        (
            _change(trial),
            str(trial.verdict),
            _speed(trial),
            _side(trial, "peak_bytes", size),
            str(trial.loss),
            _EFFECT.get(trial.in_effect, MISSING),
        )
        for trial in found
    )
    kept = len(report.data.trials)
    note = f"The newest {_TRIALS} of {number(kept)}." if kept > _TRIALS else ""
    columns = ("change", "verdict", "speed", "peak memory", "losses", "in effect")
    out.append(Table("Trials", columns, rows, frozenset(), note, wide=0))
    out.append(Facts(tuple((_change(trial), _told(trial)) for trial in found)))
    return out


def _told(trial: TrialEvent) -> str:
    """Its result and how it was measured, in sentences."""
    parts = [str(trial.text)]
    if trial.not_in_effect:
        parts.append(f"not in effect: {trial.not_in_effect}")
    where = f" on {trial.device}" if trial.device else ""
    parts.append(
        f"against {trial.against}{where}: {number(trial.quads)} times A B B A in {duration(trial.seconds)}"
    )
    parts.append(f"before the first step {_side(trial, 'prepare_s', duration)}")
    if trial.break_even_steps:
        parts.append(f"which is repaid after {number(trial.break_even_steps)} steps")
    if trial.loss_text:
        parts.append(f"losses: {trial.loss_text}")
    return "; ".join(part.rstrip(".") for part in parts) + "."


def _change(trial: TrialEvent) -> str:
    return ", ".join(map(str, trial.sets)) or "no change"


def _interval(trial: TrialEvent) -> IntervalRow | None:
    """None where nothing was compared."""
    ratio, low, high = trial.ratio, trial.low, trial.high
    if ratio is None or low is None or high is None or not 0 < low <= ratio <= high < math.inf:
        return None
    tone = _TONES.get(VERDICTS.get(str(trial.verdict), ""), "")
    return IntervalRow(_change(trial), ratio, low, high, str(trial.verdict), tone)


def _speed(trial: TrialEvent) -> str:
    row = _interval(trial)
    return MISSING if row is None else interval_words(row.ratio, row.low, row.high)


def _side(trial: TrialEvent, key: str, say: Callable[[float | None], str]) -> str:
    """A figure of both sides, without the change and with it: "1.5 GB → 2.1 GB"."""
    before, after = (side.get(key) for side in (trial.base, trial.change))
    return MISSING if before is None and after is None else f"{say(before)} → {say(after)}"


# Marks.


def events(report: Report) -> list[Block]:
    """Evaluations, checkpoints, warnings, pauses and the rest on the time axis, and the newest of them in words."""
    data = report.data
    rows: list[SpanRow] = []
    for kind, (name, tint) in _MARKS.items():
        found = data.marked(kind)
        spans = [
            (at.x - _seconds(mark.data.get("seconds")), at.x, clip(str(mark.text), _WORDS))
            for at, mark in found
        ]
        if spans:
            rows.append(SpanRow(name, tint, _merged(spans, data.x)))
    quiet = [(begin, end, f"paused for {duration(end - begin)}") for begin, end in pauses(data)]
    captures = [(at.x, at.x, f"profiler burst at step {number(event.step)}") for at, event in data.captures]
    # One that was made after the end took no time of the run.
    tried = [
        (at.x - (_seconds(trial.seconds) if at.x < data.x else 0.0), at.x, clip(str(trial.text), _WORDS))
        for at, trial in data.trials
    ]
    gone_on = [(at.x, at.x, f"another process went on from step {number(at.step)}") for at in data.resumed]
    for name, tint, spans in (
        ("pauses", "grey", quiet),
        ("profiler bursts", "sky", captures),
        ("trials", "blue", tried),
        ("went on", "teal", gone_on),
    ):
        if spans:
            rows.append(SpanRow(name, tint, _merged(spans, data.x)))
    listed = data.marked(*_TOLD)
    if not rows and not listed:
        return [Text("Nothing was recorded besides the steps.", "note")]
    out: list[Block] = [Spans("On the time axis", tuple(rows), report.time)] if rows else []
    told = tuple(
        (duration(at.x), number(at.step), str(mark.kind), str(mark.text)) for at, mark in listed[-_ROWS:]
    )
    note = f"The newest {_ROWS} of {number(len(listed))} that are kept." if len(listed) > _ROWS else ""
    if told:
        out.append(Table("What happened", ("after", "step", "kind", "what"), told, frozenset({0, 1}), note))
    return out


def _seconds(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) and 0 < value < math.inf else 0.0


def _merged(spans: Iterable[Span], whole_s: float) -> tuple[Span, ...]:
    """In order, with those that no eye could tell apart drawn as one."""
    near = 0.003 * whole_s
    out: list[tuple[float, float, str, int]] = []
    for begin, end, text in sorted(spans):
        begin = max(begin, 0.0)
        if out and begin - out[-1][1] < near and (end - begin < near or begin < out[-1][1]):
            first, last, told, count = out[-1]
            out[-1] = (first, max(last, end), told, count + 1)
        else:
            out.append((begin, end, text, 1))
    return tuple(
        (begin, end, text if count == 1 else f"{text} (and {count - 1} more)")
        for begin, end, text, count in out
    )
