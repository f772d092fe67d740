"""The phases of a run with several ranks in the terms of one with a single rank."""

from __future__ import annotations

from collections.abc import Sequence

from .across import EXCHANGE, SHARED, SKEW, Ranks
from .derive import share_error
from .events import PHASES, RanksEvent, WindowEvent
from .ranks import ASIDES
from .snapshot import PhaseShare


def shares_across(
    shares: Sequence[PhaseShare],
    windows: Sequence[WindowEvent],
    ranks: Ranks,
    events: Sequence[RanksEvent],
) -> tuple[PhaseShare, ...]:
    """The phases of a run with several ranks: means over the ranks, which add up to the step.

    shares: those of rank 0, whose phases include its waiting for others. Percentiles are not known over all ranks.
    events: of the ranks. Exchange and skew follow the phases that compute.
    """
    wall_ns = sum(window.wall_ns for window in windows) / (sum(window.steps for window in windows) or 1)
    mine = {share.name: share for share in shares}
    means = {**ranks.phases, EXCHANGE: ranks.exchange_ns, SKEW: ranks.skew_ns}
    at = PHASES.index("log")
    found = []
    for name in (*PHASES[:at], *SHARED, *PHASES[at:]):
        if name in ASIDES:
            found += [mine[name]] if name in mine else []
        elif name in means:
            found.append(
                PhaseShare(
                    name=name,
                    host_ns=means[name],
                    share=means[name] / (wall_ns or ranks.step_ns or 1.0),
                    p50_ns=None,
                    p95_ns=None,
                    max_ns=None,
                    device_ns=mine[name].device_ns if name in mine else None,
                    share_error=share_error(_parts_across(name, events)),
                )
            )
    return tuple(found)


def _parts_across(name: str, events: Sequence[RanksEvent]) -> list[tuple[float, float]]:
    """The same as means over the ranks, which include exchange and skew."""
    found = []
    for event in events:
        mean_us = event.columns_us[name][2] if name in event.columns_us else 0.0
        spent = {EXCHANGE: event.exchange_ns, SKEW: event.skew_ns}.get(name, mean_us * 1e3 * event.steps)
        if event.steps and event.wall_ns:
            found.append((float(spent), float(event.wall_ns)))
    return found
