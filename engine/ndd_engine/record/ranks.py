"""What the ranks of a run with several did: each by itself, and all of them in the same steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from .event import Count, Event, Figure, Late, Summary

# Phases outside of steps: how often they run is a setting, so they do not count towards the speed.
ASIDES = ("evaluate", "checkpoint")


@dataclass(frozen=True, slots=True)
class RankEvent(Event):
    """What one rank did in the steps of a window; from these the ranks are compared. In the record of a rank.

    step: optimizer steps done at the end. begin: steps before the window. numbers: the steps that were timed, counted
    from begin. own_ns: wall time of each of these without waiting for other ranks, evaluations and checkpoints.
    wait_ns: time in which they waited for other ranks. phases_ns: {phase: own time of these steps}.
    cpu_ns: processor time of these steps, or null.
    hidden_ns: exchange during the computation of one step, or null. rss_bytes: resident memory of the process, or null.
    allocated_bytes: GPU memory allocated by torch, or null.
    """

    type: ClassVar[str] = "rank"
    step: Count
    begin: Count
    numbers: list[Count]
    own_ns: list[Count]
    wait_ns: list[Count]
    phases_ns: dict[str, Count]
    cpu_ns: Count | None = None
    hidden_ns: Count | None = None
    rss_bytes: Count | None = None
    allocated_bytes: Count | None = None

    @property
    def wall_ns(self) -> int:
        """Wall time of the timed steps."""
        return sum(self.own_ns) + sum(self.wait_ns)


@dataclass(frozen=True, slots=True)
class RanksEvent(Event):
    """What all ranks did in the same steps, compared by rank 0 or by the console that observes a script.

    step: optimizer steps done at the end. steps: number of steps that the figures are of, which every rank timed.
    world, hosts: numbers of ranks and of hosts. strategy: "ddp", "fsdp2", or "" if it is unknown.
    wall_ns: mean wall time of the ranks. exchange_ns: sum over the steps of the least wait of any rank, which is what
    exchanging data takes; skew_ns: mean wait beyond that, which is waiting for slower ranks. hidden_ns: mean time of
    exchange during computation, or null. critical_ns: sum over the steps of the longest own time of any rank.

    columns_us: {name: [least, median, mean, most, rank of the most]} over the ranks, in microseconds per step.
    Names are the phases without their waiting for other ranks, "wait" (that waiting),
    "own" (wall time without "wait", evaluations and checkpoints) and "cpu" (processor time). memory_bytes: the same for
    "rss" and "allocated". rows_us: {rank: figures} of up to eight ranks with the longest own time, in microseconds per
    step; row_names: what the figures are: "own", "wait", "cpu" if it is known, and the larger phases. row_hosts:
    {rank: host} of these ranks, {} on one host.

    cells: one digit for every group of consecutive ranks: by how much the longest own time among them exceeds the
    median of all, in units of 2 % of it, at most 9; "" if rows_us has all ranks. cell_ranks: number of ranks of a
    group. late: the straggler, or null.

    launched: number of ranks that were launched if only `world` of them are observed, or null. first_rank: number of
    the first one that is observed.
    """

    type: ClassVar[str] = "ranks"
    step: Count
    steps: Count
    world: Count
    hosts: Count
    strategy: str
    wall_ns: Count
    exchange_ns: Count
    skew_ns: Figure
    critical_ns: Count
    columns_us: dict[str, Summary]
    rows_us: dict[str, list[Figure]]
    row_names: list[str]
    hidden_ns: Count | None = None
    memory_bytes: dict[str, Summary] = field(default_factory=dict)
    row_hosts: dict[str, str] = field(default_factory=dict)
    cells: str = ""
    cell_ranks: Count = 0
    late: Late | None = None
    launched: Count | None = None
    first_rank: Count = 0
