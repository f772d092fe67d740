"""The progress of a trial, and a speed ratio with its confidence interval as a small plot on a logarithmic scale."""

from __future__ import annotations

import math

from ndd_console.words.trial import VERDICTS, measured
from ndd_engine.text import MISSING, foreign
from ndd_engine.trial.estimates import judged
from ndd_engine.trial.outcome import Progress

from .bars import progress_line
from .rows import BLANK, cells, ends, paragraph
from .style import Row

_LOW, _HIGH = 0.8, 1.4  # the scale covers at least this range
_PLOT = 60  # maximum width of a plot
_TICKS = (0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 1.0, 1.2, 1.4, 1.7, 2.0, 3.0, 5.0, 8.0, 10.0, 20.0, 50.0, 100.0)


def interval_rows(
    ratio: float | None, low: float | None, high: float | None, width: int, verdict: str = ""
) -> list[Row]:
    """Two rows: the scale, and the interval as ├──●──┤ with ┼ at 1, in the style of the verdict.

    Empty without an interval or enough room. verdict: of a trial that has ended.
    """
    width = min(width, _PLOT)
    if ratio is None or low is None or high is None or width < 20:
        return []
    if not 0 < low <= high < math.inf or not 0 < ratio < math.inf:
        return []
    left, right = min(_LOW, low / 1.05), max(_HIGH, high * 1.05)
    span = math.log(right / left)

    def cell(value: float) -> int:
        return round(math.log(value / left) / span * (width - 1))

    marks = [" "] * width
    # The label of 1 is placed first, so that it is never left out.
    for tick in sorted((t for t in _TICKS if left <= t <= right), key=lambda t: t != 1.0):
        text = f"{tick:g}"
        start = min(max(cell(tick) - len(text) // 2, 0), width - len(text))
        near = marks[max(start - 2, 0) : start + len(text) + 2]
        if all(char == " " for char in near):
            marks[start : start + len(text)] = text
    line = ["─"] * width
    line[cell(1.0)] = "┼"
    a, b = cell(low), cell(high)
    body = ["━"] * (b - a + 1)
    body[0], body[-1] = "├", "┤"
    body[min(max(cell(ratio), a), b) - a] = "●"
    style = VERDICTS.get(verdict or judged(ratio, low, high), "text")
    before, inside, after = "".join(line[:a]), "".join(body), "".join(line[b + 1 :])
    return [
        (("".join(marks), "dim"),),
        ((before, "dim"), (inside, style), (after, "dim")),
    ]


def progress_rows(progress: Progress, stage: str, width: int, *, plot: bool = True) -> list[Row]:
    """What is measured, how much of the budget is spent, and the ratio so far. stage: what is said of it."""
    parts = measured(progress)
    lead = f"{foreign(stage)}…"
    rows = paragraph(lead, width, "accent")
    if cells(lead) + cells(parts.blocks) < width:
        rows = [ends(rows[0], ((parts.blocks, "dim"),), width)]
    share = progress.spent_s / progress.budget_s if progress.budget_s else 0.0
    doing = f"{foreign(parts.doing)}, {parts.time}"
    fits = parts.doing != stage and cells(doing) < width * 2 // 3
    rows.append(progress_line(share, doing if fits else parts.time, width))
    if not plot:
        return rows
    # Two rows are reserved, so that what is below does not move when the interval appears.
    label = parts.ratio or f"{MISSING}: no ratio yet"
    scale = interval_rows(progress.ratio, progress.low, progress.high, width - cells(label) - 2)
    rows += [scale[0], (*scale[1], ("  " + label, "text"))] if scale else [BLANK, ((label, "dim"),)]
    return rows
