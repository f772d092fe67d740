"""The plot of memory against speed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ndd_engine.text import number, size

from .rows import cells, fit, shorten
from .style import Row

if TYPE_CHECKING:
    from ndd_engine.wizard.proposals import Proposal

_LEFT = 9  # cells of the labels


def plot_rows(
    rows: Sequence[Proposal], best: Sequence[Proposal], chosen: Proposal | None, width: int, height: int
) -> list[Row]:
    """Items per second over memory: ● Pareto front, · others, ✖ does not fit, ▲ selected.

    Speeds that would share one row get only that row, and memory that reads the same one column. If both hold, a
    sentence takes the place of the plot. [] if there is nothing to compare, or no room.
    """
    points = [one for one in rows if one.memory_bytes is not None and one.items_per_s]
    inner = width - _LEFT
    if len(points) < 2 or inner < 10 or height < 4:
        return []
    sizes = [one.memory_bytes or 0 for one in points]
    speeds = [one.items_per_s or 0.0 for one in points]
    least, most, slowest, fastest = min(sizes), max(sizes), min(speeds), max(speeds)
    speed = (
        number(fastest) if number(slowest) == number(fastest) else f"{number(slowest)} to {number(fastest)}"
    )
    level = int((1 - slowest / fastest) * (height - 2)) == 0
    alike = size(least) == size(most)
    if level and alike:
        text = f"all {len(points):,} need {size(most)} and process {speed} items/s: nothing to plot"
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
    unit = [] if level else ["items/s"]
    labels = [number(fastest), *unit, *[""] * (height - 3 - len(unit)), "0"][: height - 1]
    out: list[Row] = [
        ((label.rjust(_LEFT - 2) + " ┤", "dim"), *line) for label, line in zip(labels, grid, strict=True)
    ]
    first, last = size(least) if least else "0", size(most)
    title = f"memory, at {speed} items/s" if level else "memory"
    axis = f"{first}{title.center(max(inner - cells(first) - cells(last), cells(title) + 2))}{last}"
    axis = f"all need {size(most)}".center(inner) if alike else axis
    return [fit(row, width) for row in (*out, ((" " * _LEFT, "dim"), (shorten(axis, inner), "dim")))]
