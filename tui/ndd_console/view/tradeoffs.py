"""The table of trade-offs and the plot of memory against throughput."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ndd_console.words.wizard import APPLIES, COLUMNS, remark
from ndd_engine.text import foreign, number, size

from .rows import cells, column, fit, shorten
from .style import Row, Span

if TYPE_CHECKING:
    from ndd_engine.wizard.proposals import Proposal

MARKED, BEST = "✔", "●"  # marked for measurement; on the Pareto front

BY_SPEED = next(place for place, column in enumerate(COLUMNS) if column.name == "items/s")
# Columns to drop if the terminal is too narrow, in this order.
_DROPPED = (
    "parameters",
    "tokens/s",
    "accum",
    "dtype",
    "total time",
    "step",
    "size",
    "sequence",
    "ranks",
    "data",
)


def ordered(rows: Sequence[Proposal], column: int) -> list[Proposal]:
    """Sorted by a column; proposals that fit come first."""
    return sorted(rows, key=lambda one: (not one.fits, COLUMNS[column].order(one)))


def shown_columns(rows: Sequence[Proposal], width: int, column: int) -> list[int]:
    """Indices of the columns that fit into `width`, always including the sort column."""
    kept = list(range(len(COLUMNS)))
    out = {name for name, says in APPLIES.items() if rows and not any(map(says, rows))}
    if len({one.placement for one in rows}) < 2:
        out.add("data")
    kept = [place for place in kept if COLUMNS[place].name not in out or place == column]
    for name in _DROPPED:
        if sum(COLUMNS[place].width for place in kept) <= width - 2:
            break
        kept = [place for place in kept if COLUMNS[place].name != name or place == column]
    return kept


def heading_row(columns: Sequence[int], width: int, column: int) -> Row:
    """Column names; the sort column is highlighted."""
    spans: list[Span] = [("  ", "dim")]
    for place in columns:
        known = COLUMNS[place]
        name = f"{known.name}▾" if place == column else known.name
        spans.append((name.ljust(known.width), "accent" if place == column else "dim"))
    return fit(tuple(spans), width)


def proposal_row(one: Proposal, columns: Sequence[int], width: int, lead: str) -> Row:
    """One proposal; remaining width shows its remark. lead: the mark before it."""
    style = "bad" if not one.fits else "text"
    spans: list[Span] = [(lead.ljust(2), "good" if lead == MARKED else "accent")]
    for place in columns:
        known = COLUMNS[place]
        spans.append((column(known.text(one), known.width), style))
    rest = width - 2 - sum(COLUMNS[place].width for place in columns)
    if rest >= 12:
        spans.append((shorten(foreign(remark(one)), rest), "bad" if not one.fits else "dim"))
    return fit(tuple(spans), width)


def _from_to(low: str, high: str) -> str:
    """ "3,200 to 3,400", or one of them if they are the same."""
    return low if low == high else f"{low} to {high}"


def plot_rows(
    rows: Sequence[Proposal], best: Sequence[Proposal], chosen: Proposal | None, width: int, height: int
) -> list[Row]:
    """Items per second over memory: ● Pareto front, · others, ✖ does not fit, ▲ selected.

    Speeds that would share one row get only that row, and memory that reads the same one column. If both hold, a
    sentence takes the place of the plot. [] if there is nothing to compare, or no room.
    """
    points = [one for one in rows if one.memory_bytes is not None and one.items_per_s]
    left = 9
    inner = width - left
    if len(points) < 2 or inner < 10 or height < 4:
        return []
    sizes = [one.memory_bytes or 0 for one in points]
    least, most = min(sizes), max(sizes)
    speeds = [one.items_per_s or 0.0 for one in points]
    fastest, speed = max(speeds), _from_to(number(min(speeds)), number(max(speeds)))
    level = int((1 - min(speeds) / fastest) * (height - 2)) == 0
    alike = size(least) == size(most)
    if level and alike:
        text = f"all {len(points)} need {size(most)} and process {speed} items/s: nothing to plot"
        return [((shorten(text, width), "dim"),)]
    height = 2 if level else height
    # The axis starts at 0 unless the values are so close that their differences would be hidden.
    least = least if most < 2 * least else 0
    span = max(most - least, 1)
    grid = [[(" ", "text")] * inner for _ in range(height - 1)]
    free = points[0].free_bytes
    if least <= free <= most and not alike:
        at = min(int((free - least) / span * (inner - 1)), inner - 1)
        for line in grid:
            line[at] = ("│", "warn")
    marks = [(one, "✖", "bad") if not one.fits else (one, "·", "dim") for one in points]
    marks += [(one, "●", "good") for one in points if one in best]
    marks += [(one, "▲", "accent") for one in points if one is chosen]
    for one, mark, style in marks:
        x = inner // 2 if alike else int(((one.memory_bytes or 0) - least) / span * (inner - 1))
        y = int((1 - (one.items_per_s or 0.0) / fastest) * (height - 2))
        grid[y][x] = (mark, style)
    out: list[Row] = []
    for place, line in enumerate(grid):
        label = number(fastest) if place == 0 else "0" if place == height - 2 else ""
        out.append(((label.rjust(left - 2) + " ┤", "dim"), *line))
    first, last = size(least) if least else "0", size(most)
    title = f"memory, at {speed} items/s" if level else "memory"
    axis = f"{first}{title.center(max(inner - cells(first) - cells(last), cells(title) + 2))}{last}"
    if alike:
        axis = f"all need {size(most)}".center(inner)
    out.append(((" " * left, "dim"), (shorten(axis, inner), "dim")))
    return [fit(row, width) for row in out]
