"""Figures over the recent windows of all ranks: the step as a mean over the ranks, and who takes longest.

Means over the ranks add up to the step; medians do not. All figures are nanoseconds per step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .ranks import ASIDES, RanksEvent

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
