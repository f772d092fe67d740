"""Loss, evaluations, learning rate and gradient norm over time."""

from __future__ import annotations

from ndd_console.words.blocks import Block, Table, Text
from ndd_console.words.figures import small
from ndd_console.words.step import setting
from ndd_engine.record.events import MarkEvent
from ndd_engine.text import MISSING, duration, number, printable

from .collect import Moment
from .model import Report

_ROWS = 40
_OWN = 24  # maximum number of plots of logged values
_METRICS = 6  # maximum number of metrics shown


def learning(report: Report) -> list[Block]:
    """Training and evaluation loss, the other metrics, and the table of evaluations."""
    data, every = report.data, setting(report.snapshot.run, "log", "every_steps")
    names = [name.removeprefix("metric ") for name in data.curves if name.startswith("metric ")][:_METRICS]
    trained = report.line("loss", "training", "blue", band=True)
    evaluated = report.line("metric loss", "evaluation", "vermillion", dots=True) if "loss" in names else None
    note = f"Read back every {'few' if every is None else number(every)} steps."
    if trained and trained.bands:
        note += " The band spans the lowest and highest value around each point."
    out = report.plot("Loss", "plain", trained, evaluated, log_above=50, note=note)
    out = out or [Text("No loss was recorded.", "note")]
    for name in names:
        if name != "loss":
            dots = report.line(f"metric {name}", name, "vermillion", dots=True)
            out += report.plot(f"Evaluation: {name}", "plain", dots, height=120)
    if evaluations := data.marked("evaluation"):
        out.append(_evaluations(report, evaluations, names))
    for key, title in (("lr", "Learning rate"), ("grad_norm", "Gradient norm"), ("loss_scale", "Loss scale")):
        points = data.curves[key].points
        if len({(point.low, point.high) for point in points}) == 1:
            out.append(Text(f"{title}: {small(points[0].mean)} throughout."))
        else:
            line = report.line(key, title.lower(), "green", band=True)
            out += report.plot(title, "plain", line, height=120)
    return [*out, *_own(report)]


def _own(report: Report) -> list[Block]:
    """What the user's own training code logged, and its newest samples."""
    out: list[Block] = []
    names = [name.removeprefix("own ") for name in report.data.curves if name.startswith("own ")]
    for name in names[:_OWN]:
        line = report.line(f"own {name}", printable(name), "green", band=True)
        out += report.plot(f"Logged: {printable(name)}", "plain", line, height=120)
    if len(names) > _OWN:
        out.append(Text(f"{_OWN} of {len(names):,} logged values.", "note"))
    if (texts := report.data.texts) is not None:
        rows = [
            (str(index) if line == 0 else "", printable(part))
            for index, text in enumerate(texts.texts, 1)
            for line, part in enumerate(text.split("\n"))
        ]
        out.append(Table(f"Samples at step {number(texts.step)}", ("", "text"), tuple(rows), wide=1))
    return out


def _evaluations(report: Report, evaluations: list[tuple[Moment, MarkEvent]], names: list[str]) -> Table:
    best = report.snapshot.best
    # Evenly spaced over the run, with the last and the best one.
    kept = {round(index * (len(evaluations) - 1) / (_ROWS - 1)) for index in range(_ROWS)}
    rows = []
    for index, (at, mark) in enumerate(evaluations):
        is_best = best is not None and at.step == best.step
        if len(evaluations) <= _ROWS or index in kept or is_best:
            metrics = mark.data.get("metrics") or {}
            values = (metrics.get(name) for name in names)
            figures = (small(value, 4) if isinstance(value, (int, float)) else MISSING for value in values)
            took = duration(mark.data.get("seconds"))
            rows.append((number(at.step), duration(at.x), *figures, took, "best" if is_best else ""))
    columns = ("step", "after", *names, "took", "")
    note = (
        "" if len(rows) == len(evaluations) else f"{len(rows):,} of {number(len(evaluations))} evaluations."
    )
    return Table("Evaluations", columns, tuple(rows), frozenset(range(len(columns) - 1)), note)
