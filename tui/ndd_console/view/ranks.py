"""Several ranks on the live screen: bars or a heat map, and the longest of each phase."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ndd_console.words.ranks import rank_rows
from ndd_engine.record.event import Ranks
from ndd_engine.text import counted, finite

from .bars import bar
from .rows import cells, rule, shorten
from .style import Row

# With more ranks the screen shows a heat map.
_MOST_BARS = 8
_LEAST_BAR = 4
_OWN = 8  # width of the own time
# The characters of the levels of a heat map, each 2 % of the time of a step without waiting.
SHADES = "·░░▒▒▓▓███"
_MARKED = 2  # from this level on in the colour of a warning
_LEGEND = "░ 2 %  ▒ 6 %  ▓ 10 %  █ 14 % longer"


def is_late(late: Mapping[str, Any] | None, rank: int) -> bool:
    """Whether it is the straggler."""
    return late is not None and late["rank"] == rank


def panel(ranks: Ranks, width: int, count: int) -> list[Row]:
    """At most `count` rows: a bar for each of a few ranks, a heat map of more."""
    if count < 2:
        return []
    newest = ranks.newest
    if newest.world <= _MOST_BARS and len(newest.rows_us) < count:
        return _bars(ranks, width)[:count]
    return heat_map(ranks, width, count)


def _bars(ranks: Ranks, width: int) -> list[Row]:
    """Work and then waiting of each rank, with its own time in milliseconds."""
    newest = ranks.newest
    late = ranks.late
    by_rank = sorted(rank_rows(newest).items())
    digits = max((len(str(rank)) for rank, _ in by_rank), default=1)
    whole = max((row.get("own", 0.0) + row.get("wait", 0.0) for _, row in by_rank), default=0.0) or 1.0
    extra = 7 if late is not None else 0
    room = width - digits - 1 - _OWN - extra
    out: list[Row] = [rule("ranks: work, then waiting" if width >= 31 else "ranks: work, waiting", width)]
    for rank, row in by_rank:
        own = max(row.get("own", 0.0), 0.0)
        style = "warn" if is_late(late, rank) else "compute"
        work = bar(own / whole, max(room, 0)).rstrip()
        line: Row = ((work, style), ("░" * (room - len(work)), "dim")) if room >= _LEAST_BAR else ()
        more = f"+{late['late_ns'] * 1e-6:.1f}" if late is not None and is_late(late, rank) else ""
        out.append(
            ((f"{rank:>{digits}} ", "text"), *line, (_milliseconds(own), "text"), (more.rjust(extra), "warn"))
        )
    return out


def _milliseconds(us: float) -> str:
    return f"{us / 1e3:.1f}".rjust(_OWN) if us < 1e7 else f"{us / 1e3:,.0f}".rjust(_OWN)


def heat_map(ranks: Ranks, width: int, count: int) -> list[Row]:
    """By how much the ranks work longer than the median, a cell for each rank, host or group of ranks."""
    newest = ranks.newest
    levels = [SHADES[int(char)] if char in "0123456789" else "?" for char in newest.cells]
    size = max(newest.cell_ranks, 1)
    room = max(count - 2, 1)
    digits = len(str(max(newest.first_rank + newest.world - 1, 0)))
    wide = max(width - digits - 1, 1)
    by_host = newest.hosts > 1 and newest.world % newest.hosts == 0
    here = newest.world // newest.hosts if by_host else 0
    if size == 1 and by_host and newest.hosts <= room and here <= wide:
        across = here
    else:
        while len(levels) > wide * room:  # the darkest of neighbours
            levels = [max(levels[index : index + 2], key=SHADES.find) for index in range(0, len(levels), 2)]
            size *= 2
        least = -(-len(levels) // room) if levels else 1
        across = next(
            (many for many in (8, 16, 32, 64, 128) if least <= many <= wide), max(min(least, wide), 1)
        )
    double = 2 * across <= wide
    whole = counted(newest.world, "rank")
    whats = (
        ["a cell each"]
        if size == 1
        else [f"a cell a host of {size}", "a cell a host"]
        if size == here
        else []
    )
    titles = [f"{whole}, {what}" for what in (*whats, f"{size} a cell")]
    out: list[Row] = [rule(next((title for title in titles if cells(title) + 4 <= width), whole), width)]
    for begin in range(0, len(levels), across):
        row: list[tuple[str, str]] = [(f"{newest.first_rank + begin * size:>{digits}} ", "dim")]
        for char in levels[begin : begin + across]:
            style = "warn" if SHADES.find(char) >= _MARKED or char in "▒▓█" else "dim"
            text = char * (2 if double else 1)
            if row[-1][1] == style and len(row) > 1:
                row[-1] = (row[-1][0] + text, style)
            else:
                row.append((text, style))
        out.append(tuple(row))
    least_us, middle, _, most, rank = newest.columns_us.get("own", (0.0, 0.0, 0.0, 0.0, 0))
    spread = f"work {least_us / 1e3:.1f} to {most / 1e3:.1f} ms (r{rank})"
    out.append(((shorten(spread, width), "text"),))
    legend = _LEGEND if cells(_LEGEND) <= width else f"median {middle / 1e3:.1f} ms"
    return [*out, ((shorten(legend, width), "dim"),)][:count]


def longest_text(ranks: Ranks, name: str, mean_ns: float, width: int, decimals: int) -> str:
    """The longest of a phase over the ranks and whose it is, "63.2 r5"; blank if it is about the mean, or varies."""
    most, rank = ranks.longest.get(name, (0.0, None))
    if (
        rank is None
        or finite(most) is None
        or most < 1.05 * mean_ns
        or most - mean_ns < 0.005 * ranks.step_ns
    ):
        return " " * width
    return f"{most * 1e-6:.{decimals}f} r{rank}".rjust(width)
