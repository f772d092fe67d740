"""Bars, sparklines, graphs and plots drawn with characters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from ndd_console.words.trial import VERDICTS, measured
from ndd_engine.text import MISSING, finite, foreign, number, size
from ndd_engine.trial.estimates import judged
from ndd_engine.trial.outcome import Progress

from .rows import BLANK, cells, ends, fit, paragraph, shorten
from .style import Row

if TYPE_CHECKING:
    from ndd_engine.wizard.proposals import Proposal

_EIGHTHS = " ▏▎▍▌▋▊▉"
_LEVELS = "▁▂▃▄▅▆▇█"
# Bits of a Braille character from top to bottom, for its left and right column.
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_BRAILLE = 0x2800

Points = Sequence[tuple[int, float]]

_PLOT = 60  # maximum width of a plot
_TICKS = (0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 1.0, 1.2, 1.4, 1.7, 2.0, 3.0, 5.0, 8.0, 10.0, 20.0, 50.0, 100.0)
_LEFT = 9  # least cells of the labels


def within(share: object) -> float:
    """A share limited to 0..1; 0 if it is no number."""
    return min(max(finite(share) or 0.0, 0.0), 1.0)


def bar(share: float, width: int) -> str:
    """A bar of `share` (0..1), padded to `width` cells; resolution: an eighth of a cell."""
    eighths = round(within(share) * width * 8)
    if eighths == 0 and share > 0 and width > 0:
        eighths = 1  # a small share is still visible
    full, part = divmod(eighths, 8)
    text = "█" * full + (_EIGHTHS[part] if part else "")
    return text.ljust(width)


def progress_bar(share: float, width: int) -> Row:
    """A thick line for the completed share, a thin one for the rest."""
    halves = round(within(share) * width * 2)
    full, half = divmod(halves, 2)
    done = "━" * full + ("╸" if half else "")
    return ((done, "accent"), ("─" * (width - len(done)), "dim"))


def labelled_bar(share: float, text: str, width: int) -> Row:
    """A progress bar with its figures after it."""
    return (*progress_bar(share, max(width - cells(text) - 1, 1)), (f" {text}", "text"))


def stacked_bar(parts: Sequence[tuple[float, str, str]], width: int) -> Row:
    """One bar of several parts (share, character, style); the shares add up to at most 1."""
    out: list[tuple[str, str]] = []
    edge = 0.0
    used = 0
    for share, char, style in parts:
        edge += within(share)
        count = min(max(round(edge * width), used + (1 if share > 0 else 0)), width) - used
        out.append((char * count, style))
        used += count
    return (*out, (" " * (width - used), "text"))


def finite_values(points: Points) -> list[float]:
    return [value for _, value in points if math.isfinite(value)]


def bucket(values: Sequence[float], count: int) -> list[float]:
    """Downsample to at most `count` values, each the mean of its neighbours."""
    size = len(values)
    if count < 1:
        return []
    if size <= count:
        return list(values)
    edges = [index * size // count for index in range(count + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]


def sparkline(values: Sequence[float], width: int) -> str:
    """The values as one line of blocks, scaled to their range and padded to `width`."""
    shown = bucket(values, max(width, 0))
    if not shown:
        return " " * max(width, 0)
    low, high = min(shown), max(shown)
    scale = (len(_LEVELS) - 1) / (high - low) if high > low else 0.0
    middle = 0.0 if scale else 3.0
    return "".join(_LEVELS[int((value - low) * scale + middle + 0.5)] for value in shown).ljust(width)


def levels(shares: Sequence[float], width: int) -> str:
    """One block for each share (0..1), such as the load of each core."""
    top = len(_LEVELS) - 1
    return "".join(_LEVELS[round(within(share) * top)] for share in shares[: max(width, 0)])


def graph(values: Sequence[float], width: int, height: int) -> list[str]:
    """The values as a Braille line graph of `height` rows, top row first."""
    if not values or width < 1 or height < 1:
        return [" " * max(width, 0)] * max(height, 0)
    columns, dots = width * 2, height * 4
    shown = bucket(values, columns)
    low, high = min(shown), max(shown)
    scale = (dots - 1) / (high - low) if high > low else 0.0
    grid = [[0] * width for _ in range(height)]
    stretch = (len(shown) - 1) / (columns - 1)
    last: int | None = None
    for column in range(columns):
        place = column * stretch
        index = int(place)
        value = shown[index]
        if index + 1 < len(shown):
            value += (shown[index + 1] - value) * (place - index)
        y = dots - 1 - round((value - low) * scale) if scale else dots // 2
        # Fill the gap to the previous dot so that steep lines stay connected.
        start = y if last is None else (last + 1 if y > last else last - 1 if y < last else y)
        for dot in range(min(start, y), max(start, y) + 1):
            grid[dot // 4][column // 2] |= _DOTS[column % 2][dot % 4]
        last = y
    return ["".join(chr(_BRAILLE + cell) if cell else " " for cell in line) for line in grid]


_LOW, _HIGH = 0.8, 1.4  # the scale covers at least this range
_MOST = 1e300  # of a damaged record


def interval_rows(
    ratio: float | None, low: float | None, high: float | None, width: int, verdict: str = ""
) -> list[Row]:
    """Two rows: the scale, and the interval as ├──●──┤ with ┼ at 1, in the style of the verdict.

    Empty without an interval or enough room. verdict: of a trial that has ended.
    """
    width = min(width, _PLOT)
    if ratio is None or low is None or high is None or width < 20:
        return []
    if not 0 < low <= high < _MOST or not 0 < ratio < math.inf:
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
    return [(("".join(marks), "dim"),), ((before, "dim"), (inside, style), (after, "dim"))]


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
    rows.append(labelled_bar(share, doing if fits else parts.time, width))
    if not plot:
        return rows
    # Two rows are reserved, so that what is below does not move when the interval appears.
    label = parts.ratio or f"{MISSING}: no ratio yet"
    scale = interval_rows(progress.ratio, progress.low, progress.high, width - cells(label) - 2)
    rows += [scale[0], (*scale[1], ("  " + label, "text"))] if scale else [BLANK, ((label, "dim"),)]
    return rows


_MARKS = "● best at its memory  · other  ✖ does not fit  ▲ selected  │ usable memory"


def plot_rows(
    rows: Sequence[Proposal], best: Sequence[Proposal], chosen: Proposal | None, width: int, height: int
) -> list[Row]:
    """Items per second over memory, with axes and marks named.

    Speeds that would share one row get only that row, and memory that reads the same one column. If both hold, a
    sentence takes the place of the plot. [] if there is nothing to compare, or no room.
    """
    points = [one for one in rows if one.memory_bytes is not None and one.items_per_s]
    height -= 1  # the last row names the marks
    if len(points) < 2 or height < 4:
        return []
    from ndd_console.words.wizard import item_unit

    unit = shorten(item_unit(points[0]), width // 4)
    left = max(cells(unit) + 2, _LEFT)
    inner = width - left
    if inner < 10:
        return []
    sizes = [one.memory_bytes or 0 for one in points]
    speeds = [one.items_per_s or 0.0 for one in points]
    least, most, slowest, fastest = min(sizes), max(sizes), min(speeds), max(speeds)
    least_speed, speed = number(slowest), number(fastest)
    speed = speed if least_speed == speed else f"{least_speed} to {speed}"
    level = int((1 - slowest / fastest) * (height - 2)) == 0
    alike = size(least) == size(most)
    if level and alike:
        text = f"all {len(points):,} need {size(most)} and process {speed} {unit}: nothing to plot"
        return [((shorten(text, width), "dim"),)]
    height = 2 if level else height
    # The axis starts at 0 unless the values are so close that their differences would be hidden.
    least = least if most < 2 * least else 0
    grid = [[(" ", "text")] * inner for _ in range(height - 1)]

    def column_of(memory: int) -> int:
        return inner // 2 if alike else int((memory - least) / max(most - least, 1) * (inner - 1))

    free = points[0].free_bytes
    if least <= free <= most and not alike:
        for line in grid:
            line[column_of(free)] = ("│", "warn")
    marks = [(one, "✖", "bad") if not one.fits else (one, "·", "dim") for one in points]
    marks += [(one, "●", "good") for one in points if one in best]
    marks += [(one, "▲", "accent") for one in points if one is chosen]
    for one, mark, style in marks:
        y = int((1 - (one.items_per_s or 0.0) / fastest) * (height - 2))
        grid[y][column_of(one.memory_bytes or 0)] = (mark, style)
    units = [] if level else [unit]
    labels = [number(fastest), *units, *[""] * (height - 3 - len(units)), "0"][: height - 1]
    lines = zip(labels, grid, strict=True)
    out: list[Row] = [((label.rjust(left - 2) + " ┤", "dim"), *line) for label, line in lines]
    first, last = size(least) if least else "0", size(most)
    title = f"memory, at {speed} {unit}" if level else "memory"
    axis = f"{first}{title.center(max(inner - cells(first) - cells(last), cells(title) + 2))}{last}"
    axis = f"all need {size(most)}".center(inner) if alike else axis
    below = ((" " * left, "dim"), (shorten(axis, inner), "dim")), ((shorten(_MARKS, width), "dim"),)
    return [fit(row, width) for row in (*out, *below)]
