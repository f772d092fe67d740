"""Several ranks: exchange and skew over time, the slowest ranks, and when which rank was late."""

from __future__ import annotations

from ndd_console.view.ranks import rank_rows, ranks_words, usual_own_us
from ndd_console.view.ranks_page import late_text
from ndd_console.words.blocks import Block, Facts, Table
from ndd_console.words.figures import at_most, ns, share_text
from ndd_engine.diagnose.ranks import milliseconds
from ndd_engine.record.ranks import RanksEvent
from ndd_engine.text import MISSING, counted, number, size

from .late import PREFIX
from .model import Report

ABOUT = (
    "Work is the wall time of a step without waiting for other ranks. Exchange is the shortest wait of any rank in a "
    "step; skew is the mean wait beyond it. Phases exclude waiting; their means, exchange and skew add up to the step."
)


def ranks(report: Report) -> list[Block]:
    """The whole section; [] for a run with one rank."""
    found = report.snapshot.ranks
    if found is None:
        return []
    step = found.step_ns or 1.0
    memory = [
        (label, f"{size(figures[0])} to {size(figures[3])} (rank {number(figures[4])})")
        for name, label in (("rss", "RSS"), ("allocated", "GPU memory"))
        if (figures := found.newest.memory_bytes.get(name))
    ]
    facts = Facts.of(
        ("ranks", ranks_words(report.snapshot)),
        ("step", f"{ns(found.step_ns)} on average of the ranks"),
        ("work", f"{ns(found.own_ns)} ({share_text(found.own_ns / step)})"),
        ("exchange", f"{ns(found.exchange_ns)} ({share_text(found.exchange_ns / step)})"),
        ("hidden exchange", MISSING if found.hidden_ns is None else ns(found.hidden_ns)),
        ("skew", f"{ns(found.skew_ns)} ({share_text(found.skew_ns / step)})"),
        ("late", late_text(found)),
        *memory,
    )
    lines = (
        report.line(PREFIX + "exchange", "exchange", "blue"),
        report.line(PREFIX + "skew", "skew", "orange"),
    )
    over = report.plot("Exchange and skew", "share", *lines, zero=True, note="Share of the wall time.")
    delay = report.line(PREFIX + "late_ns", "work beyond that of the usual rank", "vermillion", 1e-9)
    late = report.plot("Delay of the late rank in a step", "seconds", delay, zero=True)
    return [facts, *over, *late, _phases(report), _slowest(found.newest), _spans(report)]


def _phases(report: Report) -> Table:
    """Means over the ranks and the longest."""
    found = report.snapshot.ranks
    assert found is not None
    rows = []
    for phase in report.snapshot.phases:
        longest, rank = found.longest.get(phase.name, (None, None))
        shown = MISSING if longest is None else ns(longest)
        whose = MISSING if longest is None else "varies" if rank is None else f"rank {number(rank)}"
        if phase.host_ns > 0:
            share = share_text(phase.host_ns / (found.step_ns or 1.0))
            rows.append((phase.name, ns(phase.host_ns), share, shown, whose))
    columns = ("phase", "mean per step", "share", "longest", "of")
    note = f"The most recent {counted(found.windows, 'window')}. {ABOUT}"
    return Table("Phases of all ranks", columns, tuple(rows), frozenset({1, 2, 3}), note, wide=0)


def _slowest(newest: RanksEvent) -> Table:
    """The recorded rows and a summary of all ranks."""
    usual = usual_own_us(newest)
    rows = []
    for rank, row in rank_rows(newest).items():
        later = row.get("own", 0.0) - usual
        figures = [ns(row[name] * 1e3) if name in row else MISSING for name in newest.row_names]
        host = newest.row_hosts.get(str(rank), "")
        rows.append((str(rank), host, f"{later / 1e3:+.1f} ms", *figures))
    for at, word in enumerate(("least", "median", "mean", "most")):
        summary = (newest.columns_us.get(name) for name in newest.row_names)
        rows.append((word, "", "", *(ns(item[at] * 1e3) if item else MISSING for item in summary)))
    columns = ("rank", "host", "later", *newest.row_names)
    note = "The newest window, per step; the rows below the ranks are of all ranks."
    return Table("Slowest ranks", columns, tuple(rows), frozenset(range(2, len(columns))), note)


def _spans(report: Report) -> Table:
    rows = tuple(
        (
            f"{number(span.first_step)} to {number(span.last_step)}", str(span.rank), span.host, span.phase,
            milliseconds(span.most_ns), at_most(span.ceiling),
        )
        for span in report.data.late
    )  # fmt: skip
    columns = ("steps", "rank", "host", "phase", "later by up to", "without it")
    return Table("Late ranks", columns, rows, frozenset({0, 1, 4, 5}))
