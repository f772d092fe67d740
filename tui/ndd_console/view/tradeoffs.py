"""The table of trade-offs and the plot of memory against throughput."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ndd_engine.text import MISSING, duration, number, size

from .rows import cells, fit, foreign, shorten
from .style import Row, Span

if TYPE_CHECKING:
    from ndd_engine.wizard.proposals import Proposal

_LARGE = float("inf")


@dataclass(frozen=True)
class Column:
    """One column. width: cells with the blank behind it; text: of a row; order: what it is sorted by, ascending."""

    name: str
    width: int
    text: Callable[[Proposal], str]
    order: Callable[[Proposal], Any]


def _or(value: float | None) -> float:
    return _LARGE if value is None else value


COLUMNS: tuple[Column, ...] = (
    Column("size", 9, lambda one: one.model.size or MISSING, lambda one: one.parameters),
    Column("sequence", 10, lambda one: str(one.model.sequence), lambda one: -one.model.sequence),
    Column("type", 6, lambda one: one.model.precision, lambda one: float(one.model.amp != "off")),
    Column("micro", 7, lambda one: str(one.batch.micro), lambda one: -one.batch.micro),
    Column("x", 5, lambda one: str(one.batch.accumulation), lambda one: one.batch.accumulation),
    Column("memory", 9, lambda one: size(one.memory_bytes), lambda one: _or(one.memory_bytes)),
    Column("data", 6, lambda one: "card" if one.placement == "device" else "host", lambda one: one.placement),
    Column("step", 10, lambda one: _step(one), lambda one: _or(one.step_s)),
    Column("items/s", 9, lambda one: _rate(one, one.items_per_s), lambda one: _slowness(one)),
    Column("tokens/s", 10, lambda one: _rate(one, one.tokens_per_s), lambda one: -(one.tokens_per_s or 0.0)),
    Column("in all", 12, lambda one: _bound(one) + duration(one.total_s), lambda one: _or(one.total_s)),
    Column("parameters", 12, lambda one: number(one.parameters), lambda one: one.parameters),
)  # fmt: skip
BY_SPEED = next(place for place, column in enumerate(COLUMNS) if column.name == "items/s")
# What goes first where there is little room.
_YIELDS = ("parameters", "tokens/s", "x", "type", "in all", "step", "size", "sequence", "data")
DATA = next(place for place, column in enumerate(COLUMNS) if column.name == "data")


def _step(one: Proposal) -> str:
    return _bound(one) + duration(one.step_s)


def _bound(one: Proposal) -> str:
    return "≥" if one.lower_bound else ""


def _rate(one: Proposal, rate: float | None) -> str:
    return ("≤" if one.lower_bound else "") + number(rate)


def _slowness(one: Proposal) -> Any:
    from ndd_engine.wizard.proposals import slowness

    return slowness(one)


def ordered(rows: Sequence[Proposal], column: int) -> list[Proposal]:
    """By a column, what fits first."""
    return sorted(rows, key=lambda one: (not one.fits, COLUMNS[column].order(one)))


def shown_columns(rows: Sequence[Proposal], width: int, column: int) -> list[int]:
    """The places of the columns that there is room for, and that tell rows apart; the one that is sorted by is among
    them."""
    kept = list(range(len(COLUMNS)))
    if len({one.placement for one in rows}) < 2 and column != DATA:
        kept.remove(DATA)
    for name in _YIELDS:
        if sum(COLUMNS[place].width for place in kept) <= width - 2:
            break
        kept = [place for place in kept if COLUMNS[place].name != name or place == column]
    return kept


def heading_row(columns: Sequence[int], width: int, column: int) -> Row:
    """Names of the columns; the one that is sorted by stands out."""
    spans: list[Span] = [("  ", "dim")]
    for place in columns:
        known = COLUMNS[place]
        name = f"{known.name}▾" if place == column else known.name
        spans.append((name.ljust(known.width), "accent" if place == column else "dim"))
    return fit(tuple(spans), width)


def proposal_row(one: Proposal, columns: Sequence[int], width: int, chosen: bool, best: bool) -> Row:
    """One proposal. best: nothing beats it. What it costs, or is missing, stands in the room that is left."""
    lead = "▸ " if chosen else "● " if best else "  "
    style = "bad" if not one.fits else "text"
    spans: list[Span] = [(lead, "accent")]
    used = 2
    for place in columns:
        known = COLUMNS[place]
        text = shorten(known.text(one), known.width - 1)
        spans.append((text + " " * (known.width - cells(text)), "select" if chosen else style))
        used += known.width
    rest = width - used
    if rest >= 12:
        spans.append((shorten(foreign(remark(one)), rest), "bad" if not one.fits else "dim"))
    return fit(tuple(spans), width)


def remark(one: Proposal) -> str:
    """What there is to say of a proposal beside its figures."""
    if one.missing_bytes:
        return f"does not fit: {size(one.missing_bytes)} missing"
    words = ["memory is a guess"] if one.doubt else []
    if one.measured is not None:
        known = one.measured
        words.append(known.verdict if known.step_s is None else f"measured {duration(known.step_s)} a step")
    if one.over_bytes:
        words.append(f"{size(one.over_bytes)} more than may be used")
    return "; ".join([*words, one.cost] if one.cost else words)


def plot_rows(
    rows: Sequence[Proposal], best: Sequence[Proposal], chosen: Proposal | None, width: int, height: int
) -> list[Row]:
    """Memory to the right, items a second upwards: ● what nothing beats, · the rest, ✖ what does not fit."""
    points = [one for one in rows if one.memory_bytes is not None and one.items_per_s]
    left = 9
    inner = width - left
    if len(points) < 2 or inner < 10 or height < 4:
        return []
    sizes = [one.memory_bytes or 0 for one in points]
    least, most = min(sizes), max(sizes)
    # From nothing on, unless the most takes less than twice the least: then the difference is what there is to see.
    least = least if most < 2 * least else 0
    span = max(most - least, 1)
    fastest = max(one.items_per_s or 0.0 for one in points)
    grid = [[(" ", "text")] * inner for _ in range(height - 1)]
    free = points[0].free_bytes
    if least <= free <= most:
        at = min(int((free - least) / span * (inner - 1)), inner - 1)
        for line in grid:
            line[at] = ("│", "warn")
    marks = [(one, "✖", "bad") if not one.fits else (one, "·", "dim") for one in points]
    marks += [(one, "●", "good") for one in points if one in best]
    marks += [(one, "▲", "accent") for one in points if one is chosen]
    for one, mark, style in marks:
        x = int(((one.memory_bytes or 0) - least) / span * (inner - 1))
        y = int((1 - (one.items_per_s or 0.0) / fastest) * (height - 2))
        grid[y][x] = (mark, style)
    out: list[Row] = []
    for place, line in enumerate(grid):
        label = number(fastest) if place == 0 else "0" if place == height - 2 else ""
        out.append(((label.rjust(left - 2) + " ┤", "dim"), *line))
    first, last = size(least) if least else "0", size(most)
    axis = f"{first}{'memory'.center(max(inner - cells(first) - cells(last), 8))}{last}"
    out.append(((" " * left, "dim"), (shorten(axis, inner), "dim")))
    return [fit(row, width) for row in out]
