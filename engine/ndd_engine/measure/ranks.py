"""Folds the figures of all ranks in the same steps to one event: phases, exchange, skew, and the straggler.

Uses neither torch nor numpy: rank 0 does this beside its training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ndd_engine.record.event import Summary
from ndd_engine.record.events import PHASES
from ndd_engine.record.ranks import ASIDES, RanksEvent

from .late import Column, Judge, Judged

# One rank's figures of a window, in this order. Phases exclude their waiting for other ranks, which is "wait"; "hidden"
# is exchange during computation; "cpu" is processor time; all of these and "wall" are nanoseconds. "rss" and
# "allocated" are bytes at the end of the window. "hidden", "cpu", "rss" and "allocated" are negative if unknown.
FIGURES = (
    *PHASES, "wait", "hidden", "wall", "cpu", "steps", "loss_sum", "loss_count", "rss", "allocated",
)  # fmt: skip

# Ranks whose rows are recorded.
KEPT_ROWS = 8
# Phases of at least this share of the wall time on some rank are part of these rows.
LEAST_PART = 0.005
# Longer names of hosts are cut, so that a window stays small.
HOST_CHARS = 32
# The cells of the heat map: one for each rank up to RANK_CELLS ranks, else one for each host or several.
RANK_CELLS = 128
MOST_CELLS = 256
# One level of the heat map, as a share of a step.
LEVEL = 0.02
_AT = {name: index for index, name in enumerate(FIGURES)}


class RanksFold:
    """Takes windows of all ranks and returns the event of each. hosts: the name of the host of each rank."""

    def __init__(self, strategy: str, hosts: Sequence[str]) -> None:
        self._strategy = strategy
        self._hosts = [host.partition(".")[0][:HOST_CHARS] for host in hosts]
        self._judge = Judge(self._hosts)

    def window(
        self,
        step: int,
        rows: Sequence[Sequence[float]],
        least_wait_ns: float,
        most_own_ns: float,
        places: Callable[[int], Mapping[str, str]] = lambda _rank: {},
    ) -> RanksEvent:
        """The event of a window.

        step: optimizer steps done. rows: FIGURES of each rank, over the same steps. least_wait_ns, most_own_ns: sums
        over the steps of the least wait and of the longest own time of any rank; an own time is wall time without
        waiting, evaluations and checkpoints. places: returns for a rank, by
        phase, the file, line and function that takes most of it, where they are known.
        """
        columns = dict(zip(FIGURES, zip(*rows, strict=True), strict=True))
        steps = int(columns["steps"][0])
        world = len(rows)
        aside = [sum(row[_AT[name]] for name in ASIDES) for row in rows]
        own = [row[_AT["wall"]] - row[_AT["wait"]] - more for row, more in zip(rows, aside, strict=True)]
        if steps > 0:
            self._judge.add(self._judged(step, steps, columns, own, aside))
        late = self._judge.late(places)

        shown = {name: columns[name] for name in PHASES if any(columns[name])}
        shown |= {"wait": columns["wait"], "own": tuple(own), "cpu": columns["cpu"]}
        each_us = {name: [value / max(steps, 1) / 1e3 for value in column] for name, column in shown.items()}
        waits = columns["wait"]
        exchange = max(min(least_wait_ns, *waits), 0.0) if world > 1 else 0.0
        slowest = sorted(range(world), key=own.__getitem__, reverse=True)[:KEPT_ROWS]
        if late is not None and late["rank"] not in slowest:
            slowest[-1] = late["rank"]
        floor = LEAST_PART * max(each_us["own"])
        parts = [name for name in PHASES if name in each_us and max(each_us[name]) >= floor]
        names = ["own", "wait", *(["cpu"] if min(columns["cpu"]) >= 0 else []), *parts]
        cells, cell_ranks = self._cells(own, steps)
        return RanksEvent(
            step=step,
            steps=steps,
            world=world,
            hosts=len(set(self._hosts)),
            strategy=self._strategy,
            wall_ns=round(sum(columns["wall"]) / world),
            exchange_ns=round(exchange),
            skew_ns=round(sum(waits) / world - exchange),
            critical_ns=round(max(most_own_ns, *own, 0.0)),
            hidden_ns=_mean(columns["hidden"]),
            columns_us={
                name: summary(column, _short) for name, column in each_us.items() if min(shown[name]) >= 0
            },
            memory_bytes={
                name: summary(columns[name], round)
                for name in ("rss", "allocated")
                if min(columns[name]) >= 0 and max(columns[name]) > 0
            },
            row_names=names,
            rows_us={str(rank): [_short(each_us[name][rank]) for name in names] for rank in slowest},
            row_hosts={str(rank): self._hosts[rank] for rank in slowest} if len(set(self._hosts)) > 1 else {},
            cells=cells,
            cell_ranks=cell_ranks,
            late=late,
        )

    def _judged(
        self,
        step: int,
        steps: int,
        columns: Mapping[str, Sequence[float]],
        own: Sequence[float],
        aside: Sequence[float],
    ) -> Judged:
        def each(values: Sequence[float]) -> Column:
            return Column([value / steps for value in values])

        phases = {name: each(columns[name]) for name in PHASES if name not in ASIDES}
        wall = (sum(columns["wall"]) - sum(aside)) / steps / len(own)
        return Judged(step, each(own), phases, wall)

    def _cells(self, own: Sequence[float], steps: int) -> tuple[str, int]:
        """The heat map and the number of ranks in a cell; ("", 0) if every rank has a row."""
        world = len(own)
        if world <= KEPT_ROWS:
            return "", 0
        hosts = len(set(self._hosts))
        size = 1 if world <= RANK_CELLS else max(world // hosts, 1) if hosts > 1 else 8
        while -(-world // size) > MOST_CELLS:
            size *= 2
        excess = self._judge.excess
        if not excess:
            middle = sorted(own)[world // 2]
            excess = [(value - middle) / max(steps, 1) for value in own]
        unit = LEVEL * max(sum(own) / world / max(steps, 1), 1.0)
        groups = (excess[begin : begin + size] for begin in range(0, world, size))
        return "".join(str(min(max(int(max(group) / unit), 0), 9)) for group in groups), size


def summary(values: Sequence[float], rounded: Callable[[float], float]) -> Summary:
    """[least, median, mean, most, rank of the most] of the values of all ranks."""
    order = sorted(values)
    count = len(order)
    middle = (order[(count - 1) // 2] + order[count // 2]) / 2
    least, median, mean, most = map(rounded, (order[0], middle, sum(order) / count, order[-1]))
    return least, median, mean, most, values.index(order[-1])


def _short(value: float) -> float:
    """Rounded to about four digits, for a short record."""
    return round(value) if abs(value) >= 1000 else round(value, 1)


def _mean(values: Sequence[float]) -> int | None:
    """None if it is unknown for a rank."""
    return None if min(values) < 0 else round(sum(values) / len(values))
