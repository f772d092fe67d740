"""What all ranks of a run with several did in the same steps: an event, gathered by rank 0."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from .event import Count, Event, Figure, Late, Summary

# Phases that are not part of a step.
# Phases outside of steps: how often they run is a setting, so they do not count towards the speed.
ASIDES = ("evaluate", "checkpoint")


@dataclass(frozen=True, slots=True)
class RanksEvent(Event):
    """What all ranks did in the same steps, gathered by rank 0.

    step: optimizer steps done at the end. steps: number of steps that the figures are of; in a script those that every
    rank timed by phase. world, hosts: numbers of ranks and of hosts. strategy: "ddp", "fsdp2", or "" if it is unknown.
    wall_ns: mean wall time of the ranks. exchange_ns: sum over the steps of the least wait of any rank, which is what
    exchanging data takes; skew_ns: mean wait beyond that, which is waiting for slower ranks. hidden_ns: mean time of
    exchange during computation, or null. critical_ns: sum over the steps of the longest own time of any rank.

    columns_us: {name: [least, median, mean, most, rank of the most]} over the ranks, in microseconds per step, or in
    all if the window has no steps. Names are the phases without their waiting for other ranks, "wait" (that waiting),
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
