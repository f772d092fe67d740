"""Several ranks on the live screen: their number in words, bars or a heat map, and which one is late."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ndd_engine.diagnose.ranks import milliseconds, subject
from ndd_engine.record.across import Ranks
from ndd_engine.record.ranks import RanksEvent
from ndd_engine.record.snapshot import Snapshot
from ndd_engine.text import counted, finite

from .bars import bar
from .rows import cells, foreign, rule, shorten
from .style import Row

STRATEGIES = {"ddp": "DDP", "fsdp2": "FSDP2"}
# With more ranks the screen shows a heat map.
_MOST_BARS = 8
_LEAST_BAR = 4
_OWN = 8  # width of the own time
# The characters of the levels of a heat map, each 2 % of the time of a step without waiting.
SHADES = "·░░▒▒▓▓███"
_MARKED = 2  # from this level on in the colour of a warning
_LEGEND = "░ 2 %  ▒ 6 %  ▓ 10 %  █ 14 % longer"


def ranks_words(snapshot: Snapshot) -> str:
    """ "8 ranks, DDP, 2 hosts", "8 of 16 ranks, DDP, 1 host"; "" for a single one."""
    if snapshot.ranks is not None:
        newest = snapshot.ranks.newest
        seen = counted(newest.world, "rank")
        if newest.launched is not None:
            seen = f"{newest.world:,} of {counted(newest.launched, 'rank')}"
        parts = [seen, strategy_name(newest.strategy), counted(newest.hosts, "host")]
        return ", ".join(part for part in parts if part)
    table = snapshot.run.config.get("parallel") if snapshot.run is not None else None
    world = table.get("ranks") if isinstance(table, dict) else None
    if not isinstance(table, dict) or not isinstance(world, int) or world < 2:
        return ""
    return ", ".join(filter(None, (counted(world, "rank"), strategy_name(table.get("strategy")))))


def strategy_name(strategy: object) -> str:
    """ "DDP"."""
    return STRATEGIES.get(str(strategy), foreign(strategy or ""))


def late_words(snapshot: Snapshot) -> str:
    """ "2 ranks, slowest 1 (+7.9 ms data_wait)", "8 ranks, none late"; "" for a single one."""
    ranks = snapshot.ranks
    if ranks is None:
        return ""
    text = counted(ranks.newest.world, "rank")
    if (late := ranks.late) is None:
        return f"{text}, none late"
    slowest = str(late["rank"]) if int(late.get("count", 1)) == 1 else subject(late)[0]
    return f"{text}, slowest {slowest} (+{milliseconds(late['late_ns'])} {foreign(late['phase'])})"


def rank_rows(event: RanksEvent) -> dict[int, dict[str, float]]:
    """The recorded rows, slowest first: rank -> figures in microseconds per step by name."""
    rows = {
        int(rank): dict(zip(event.row_names, figures, strict=False))
        for rank, figures in event.rows_us.items()
        if rank.isdecimal() and len(rank) < 10
    }
    return dict(sorted(rows.items(), key=lambda item: -item[1].get("own", 0.0)))


def usual_own_us(event: RanksEvent) -> float:
    """The median own time of the ranks, microseconds per step; of two ranks, the shorter one."""
    least, middle = event.columns_us.get("own", (0.0, 0.0))[:2]
    return float(least if event.world == 2 else middle)


def is_late(late: Mapping[str, Any] | None, rank: int) -> bool:
    """Whether it is the late rank."""
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
    found = sorted(rank_rows(newest).items())
    digits = max((len(str(rank)) for rank, _ in found), default=1)
    whole = max((row.get("own", 0.0) + row.get("wait", 0.0) for _, row in found), default=0.0) or 1.0
    extra = 7 if late is not None else 0
    room = width - digits - 1 - _OWN - extra
    out: list[Row] = [rule("ranks: work, then waiting" if width >= 31 else "ranks: work, waiting", width)]
    for rank, row in found:
        own = max(row.get("own", 0.0), 0.0)
        style = "warn" if is_late(late, rank) else "compute"
        work = bar(own / whole, max(room, 0)).rstrip()
        line: Row = ((work, style), ("░" * (room - len(work)), "dim")) if room >= _LEAST_BAR else ()
        more = f"+{late['late_ns'] * 1e-6:.1f}" if late is not None and is_late(late, rank) else ""
        out.append(((f"{rank:>{digits}} ", "text"), *line, (_own(own), "text"), (more.rjust(extra), "warn")))
    return out


def _own(us: float) -> str:
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
