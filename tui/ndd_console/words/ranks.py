"""The ranks of a run in words: how many there are, the parts of a step, and which of them the others wait for."""

from __future__ import annotations

from ndd_engine.diagnose.process_rules import milliseconds, subject
from ndd_engine.record.event import Ranks, RanksEvent
from ndd_engine.record.figures import setting
from ndd_engine.record.snapshot import Snapshot
from ndd_engine.text import MISSING, counted, foreign, number, percent, size

from .blocks import Block, NamedValues, Table, Text, at_most, ns

_STRATEGIES = {"ddp": "DDP", "fsdp2": "FSDP2"}
_ABOUT = (
    "Work is the wall time of a step without waiting for other ranks. Exchange is the shortest wait of any rank in a "
    "step; skew is the mean wait beyond it. Phases exclude waiting; their means, exchange and skew add up to the step."
)
# Columns of the table before the phases, with their headings.
_FIRST = {"own": "work", "wait": "wait", "cpu": "cpu"}


def ranks_words(snapshot: Snapshot) -> str:
    """ "8 ranks, DDP, 2 hosts", "8 of 16 ranks, DDP, 1 host"; "" for a single one."""
    if snapshot.ranks is not None:
        newest = snapshot.ranks.newest
        seen = counted(newest.world, "rank")
        if newest.launched is not None:
            seen = f"{newest.world:,} of {counted(newest.launched, 'rank')}"
        strategy, hosts = newest.strategy, counted(newest.hosts, "host")
    else:
        world, strategy = (setting(snapshot.run, "parallel", key) for key in ("ranks", "strategy"))
        if not isinstance(world, int) or world < 2:
            return ""
        seen, hosts = counted(world, "rank"), ""
    parts = (seen, _STRATEGIES.get(str(strategy), foreign(strategy or "")), hosts)
    return ", ".join(part for part in parts if part)


def late_words(snapshot: Snapshot) -> str:
    """ "2 ranks, slowest 1 (+7.9 ms data_wait)", "8 ranks, no straggler"; "" for a single one."""
    ranks = snapshot.ranks
    if ranks is None:
        return ""
    text = counted(ranks.newest.world, "rank")
    if (late := ranks.late) is None:
        return f"{text}, no straggler"
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


def late_text(ranks: Ranks) -> str:
    """The straggler with its host, phase, code and ceiling, in one sentence."""
    late = ranks.late
    if late is None:
        return "none"
    who, several = subject(late)
    host = f" on {late['host']}" if late.get("host") and not late.get("same_host") else ""
    text = (
        f"{who}{host}: +{milliseconds(late['late_ns'])} a step, +{milliseconds(late['phase_ns'])} in {late['phase']}, "
        f"since step {number(late.get('since_step'))}; without {'them' if several else 'it'} {at_most(late['ceiling'])}"
    )
    return text + (f"; {late['where']}" if late.get("where") else "")


def ranks_blocks(snapshot: Snapshot) -> list[Block]:
    """The parts of a step, and the slowest ranks with their phases."""
    ranks = snapshot.ranks
    if ranks is None:
        return [Text("This run has one rank.", "note")]
    return [ranks_facts(snapshot, ranks), slowest(ranks.newest)]


def ranks_facts(snapshot: Snapshot, ranks: Ranks) -> NamedValues:
    """The parts of a step, the straggler, and the memory of the ranks."""
    step, hidden = ranks.step_ns or 1.0, f"{ns(ranks.hidden_ns)} of exchange, hidden by work"
    parts = (
        (label, f"{ns(value)} ({percent(value / step)})")
        for label, value in (("work", ranks.own_ns), ("exchange", ranks.exchange_ns), ("skew", ranks.skew_ns))
    )
    memory = (
        (label, f"{size(figures[0])} to {size(figures[3])} (rank {number(figures[4])})")
        for name, label in (("rss", "RSS"), ("allocated", "GPU memory"))
        if (figures := ranks.newest.memory_bytes.get(name))
    )
    return NamedValues.of(
        ("ranks", f"{ranks_words(snapshot)}, at step {number(ranks.newest.step)}"),
        ("step", f"{ns(ranks.step_ns)} on average of the ranks"),
        *parts,
        ("overlapped", MISSING if ranks.hidden_ns is None else hidden),
        ("straggler", late_text(ranks)),
        *memory,
        warn=frozenset({"straggler"} if ranks.late is not None else ()),
    )


def slowest(newest: RanksEvent) -> Table:
    """The recorded rows, slowest first, and a summary of all ranks; the longest phases come first."""
    first = [name for name in _FIRST if name in newest.row_names]
    phases = [name for name in newest.row_names if name not in _FIRST]
    means = {name: newest.columns_us[name][2] if name in newest.columns_us else 0.0 for name in phases}
    names = [*first, *sorted(phases, key=lambda name: -means[name])]
    least, median = newest.columns_us.get("own", (0.0, 0.0))[:2]
    usual = least if newest.world == 2 else median
    hosts = ("host",) if newest.row_hosts else ()
    rows = []
    ranks = rank_rows(newest)
    for rank, row in ranks.items():
        later = row.get("own", 0.0) - usual
        figures = [ns(row[name] * 1e3) if name in row else MISSING for name in names]
        host = (newest.row_hosts.get(str(rank), ""),) if hosts else ()
        rows.append((str(rank), *host, f"{later / 1e3:+.1f} ms", *figures))
    for at, word in enumerate(("least", "median", "mean", "most")):
        summary = (newest.columns_us.get(name) for name in names)
        cells = (ns(figures[at] * 1e3) if figures else MISSING for figures in summary)
        rows.append((word, *("" for _ in hosts), "", *cells))
    columns = ("rank", *hosts, "later", *(_FIRST.get(name, name) for name in names))
    note = f"The newest window, per step; the rows below the ranks are of all {counted(newest.world, 'rank')}. {_ABOUT}"
    right = frozenset(range(1 + len(hosts), len(columns)))
    late = frozenset(index for index, rank in enumerate(ranks) if newest.late and newest.late["rank"] == rank)
    return Table("Slowest ranks", columns, tuple(rows), right, note, wide=len(hosts), warn=late)


def phases_table(snapshot: Snapshot, ranks: Ranks) -> Table:
    """The phases of a step: means over the ranks, and the longest."""
    rows = []
    for phase in snapshot.phases:
        longest, rank = ranks.longest.get(phase.name, (None, None))
        whose = MISSING if longest is None else "varies" if rank is None else f"rank {number(rank)}"
        if phase.host_ns > 0:
            share = percent(phase.host_ns / (ranks.step_ns or 1.0))
            rows.append((phase.name, ns(phase.host_ns), share, ns(longest), whose))
    columns = ("phase", "mean per step", "share", "longest", "of")
    note = f"The most recent {counted(ranks.windows, 'window')}."
    return Table("Phases of all ranks", columns, tuple(rows), frozenset({1, 2, 3}), note, wide=0)
