"""What was learned: loss, evaluations, learning rate and gradient norm."""

from __future__ import annotations

from ndd_console.view.learning import small
from ndd_engine.record.events import MarkEvent
from ndd_engine.text import MISSING, duration, number

from .blocks import Block, Line, Lines, Table, Text
from .collect import At
from .drawing import line
from .model import Report

_ROWS = 40
_METRICS = 6  # plots and columns of an evaluation


def learning(report: Report) -> list[Block]:
    """Loss of training and evaluation, every other metric, and the table of evaluations."""
    data = report.data
    out: list[Block] = []
    names = [name.removeprefix("metric ") for name in data.curves if name.startswith("metric ")][:_METRICS]
    curve = data.curve("loss")
    found: list[Line] = []
    if curve:
        found.append(line(curve, "training", "blue", data.x, band=True))
    if "loss" in names:
        found.append(line(data.curve("metric loss"), "evaluation", "vermillion", data.x, dots=True))
    if found:
        values = [value for item in found for _, value in item.points]
        steep = min(values) > 0 and max(values) > 50 * min(values)
        note = f"Read back every {_every(report)} steps."
        if found[0].bands:
            note += " The band holds the lowest and highest mean of a stretch."
        out.append(Lines("Loss", "plain", "", tuple(found), report.time, log=steep, note=note))
    else:
        out.append(Text("No loss was recorded.", "note"))
    for name in names:
        if name != "loss":
            dots = line(data.curve(f"metric {name}"), name, "vermillion", data.x, dots=True)
            out.append(Lines(f"Evaluation: {name}", "plain", "", (dots,), report.time, height=120))
    if data.evaluations:
        out.append(_evaluations(report, data.evaluations, names))
    for key, title in (("lr", "Learning rate"), ("grad_norm", "Gradient norm"), ("loss_scale", "Loss scale")):
        curve = data.curve(key)
        varies = len({(point.low, point.high) for point in curve.points}) > 1
        if varies:
            item = line(curve, title.lower(), "green", data.x, band=True)
            out.append(Lines(title, "plain", "", (item,), report.time, height=120))
        elif curve:
            out.append(Text(f"{title}: {small(curve.points[0].mean)}, the same throughout."))
    return out


def _every(report: Report) -> str:
    run = report.snapshot.run
    table = run.config.get("log") if run is not None else None
    return number(table.get("every_steps")) if isinstance(table, dict) else "few"


def _evaluations(report: Report, found: list[tuple[At, MarkEvent]], names: list[str]) -> Table:
    best = report.snapshot.best
    shown = found
    if len(found) > _ROWS:
        # Evenly over the run, the last one and the best one among them.
        kept = {round(index * (len(found) - 1) / (_ROWS - 1)) for index in range(_ROWS)}
        shown = [
            item
            for index, item in enumerate(found)
            if index in kept or (best is not None and item[0].step == best.step)
        ]
    rows = []
    for at, mark in shown:
        metrics = mark.data.get("metrics") or {}
        cells = [number(at.step), duration(at.x)]
        cells += [_figure(metrics.get(name)) for name in names]
        cells += [
            duration(mark.data.get("seconds")),
            "best" if best is not None and at.step == best.step else "",
        ]
        rows.append(tuple(cells))
    columns = ("step", "after", *names, "took", "")
    note = "" if len(shown) == len(found) else f"{len(shown)} of {number(len(found))} evaluations."
    return Table("Evaluations", columns, tuple(rows), frozenset(range(len(columns) - 1)), note)


def _figure(value: object) -> str:
    return small(value, 4) if isinstance(value, (int, float)) else MISSING
