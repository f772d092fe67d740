"""The lower blocks of the live screen: speed and work, loss, evaluations, events, warnings and the end of the run."""

from __future__ import annotations

from ndd_console.words.figures import small
from ndd_console.words.run import LOST, end_text, loss_text, metrics_text
from ndd_console.words.step import PAUSED, is_script, items_rate, micro_steps, rates, work_short, work_texts
from ndd_engine.record.snapshot import Snapshot, TimedMark
from ndd_engine.text import MISSING, counted, foreign, number

from .bars import Points, bucket, finite_values, graph, sparkline
from .rows import cells, ends, fit, paragraph, rule, shorten, side_by_side
from .style import STATUS, Row

_MARK_STYLE = {"warning": "warn", "error": "bad", "evaluation": "accent", "recompile": "warn"}
_GAP = 3
_MESSAGE = 3  # rows of what is said to the user
_LABEL = 9


def figures_row(snapshot: Snapshot, width: int, with_trends: bool, with_work: bool = False) -> Row:
    """Learning rate, gradient norm and loss scale; loss, rate and FLOP/s if no other row shows them."""
    parts = [] if with_trends else [loss_text(snapshot), items_rate(snapshot)]
    parts += [f"lr {small(snapshot.lr)}", f"gradient norm {small(snapshot.grad_norm)}"]
    if snapshot.loss_scale is not None and snapshot.loss_scale != 1:
        parts.append(f"loss scale {number(snapshot.loss_scale)}")
    if with_work and (work := work_short(snapshot)):
        parts.append(work)
    while len(parts) > 1 and sum(map(cells, parts)) + 3 * (len(parts) - 1) > width:
        parts.pop()
    return (("   ".join(parts), "text"),)


def evaluation_row(snapshot: Snapshot, width: int) -> Row:
    """The latest and the best evaluation."""
    if not snapshot.evaluations:
        return (("evaluation n/a", "dim"),)
    last, best = snapshot.evaluations[-1], snapshot.best
    text = f"evaluation {foreign(metrics_text(last.metrics))} at step {last.step:,}"
    if best is None:
        return ((shorten(text, width), "text"),)
    name, value = next(iter(best.metrics.items()), ("", None))
    note = "best so far" if best.step == last.step else f"best {number(value, 4)} at step {best.step:,}"
    room = width - cells(note) - 3
    if room < 20:
        return ((shorten(f"{name} {note}", width), "text"),)
    return ((shorten(text, room), "text"), ("   " + note, "good" if best.step == last.step else "text"))


def trend_row(snapshot: Snapshot, width: int) -> Row:
    """Loss and rate with sparklines."""
    half = (width - _GAP) // 2
    first = _trend(loss_text(snapshot), snapshot.loss_trend, half)
    second = _trend(items_rate(snapshot), snapshot.rate_trend, width - _GAP - half)
    return (*fit(first, half), (" " * _GAP, "text"), *second)


def _trend(title: str, points: Points, width: int) -> Row:
    line = sparkline(finite_values(points), width - cells(title) - 1)
    return ((title + " ", "text"), (line, "trend"))


def trend_graphs(snapshot: Snapshot, width: int, height: int) -> list[Row]:
    """Loss and rate as graphs side by side, `height` rows with their headings."""
    half = (width - _GAP) // 2
    left = _graph(loss_text(snapshot), finite_values(snapshot.loss_trend), half, height)
    right = _graph(items_rate(snapshot), finite_values(snapshot.rate_trend), width - _GAP - half, height)
    return side_by_side(left, right, half, _GAP, width - _GAP - half)


def _graph(title: str, values: list[float], width: int, height: int) -> list[Row]:
    rows: list[Row] = [rule(title, width)]
    if not values:
        return [*rows, (("no values yet", "dim"),)]
    values = bucket(values, 2 * (width - 6))  # the scale must show the range that is drawn
    top, bottom = number(max(values)), number(min(values))
    scale = max(len(top), len(bottom), 5)
    lines = graph(values, width - scale - 1, height - 1)
    for index, line in enumerate(lines):
        mark = top if index == 0 else bottom if index == len(lines) - 1 else ""
        rows.append(((mark.rjust(scale) + " ", "dim"), (line, "trend")))
    return rows


def mark_row(timed: TimedMark, width: int, digits: int = 0) -> Row:
    """An event on one line, its step in `digits` cells."""
    mark = timed.mark
    lead = f"step {mark.step:>{digits},}  "
    text = foreign(mark.text) or foreign(mark.kind)
    if mark.kind in ("warning", "error"):
        text = f"{mark.kind}: {text}"
    return ((lead, "dim"), (shorten(text, max(width - len(lead), 0)), _MARK_STYLE.get(mark.kind, "text")))


def newest_rows(snapshot: Snapshot, message: str | None, width: int, count: int) -> list[Row]:
    """The newest events, oldest first, then the message for the user if there is one."""
    said = message_rows(message, width)[:count]
    rows: list[Row] = []
    room = count - len(said)
    if room > 0 and snapshot.marks:
        shown = snapshot.marks[-room:]
        digits = max(len(f"{timed.mark.step:,}") for timed in shown)
        rows = [mark_row(timed, width, digits) for timed in shown]
    if rows and snapshot.warnings:
        note = counted(snapshot.warnings, "warning")
        if width >= 60 and shown[-1].mark.kind != "warning":
            newest = mark_row(shown[-1], width - len(note) - 2, digits)
            rows[-1] = ends(newest, ((note, "warn"),), width)
    return [*rows, *said]


def message_rows(message: str | None, width: int) -> list[Row]:
    """What is said to the user, on up to _MESSAGE rows."""
    return paragraph(message or "", width, "warn", _MESSAGE)


def end_rows(snapshot: Snapshot, name: str, width: int, count: int) -> list[Row]:
    """How the run ended: reason, final loss, and the checkpoint from which an own run resumes."""
    style = STATUS.get(snapshot.status, ("", "text"))[1]
    tail: list[Row] = []
    if snapshot.loss is not None and not snapshot.evaluations:
        tail.append((("final      ", "dim"), (loss_text(snapshot), "text")))
    reason, resume = snapshot.reason, ""
    if not is_script(snapshot.run):
        saved = snapshot.end.checkpoint if snapshot.end else None
        if saved is None and snapshot.checkpoint is not None:
            saved = snapshot.checkpoint.mark.data.get("file")
        tail.append((("checkpoint ", "dim"), (foreign(saved) if saved else MISSING, "text")))
        resume = f"resume with: ndd-console train --resume {foreign(name)}"
    if snapshot.status == "lost":
        reason = "; ".join(filter(None, (LOST, resume)))
    elif resume and snapshot.status not in ("done", "failed"):
        tail.append(((resume, "dim"),))
    room = max(count - 1 - len(tail), 1)
    return [rule(end_text(snapshot), width, style), *paragraph(reason, width, limit=room), *tail][
        : max(count, 0)
    ]


def throughput_rows(snapshot: Snapshot, width: int, count: int) -> list[Row]:
    """At most `count` rows. A single row shows the work: the screen shows the main rates elsewhere."""
    room = width - _LABEL
    lines = [("speed", _speed(snapshot, room)), ("work", _work(snapshot, room))]
    lines = [(label, text) for label, text in lines if text]
    shown = lines[-count:] if count > 0 else []
    return [((label.ljust(_LABEL), "dim"), (shorten(text, room), "text")) for label, text in shown]


def _speed(snapshot: Snapshot, room: int) -> str:
    if snapshot.step_ns is None or snapshot.status == PAUSED:
        return ""
    texts, micro = rates(snapshot), micro_steps(snapshot)
    full = [f"{texts[0]} ({micro})" if micro else texts[0], *texts[1:]]
    return _first_that_fits([full, full[:-1], texts, texts[:-1]], room)


def _work(snapshot: Snapshot, room: int) -> str:
    texts = work_texts(snapshot)
    if not texts:
        return ""
    short, line = work_short(snapshot), texts[2]
    # The reason for a missing MFU may be long: drop it before the intensity.
    fewer = texts[:2] if snapshot.throughput.mfu is not None else [texts[0], line]
    return _first_that_fits([texts, fewer, [short, line], [short or texts[0]]], room)


def _first_that_fits(choices: list[list[str]], room: int) -> str:
    joined = ["   ".join(texts) for texts in choices]
    return next((text for text in joined if cells(text) <= room), joined[-1])
