"""What a report keeps of the windows of all ranks: shares over time, and when which rank was late."""

from __future__ import annotations

from typing import NamedTuple

from ndd_engine.record.ranks import RanksEvent

# Of the names of the curves.
PREFIX = "ranks "


class LateSpan(NamedTuple):
    """Steps in which a rank was late."""

    rank: int
    phase: str
    host: str
    first_step: int
    last_step: int
    most_ns: float
    ceiling: float


def shares(event: RanksEvent) -> dict[str, float]:
    """Exchange and skew as shares of the wall time of a window, and the delay of the late rank in nanoseconds."""
    if not event.steps or not event.wall_ns:
        return {}
    late = {"late_ns": event.late["late_ns"]} if event.late is not None else {}
    return {"exchange": event.exchange_ns / event.wall_ns, "skew": event.skew_ns / event.wall_ns, **late}


def extended(span: LateSpan | None, event: RanksEvent) -> LateSpan | None:
    """The span of the same late rank with this window, a new one, or None if no rank is late."""
    late = event.late
    if late is None:
        return None
    if span is not None and span.rank == late["rank"] and span.phase == late["phase"]:
        return span._replace(
            last_step=event.step,
            most_ns=max(span.most_ns, late["late_ns"]),
            ceiling=max(span.ceiling, late["ceiling"]),
        )
    first = late.get("since_step") or event.step
    return LateSpan(
        late["rank"], late["phase"], late.get("host", ""), first, event.step, late["late_ns"], late["ceiling"]
    )
