"""From what the profiler saw to when something was computed, and why nothing was in between.

On a card the card computes or copies while a kernel, a copy or a memory fill runs on it. Without one, while an
operator runs on the host in a phase that computes: what makes a batch is waiting for data, not the model's work.
Everything else is idle, and its cause is what the host was doing at that moment.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ndd_engine.record.derive import (
    COPYING,
    EVALUATION_OR_CHECKPOINT,
    IDLE_CAUSES,
    LAUNCH_GAPS,
    OTHER_CAUSE,
    SYNCHRONISING,
    WAITING_FOR_DATA,
)
from ndd_engine.text import printable

from .intervals import Interval, Span, by_cause, common, gaps, spans, total, union, waited_in

# Cause of a gap by the phase that the host is in.
CAUSE_OF = {
    "data_wait": WAITING_FOR_DATA,
    "to_device": COPYING,
    "forward": LAUNCH_GAPS,
    "loss": LAUNCH_GAPS,
    "backward": LAUNCH_GAPS,
    "clip": LAUNCH_GAPS,
    "optimizer": LAUNCH_GAPS,
    "zero_grad": LAUNCH_GAPS,
    "log": OTHER_CAUSE,
    "evaluate": EVALUATION_OR_CHECKPOINT,
    "checkpoint": EVALUATION_OR_CHECKPOINT,
    "other": OTHER_CAUSE,
}
# In these a wait for the card is a cause of its own; the others say already what is waited for.
_BLOCKED = frozenset({LAUNCH_GAPS, OTHER_CAUSE})
# Phases whose operators on the host are not the model's.
_NOT_COMPUTING = frozenset({"data_wait", "to_device", "checkpoint"})
# cudaFree waits for all of the card's work: what empty_cache() costs.
_WAITS = ("StreamSynchronize", "DeviceSynchronize", "EventSynchronize", "cudaFree")
_READS = frozenset({"aten::item", "aten::_local_scalar_dense"})
# What newer profilers put on the card's line besides work.
_NOT_WORK = frozenset({"Stream Sync", "Event Sync", "Context Sync", "Device Sync", "Stream Wait Event"})
# Name spaces of the engine's own ranges.
_ENGINE = frozenset({"autograd", "torch", "profiler"})
# What the compiler made runs as one call and has no operators inside.
_COMPILED = "## Call CompiledFxGraph"
_TOP = 8
_NAME = 160  # characters of a kernel's name that are kept: templates make them kilobytes long


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """One thing that the profiler saw. on_card: it ran there. annotation: a range that somebody named."""

    name: str
    begin: int
    end: int
    thread: int
    on_gpu: bool
    annotation: bool


@dataclass(frozen=True, slots=True)
class CaptureTimeline:
    """busy_ns and the values of idle_ns add up to wall_ns exactly. See record.events.KernelsEvent."""

    wall_ns: int
    busy_ns: int
    copy_ns: int
    idle_ns: dict[str, int]
    launches: int
    top: list[list[str | int]]


def timeline(
    seen: Sequence[TraceEvent], marks: Sequence[tuple[int, str]], begin: int, end: int, card: bool
) -> CaptureTimeline:
    """What happened between `begin` and `end`.

    marks: (time, phase that begins) in order, the first one at or before `begin`, on the profiler's clock. Raises
    ValueError where nothing was seen that could have computed.
    """
    phases = spans(marks, begin, end)
    computing = [(low, high) for low, high, name in phases if card or _base(name) not in _NOT_COMPUTING]
    work = on_gpu(seen) if card else _starting_in(computing, operators(seen))
    work = [item for item in work if item.end > begin and item.begin < end]
    if not work:
        raise ValueError("it saw no kernels on the card" if card else "it saw no operators")
    busy = common(union(((item.begin, item.end) for item in work), begin, end), computing)
    idle = gaps(busy, begin, end)
    copies = [(item.begin, item.end) for item in work if card and _is_copy(item.name)]
    launched = [item for item in work if not (card and _is_transfer(item.name))]
    return CaptureTimeline(
        wall_ns=end - begin,
        busy_ns=total(busy),
        copy_ns=total(union(copies, begin, end)),
        idle_ns=_causes(idle, phases, _waits(seen, begin, end) if card else []),
        launches=len(launched),
        top=_longest(work, begin, end),
    )


def on_gpu(seen: Iterable[TraceEvent]) -> list[TraceEvent]:
    """Kernels, copies and fills; named ranges are shown on the card's line too, and compute nothing."""
    return [item for item in seen if item.on_gpu and not item.annotation and item.name not in _NOT_WORK]


def operators(seen: Iterable[TraceEvent]) -> list[TraceEvent]:
    """Operators of the host that are not called by another one, in the order of their begin.

    The autograd engine's own ranges are no operators: Python code may run in them.
    """
    known = [item for item in seen if not item.on_gpu and _is_operator(item)]
    known.sort(key=lambda item: (item.begin, -item.end))
    until: dict[int, int] = {}
    out = []
    for item in known:
        if item.begin >= until.get(item.thread, item.begin):
            until[item.thread] = item.end
            out.append(item)
    return out


def _is_operator(item: TraceEvent) -> bool:
    if item.name.startswith(_COMPILED):
        return True
    space, found, _ = item.name.partition("::")
    return bool(found) and not item.annotation and space not in _ENGINE


def _starting_in(wanted: Sequence[Interval], items: Iterable[TraceEvent]) -> list[TraceEvent]:
    begins = [low for low, _ in wanted]
    return [
        item
        for item in items
        if (place := bisect_right(begins, item.begin)) and item.begin < wanted[place - 1][1]
    ]


def _base(name: str) -> str:
    return name.partition("/")[0]


def _is_transfer(name: str) -> bool:
    return name.startswith(("Memcpy", "Memset"))


def _is_copy(name: str) -> bool:
    return name.startswith("Memcpy")


def _waits(seen: Iterable[TraceEvent], begin: int, end: int) -> list[Interval]:
    """When the host waited for the card."""
    found = (
        (item.begin, item.end)
        for item in seen
        if not item.on_gpu and (item.name.endswith(_WAITS) or item.name in _READS)
    )
    return union(found, begin, end)


def _causes(idle: Sequence[Interval], phases: Sequence[Span], waits: Sequence[Interval]) -> dict[str, int]:
    causes = [(low, high, CAUSE_OF.get(_base(name), OTHER_CAUSE)) for low, high, name in phases]
    blocked = [(low, high) for low, high, cause in causes if cause in _BLOCKED]
    waited = waited_in(idle, waits) if waits else []
    found = by_cause(idle, causes)
    for cause, ns in by_cause(common(waited, blocked), causes).items():
        found[cause] -= ns
        found[SYNCHRONISING] = found.get(SYNCHRONISING, 0) + ns
    return {cause: found[cause] for cause in IDLE_CAUSES if found.get(cause)}


def _longest(work: Iterable[TraceEvent], begin: int, end: int) -> list[list[str | int]]:
    """[name, total nanoseconds, count] of what took longest, the longest first."""
    spent: dict[str, list[int]] = {}
    for item in work:
        entry = spent.setdefault(item.name, [0, 0])
        entry[0] += min(item.end, end) - max(item.begin, begin)
        entry[1] += 1
    ranked = sorted(spent.items(), key=lambda each: (-each[1][0], each[0]))[:_TOP]
    return [[printable(name)[:_NAME], ns, count] for name, (ns, count) in ranked]
