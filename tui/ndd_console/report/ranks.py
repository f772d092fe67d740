"""Several ranks: exchange and skew over time, the slowest ranks, and which ranks were stragglers."""

from __future__ import annotations

from ndd_console.words.blocks import Block, Table
from ndd_console.words.figures import at_most, ns, share_text
from ndd_console.words.ranks import ranks_facts, slowest
from ndd_engine.diagnose.ranks import milliseconds
from ndd_engine.text import MISSING, counted, number

from .late import PREFIX
from .model import Report


def ranks(report: Report) -> list[Block]:
    """The whole section; [] for a run with one rank."""
    latest = report.snapshot.ranks
    if latest is None:
        return []
    facts = ranks_facts(report.snapshot, latest)
    lines = (
        report.line(PREFIX + "exchange", "exchange", "blue"),
        report.line(PREFIX + "skew", "skew", "orange"),
    )
    over = report.plot("Exchange and skew", "share", *lines, zero=True, note="Share of the wall time.")
    delay = report.line(PREFIX + "late_ns", "work beyond that of the median rank", "vermillion", 1e-9)
    late = report.plot("Delay of the straggler in a step", "seconds", delay, zero=True)
    return [facts, *over, *late, _phases(report), slowest(latest.newest), _spans(report)]


def _phases(report: Report) -> Table:
    """Means over the ranks and the longest."""
    latest = report.snapshot.ranks
    assert latest is not None
    rows = []
    for phase in report.snapshot.phases:
        longest, rank = latest.longest.get(phase.name, (None, None))
        shown = MISSING if longest is None else ns(longest)
        whose = MISSING if longest is None else "varies" if rank is None else f"rank {number(rank)}"
        if phase.host_ns > 0:
            share = share_text(phase.host_ns / (latest.step_ns or 1.0))
            rows.append((phase.name, ns(phase.host_ns), share, shown, whose))
    columns = ("phase", "mean per step", "share", "longest", "of")
    note = f"The most recent {counted(latest.windows, 'window')}."
    return Table("Phases of all ranks", columns, tuple(rows), frozenset({1, 2, 3}), note, wide=0)


def _spans(report: Report) -> Table:
    rows = tuple(
        (
            f"{number(span.first_step)} to {number(span.last_step)}", str(span.rank), span.host, span.phase,
            milliseconds(span.most_ns), at_most(span.ceiling),
        )
        for span in report.data.late
    )  # fmt: skip
    columns = ("steps", "rank", "host", "phase", "later by up to", "without it")
    return Table("Stragglers", columns, rows, frozenset({0, 1, 4, 5}))
