"""A ratio with its interval, in figures and as a small plot on a logarithmic scale around 1."""

from __future__ import annotations

import math

from ndd_engine.record.events import TrialEvent

from .findings import times
from .style import Row

_LOW, _HIGH = 0.8, 1.4  # the scale shows at least this much
_TICKS = (0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 1.0, 1.2, 1.4, 1.7, 2.0, 3.0, 5.0, 8.0, 10.0, 20.0, 50.0, 100.0)
VERDICTS = {
    "gain": "good",
    "no gain": "text",
    "loss": "bad",
    "undecided": "warn",
    "out of memory": "bad",
    "failed": "bad",
    "stopped": "warn",
}


def interval_text(ratio: float | None, low: float | None, high: float | None) -> str:
    """ "1.42x (1.35 to 1.49)"; "" before there is a ratio."""
    if ratio is None:
        return ""
    if low is None or high is None:
        return times(ratio)
    return f"{times(ratio)} ({times(low)[:-1]} to {times(high)[:-1]})"


def trial_text(trial: TrialEvent | None) -> str:
    """ "gain 1.42x (1.35 to 1.49)"."""
    if trial is None:
        return ""
    figures = interval_text(trial.ratio, trial.low, trial.high)
    return f"{trial.verdict} {figures}".strip()


def interval_style(low: float, high: float) -> str:
    """Good when the whole interval is a gain, bad when all of it is a loss."""
    return "good" if low > 1 else "bad" if high < 1 else "warn"


def interval_rows(ratio: float | None, low: float | None, high: float | None, width: int) -> list[Row]:
    """Two rows: the scale, and the interval on it as ├──●──┤ with ┼ at 1. [] without an interval or without room."""
    if ratio is None or low is None or high is None or width < 20 or min(ratio, low) <= 0:
        return []
    if not all(math.isfinite(value) for value in (ratio, low, high)):
        return []
    left, right = min(_LOW, low / 1.05), max(_HIGH, high * 1.05)
    span = math.log(right / left)

    def cell(value: float) -> int:
        return round(math.log(value / left) / span * (width - 1))

    marks = [" "] * width
    for tick in sorted((t for t in _TICKS if left <= t <= right), key=lambda t: t != 1.0):
        # 1 first: the others yield to it.
        text = f"{tick:g}"
        start = min(max(cell(tick) - len(text) // 2, 0), width - len(text))
        near = marks[max(start - 2, 0) : start + len(text) + 2]
        if all(char == " " for char in near):
            marks[start : start + len(text)] = text
    line = ["─"] * width
    line[cell(1.0)] = "┼"
    a, b = cell(low), cell(high)
    dot = min(max(cell(ratio), a), b)
    body = ["━"] * (b - a + 1)
    body[0], body[-1] = "├", "┤"
    body[dot - a] = "●"
    return [
        (("".join(marks), "dim"),),
        (
            ("".join(line[:a]), "dim"),
            ("".join(body), interval_style(low, high)),
            ("".join(line[b + 1 :]), "dim"),
        ),
    ]
