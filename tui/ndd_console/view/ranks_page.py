"""The page of the ranks: the slowest ones with their phases, a summary of all, memory and a heat map."""

from __future__ import annotations

from collections.abc import Sequence

from ndd_console.words.figures import at_most, percent
from ndd_engine.diagnose.ranks import milliseconds, subject
from ndd_engine.record.across import Ranks
from ndd_engine.record.snapshot import Snapshot
from ndd_engine.text import MISSING, counted, number, size

from .ranks import heat_map, is_late, rank_rows, ranks_words, usual_own_us
from .rows import BLANK, cells, column, foreign, labelled, paragraph, rule, shorten
from .style import Row

_NONE = "This run has one rank."
_LABEL = 10
_FIGURE = 10
_LEAST_HOST = 6
_HEAT = 12  # rows of the heat map
_WORDS = {"least": 0, "median": 1, "mean": 2, "most": 3}
# Shown before the phases.
_FIRST = ("own", "wait", "cpu")


def ranks_lines(snapshot: Snapshot, width: int) -> list[Row]:
    """All lines of the page."""
    ranks = snapshot.ranks
    if ranks is None:
        return paragraph(_NONE, width, "dim")
    title = f"{ranks_words(snapshot)}, at step {number(ranks.newest.step)}"
    lines = [rule(title, width), *_summary(ranks, width), BLANK, *_table(ranks, width)]
    if ranks.newest.cells:
        lines += [BLANK, *heat_map(ranks, width, _HEAT)]
    return lines


def _summary(ranks: Ranks, width: int) -> list[Row]:
    step = ranks.step_ns or 1.0
    parts = [
        f"work {milliseconds(ranks.own_ns)}",
        f"exchange {milliseconds(ranks.exchange_ns)} ({percent(ranks.exchange_ns / step)})",
        f"skew {milliseconds(ranks.skew_ns)} ({percent(ranks.skew_ns / step)})",
    ]
    hidden = MISSING if ranks.hidden_ns is None else milliseconds(ranks.hidden_ns)
    texts = [
        ("step", f"{milliseconds(ranks.step_ns)} = {' + '.join(parts)}; hidden exchange {hidden}"),
        ("late", late_text(ranks)),
    ]
    for name, label in (("rss", "RSS"), ("allocated", "GPU memory")):
        if name in ranks.newest.memory_bytes:
            least, _, _, most, rank = ranks.newest.memory_bytes[name]
            texts.append((label, f"{size(least)} to {size(most)} (rank {number(rank)})"))
    return [row for label, text in texts for row in labelled(label, text, width, _LABEL + 2)]


def late_text(ranks: Ranks) -> str:
    """The late rank with its host, phase, code and ceiling, in one sentence."""
    late = ranks.late
    if late is None:
        return "no rank is late"
    who, several = subject(late)
    host = f" on {late['host']}" if late.get("host") and not late.get("same_host") else ""
    text = (
        f"{who}{host}: +{milliseconds(late['late_ns'])} a step, +{milliseconds(late['phase_ns'])} in {late['phase']}, "
        f"since step {number(late.get('since_step'))}; without {'them' if several else 'it'} {at_most(late['ceiling'])}"
    )
    return text + (f"; {late['where']}" if late.get("where") else "")


def _table(ranks: Ranks, width: int) -> list[Row]:
    newest = ranks.newest
    rows = rank_rows(newest)
    names = [*(name for name in _FIRST if name in newest.row_names)]
    parts = [name for name in newest.row_names if name not in _FIRST and name in newest.columns_us]
    largest = sorted(parts, key=lambda name: -newest.columns_us[name][2])
    first = max(len("median"), *(len(str(rank)) for rank in rows), 0) + 1
    hosts = {rank: foreign(newest.row_hosts.get(str(rank), "")) for rank in rows}
    longest = max((cells(host) for host in hosts.values()), default=0)
    # Hosts may take a quarter of the width; columns that do not fit are the smallest phases.
    host = min(max(longest, _LEAST_HOST) + 2, max(width // 4, _LEAST_HOST)) if longest else 0
    room = (width - first - host) // _FIGURE - 1
    shown = set(largest[: max(room - len(names), 0)])
    names = [*names, *(name for name in parts if name in shown)][: max(room, 1)]
    head = "rank".ljust(first) + column("host", host) * bool(host)
    head += "".join(title.rjust(_FIGURE) for title in (names[0], "later", *names[1:])) if names else ""
    about = shorten("newest window: milliseconds a step, slowest rank first", width)
    out: list[Row] = [((about, "dim"),), ((head, "bold"),)]
    usual = usual_own_us(newest)
    for rank, row in rows.items():
        late = row.get("own", 0.0) - usual
        figures = [row.get(name) for name in names]
        style = "warn" if is_late(ranks.late, rank) else "text"
        lead = str(rank).ljust(first) + column(hosts[rank], host) * bool(host)
        out.append(((lead + _figures([figures[0] if figures else None, late, *figures[1:]]), style),))
    hidden = newest.world - len(rows)
    if hidden > 0:
        text = f"and {counted(hidden, 'rank')} with less work, not recorded one by one"
        out.append(((shorten(text, width), "dim"),))
    for word, at in _WORDS.items():
        summary = [newest.columns_us[name][at] if name in newest.columns_us else None for name in names]
        values: list[float | None] = [*summary[:1], None, *summary[1:]]
        out.append(((word.ljust(first) + " " * host + _figures(values), "dim"),))
    return out


def _figures(values: Sequence[float | None]) -> str:
    """Microseconds as milliseconds; blank where there is none."""
    return "".join(("" if value is None else _ms(value)).rjust(_FIGURE) for value in values)


def _ms(us: float) -> str:
    return f"{us / 1e3:.2f}" if abs(us) < 1e4 else f"{us / 1e3:,.1f}"
