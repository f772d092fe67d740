"""What the ranks of a run with several did: each by itself, all in the same steps, and over the recent windows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

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


# What ranks spend on each other; both are part of a step like a phase.
SHARED = (EXCHANGE := "exchange", SKEW := "skew")
# A rank counts as the longest in something if it is in this part of the windows.
MOSTLY = 0.7


@dataclass(frozen=True, slots=True)
class Ranks:
    """All ranks over the recent windows.

    newest: the event of the newest window with steps. windows: number of windows. phases: mean over the ranks by phase;
    those outside ASIDES and exchange_ns and skew_ns add up to step_ns. longest: phase, "own" or "wait" -> (nanoseconds,
    rank), the rank None if it is another one each time. hidden_ns: exchange during computation, None if unknown.
    cpu_ns: mean processor time, None if unknown. alternating_ns: the part of the step by which the slowest rank of each
    step is slower than a rank that is the slowest most of the time, or than the mean if there is no such rank.
    """

    newest: RanksEvent
    windows: int
    step_ns: float
    phases: Mapping[str, float]
    exchange_ns: float
    skew_ns: float
    hidden_ns: float | None
    cpu_ns: float | None
    alternating_ns: float
    longest: Mapping[str, tuple[float, int | None]] = field(default_factory=dict)

    @property
    def late(self) -> Mapping[str, Any] | None:
        """The rank that holds up the others, see record.event.Late."""
        return self.newest.late

    @property
    def own_ns(self) -> float:
        """Mean time of a step without waiting."""
        return self.step_ns - self.exchange_ns - self.skew_ns


def across(events: Sequence[RanksEvent]) -> Ranks | None:
    """The figures of these windows; None without one with steps, or of a single rank."""
    stepped = [event for event in events if event.steps and event.world > 1]
    if not stepped:
        return None
    steps = sum(event.steps for event in stepped)
    phases: dict[str, float] = {}
    longest: dict[str, float] = {}
    who: dict[str, Counter[int]] = {}
    for event in stepped:
        for name, (_, _, mean, most, rank) in event.columns_us.items():
            phases[name] = phases.get(name, 0.0) + mean * 1e3 * event.steps / steps
            longest[name] = longest.get(name, 0.0) + most * 1e3 * event.steps / steps
            who.setdefault(name, Counter())[int(rank)] += 1
    own = phases.pop("own", 0.0)
    leader = _mostly(who.get("own", Counter()), len(stepped))
    slowest = own if leader is None else longest.get("own", own)
    phases.pop("wait", None)
    cpu = phases.pop("cpu", None)
    hidden = [event.hidden_ns for event in stepped if event.hidden_ns is not None]
    exchange = sum(event.exchange_ns for event in stepped) / steps
    skew = sum(event.skew_ns for event in stepped) / steps
    return Ranks(
        newest=stepped[-1],
        windows=len(stepped),
        step_ns=sum(ns for name, ns in phases.items() if name not in ASIDES) + exchange + skew,
        phases=phases,
        exchange_ns=exchange,
        skew_ns=skew,
        hidden_ns=sum(hidden) / steps if len(hidden) == len(stepped) else None,
        cpu_ns=cpu if all("cpu" in event.columns_us for event in stepped) else None,
        alternating_ns=max(sum(event.critical_ns for event in stepped) / steps - slowest, 0.0),
        longest={name: (ns, _mostly(who[name], len(stepped))) for name, ns in longest.items()},
    )


def ranks_figures(ranks: Ranks) -> dict[str, Any]:
    """The figures of all ranks as JSON; units are in the names, null is unknown. Times are per step."""
    newest = ranks.newest
    return {
        "world": newest.world,
        "launched": newest.launched,
        "first_rank": newest.first_rank,
        "hosts": newest.hosts,
        "strategy": newest.strategy or None,
        "step_s": ranks.step_ns * 1e-9,
        "work_s": ranks.own_ns * 1e-9,
        "exchange_s": ranks.exchange_ns * 1e-9,
        "hidden_exchange_s": None if ranks.hidden_ns is None else ranks.hidden_ns * 1e-9,
        "skew_s": ranks.skew_ns * 1e-9,
        "alternating_s": ranks.alternating_ns * 1e-9,
        "cpu_s": None if ranks.cpu_ns is None else ranks.cpu_ns * 1e-9,
        "phases_s": {name: value * 1e-9 for name, value in ranks.phases.items()},
        "longest": {
            name: {"seconds": value * 1e-9, "rank": rank} for name, (value, rank) in ranks.longest.items()
        },
        "late": ranks.late,
        "newest": {
            "step": newest.step,
            "columns_us": newest.columns_us,
            "memory_bytes": newest.memory_bytes,
            "row_names": newest.row_names,
            "rows_us": newest.rows_us,
            "row_hosts": newest.row_hosts,
            "cells": newest.cells,
            "cell_ranks": newest.cell_ranks,
        },
    }


def brief(event: RanksEvent) -> RanksEvent:
    """Without what only the newest window is shown of, so that a state stays small."""
    return replace(event, rows_us={}, row_names=[], row_hosts={}, cells="", cell_ranks=0, memory_bytes={})


def _mostly(ranks: Counter[int], windows: int) -> int | None:
    rank, count = next(iter(ranks.most_common(1)), (None, 0))
    return rank if count >= MOSTLY * windows else None
