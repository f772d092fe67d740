"""Computes busy time and idle time by cause from the events of a profiler capture.

A GPU is busy while a kernel, a copy or a memory fill runs on it. Without a GPU, compute is busy while an operator runs
in a phase that computes; operators that make a batch count as waiting for data. All other time is idle. If the next
kernel had been launched before a gap began, the gap is between queued kernels; otherwise its cause is what the host was
doing then.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

from ndd_engine.record.event import Kernel
from ndd_engine.record.figures import (
    COPYING,
    EVALUATION_OR_CHECKPOINT,
    IDLE_CAUSES,
    LAUNCH_GAPS,
    OTHER_CAUSE,
    QUEUED,
    SYNCHRONISING,
    WAITING_FOR_DATA,
)
from ndd_engine.text import printable

# "Disjoint" intervals are sorted, non-empty and do not overlap.
Interval = tuple[int, int]
# (begin, end, label)
Span = tuple[int, int, str]

# Cause of a gap, by the phase of the host.
CAUSE_OF = {
    "data_wait": WAITING_FOR_DATA,
    "to_device": COPYING,
    **dict.fromkeys(("forward", "loss", "backward", "clip", "optimizer", "zero_grad"), LAUNCH_GAPS),
    **dict.fromkeys(("evaluate", "checkpoint"), EVALUATION_OR_CHECKPOINT),
    **dict.fromkeys(("log", "other"), OTHER_CAUSE),
}
# In these, a wait for the GPU is a cause of its own; the other causes already say what is waited for.
_BLOCKED = frozenset({LAUNCH_GAPS, OTHER_CAUSE})
# Phases whose host operators do not belong to the model.
_NOT_COMPUTING = frozenset({"data_wait", "to_device", "checkpoint"})
# cudaFree waits until the GPU is idle: the cost of empty_cache().
_WAITS = ("StreamSynchronize", "DeviceSynchronize", "EventSynchronize", "cudaFree")
_READS = frozenset({"aten::item", "aten::_local_scalar_dense"})
# Entries that newer profilers add to the GPU's line and that are not work.
_NOT_WORK = frozenset({"Stream Sync", "Event Sync", "Context Sync", "Device Sync", "Stream Wait Event"})
# Runtime calls, which share their correlation id with the kernel or copy that they launch.
RUNTIME = re.compile(r"(cu|cuda|hip)[A-Z]")
# Copies that never leave the GPU.
_WITHIN = ("Memcpy DtoD", "CopyDeviceToDevice")
_COPIES = ("Memcpy", "CopyDeviceTo", "CopyHostTo")
_FILLS = ("Memset", "FillBuffer")
# A copy from or to pageable memory returns when it is done. ROCm names both kinds of host memory "Host".
_BLOCKING_MEMORY = ("Pageable", "Host")
_COLLECTIVE = re.compile(r"(void )?(nccl|rccl|msccl)", re.IGNORECASE)
# Kernels of convolutions, including those that are matrix products.
_CONVOLUTION = re.compile(r"conv|wgrad|dgrad|fprop|winograd|im2col|col2im|implicit_gemm", re.IGNORECASE)
_NO_CONVOLUTION = re.compile(r"bn_|batch_?norm|convert", re.IGNORECASE)
# Namespaces of ranges that are not operators.
_ENGINE = frozenset({"autograd", "torch", "profiler"})
# Compiled code runs as one call without operators inside.
_COMPILED = "## Call CompiledFxGraph"
_TOP = 8
_NAME = 160  # characters kept of a kernel's name: C++ templates make names kilobytes long


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """One event of the profiler, in nanoseconds.

    on_gpu: it ran on the GPU with index `device`. annotation: a named range. correlation: id that a kernel or copy
    shares with the runtime call that launched it, 0 if unknown. sequence: autograd's number, which an operator of
    forward shares with its node of backward, else -1. forward_thread: of a node of backward, the thread of that
    operator, else 0.
    """

    name: str
    begin: int
    end: int
    thread: int
    on_gpu: bool
    annotation: bool
    device: int = 0
    correlation: int = 0
    sequence: int = -1
    forward_thread: int = 0


@dataclass(frozen=True, slots=True)
class CaptureTimeline:
    """busy_ns and the values of idle_ns add up to wall_ns exactly. See record.events.KernelsEvent."""

    wall_ns: int
    busy_ns: int
    copy_ns: int
    idle_ns: dict[str, int]
    launches: int
    top: list[Kernel]
    collective_ns: int = 0
    exposed_ns: int = 0
    convolution_ns: int = 0


def timeline(
    seen: Sequence[TraceEvent],
    marks: Sequence[tuple[int, str]],
    begin: int,
    end: int,
    gpu: bool,
    device: int | None = None,
) -> CaptureTimeline:
    """Busy and idle time between `begin` and `end`.

    marks: (time, phase that begins) in order on the profiler's clock, the first one at or before `begin`. device: index
    of the GPU, None for all GPUs together. Raises ValueError if there is no kernel, copy or operator.
    """
    phases = spans(marks, begin, end)
    computing = [(low, high) for low, high, name in phases if gpu or _base(name) not in _NOT_COMPUTING]
    work = on_gpu(seen, device) if gpu else _starting_in(computing, operators(seen))
    work = [item for item in work if item.end > begin and item.begin < end]
    if not work:
        raise ValueError(f"the profiler recorded no {'GPU kernels' if gpu else 'operators'}")
    busy = common(union(((item.begin, item.end) for item in work), begin, end), computing)
    idle = gaps(busy, begin, end)
    if not gpu:
        causes = _causes(idle, phases, [])
        return CaptureTimeline(end - begin, total(busy), 0, causes, len(work), _longest(work, begin, end))
    copies = [item for item in work if item.name.startswith(_COPIES) and not item.name.startswith(_WITHIN)]
    kernels = [item for item in work if not is_transfer(item)]
    collectives = [item for item in kernels if _COLLECTIVE.match(item.name)]
    computed = [item for item in kernels if not _COLLECTIVE.match(item.name)]
    exchanging = _union_of(collectives, begin, end)
    queued = _queued(idle, work, seen)
    found = _causes([gap for gap in idle if gap not in queued], phases, _waits(seen, begin, end))
    if queued:
        found[QUEUED] = total(queued)
    return CaptureTimeline(
        wall_ns=end - begin,
        busy_ns=total(busy),
        copy_ns=total(_union_of(copies, begin, end)),
        idle_ns={cause: found[cause] for cause in IDLE_CAUSES if found.get(cause)},
        launches=len(kernels),
        top=_longest(work, begin, end),
        collective_ns=total(exchanging),
        exposed_ns=total(exchanging) - total(common(exchanging, _union_of(computed, begin, end))),
        convolution_ns=sum(
            min(item.end, end) - max(item.begin, begin) for item in computed if is_convolution(item.name)
        ),
    )


def is_convolution(kernel: str) -> bool:
    """Whether a kernel of this name computes a convolution, forward or backward."""
    return bool(_CONVOLUTION.search(kernel)) and not _NO_CONVOLUTION.search(kernel)


def on_gpu(seen: Iterable[TraceEvent], device: int | None = None) -> list[TraceEvent]:
    """Kernels, copies and fills on one GPU, or on all.

    Named ranges on the GPU's line compute nothing and are left out. Some profilers do not mark them: a name that is
    also a range of the host is a range.
    """
    seen = list(seen)
    ranges = {item.name for item in seen if item.annotation}
    return [
        item
        for item in seen
        if item.on_gpu
        and (device is None or item.device == device)
        and not item.annotation
        and item.name not in ranges
        and item.name not in _NOT_WORK
    ]


def is_transfer(item: TraceEvent) -> bool:
    """Whether work on the GPU is a copy or a fill rather than a kernel."""
    return item.name.startswith((*_COPIES, *_FILLS))


def _union_of(items: Iterable[TraceEvent], begin: int, end: int) -> list[Interval]:
    return union(((item.begin, item.end) for item in items), begin, end)


def _queued(
    idle: Sequence[Interval], work: Iterable[TraceEvent], seen: Iterable[TraceEvent]
) -> set[Interval]:
    """The gaps whose next kernel or copy had been launched before they began: the host is not their cause."""
    launched = {
        item.correlation: item.end
        for item in seen
        if not item.on_gpu and item.correlation and RUNTIME.match(item.name)
    }
    first: dict[int, int] = {}
    for item in work:
        if (time := launched.get(item.correlation)) is not None:
            first[item.begin] = min(time, first.get(item.begin, time))
    return {(low, high) for low, high in idle if first.get(high, low + 1) <= low}


def operators(seen: Iterable[TraceEvent]) -> list[TraceEvent]:
    """Top-level host operators, ordered by their begin.

    Ranges of the autograd engine are not operators: Python code may run inside them.
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


def _waits(seen: Sequence[TraceEvent], begin: int, end: int) -> list[Interval]:
    """When the host waited for the GPU: in a synchronising call, or in a copy that returns when it is done."""
    blocking = {
        item.correlation
        for item in seen
        if item.on_gpu and item.correlation and any(memory in item.name for memory in _BLOCKING_MEMORY)
    }
    found = (
        item
        for item in seen
        if not item.on_gpu
        and (
            item.name.endswith(_WAITS)
            or item.name in _READS
            or (item.correlation in blocking and "emcpy" in item.name)
        )
    )
    return _union_of(found, begin, end)


def _causes(idle: Sequence[Interval], phases: Sequence[Span], waits: Sequence[Interval]) -> dict[str, int]:
    causes = [(low, high, CAUSE_OF.get(_base(name), OTHER_CAUSE)) for low, high, name in phases]
    blocked = [(low, high) for low, high, cause in causes if cause in _BLOCKED]
    waited = waited_in(idle, waits) if waits else []
    found = by_cause(idle, causes)
    for cause, ns in by_cause(common(waited, blocked), causes).items():
        found[cause] -= ns
        found[SYNCHRONISING] = found.get(SYNCHRONISING, 0) + ns
    return {cause: found[cause] for cause in IDLE_CAUSES if found.get(cause)}


def _longest(work: Iterable[TraceEvent], begin: int, end: int) -> list[Kernel]:
    """(name, total nanoseconds, count) of the longest-running kernels or operators, longest first."""
    spent: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for item in work:
        spent[item.name] += min(item.end, end) - max(item.begin, begin)
        counts[item.name] += 1
    ranked = sorted(spent, key=lambda name: (-spent[name], name))[:_TOP]
    return [(printable(name)[:_NAME], spent[name], counts[name]) for name in ranked]


# Interval arithmetic, in whole nanoseconds.


def union(intervals: Iterable[Interval], begin: int, end: int) -> list[Interval]:
    """The union of the intervals, clipped to begin..end, as disjoint intervals."""
    out: list[Interval] = []
    for low, high in sorted(intervals):
        low, high = max(low, begin), min(high, end)
        if low >= high:
            continue
        if out and low <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], high))
        else:
            out.append((low, high))
    return out


def gaps(covered: Sequence[Interval], begin: int, end: int) -> list[Interval]:
    """The time in begin..end that `covered` leaves free; `covered` is disjoint and lies inside."""
    edges = [begin, *chain.from_iterable(covered), end]
    return [(low, high) for low, high in zip(edges[::2], edges[1::2], strict=True) if low < high]


def common(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """The intersection of two lists of disjoint intervals."""
    out: list[Interval] = []
    i = j = 0
    while i < len(first) and j < len(second):
        low, high = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if low < high:
            out.append((low, high))
        if first[i][1] <= second[j][1]:
            i += 1
        else:
            j += 1
    return out


def total(intervals: Iterable[Interval]) -> int:
    """Total length of disjoint intervals."""
    return sum(end - begin for begin, end in intervals)


def spans(marks: Sequence[tuple[int, str]], begin: int, end: int) -> list[Span]:
    """Spans that cover begin..end, from marks (time, label that starts here) in order.

    The first mark's label also covers the time before it.
    """
    edges = [begin, *(min(max(time, begin), end) for time, _ in marks[1:]), end]
    return [
        (low, high, what)
        for (low, high), (_, what) in zip(pairwise(edges), marks, strict=False)
        if low < high
    ]


def by_cause(idle: Sequence[Interval], done: Sequence[Span]) -> dict[str, int]:
    """Nanoseconds of the disjoint `idle` intervals by label; adds up to all of `idle` if `done` covers it."""
    out: dict[str, int] = {}
    place = 0
    for begin, end in idle:
        while place < len(done) and done[place][1] <= begin:
            place += 1
        index = place
        while index < len(done) and done[index][0] < end:
            low, high, what = done[index]
            out[what] = out.get(what, 0) + min(high, end) - max(low, begin)
            index += 1
    return out


def waited_in(idle: Sequence[Interval], waits: Sequence[Interval]) -> list[Interval]:
    """The part of the disjoint `idle` intervals that is caused by `waits`, in which the host waits for the GPU.

    A gap that begins during a wait counts to its end: the GPU ran out of work because the host was blocked. Of any
    other gap only the time inside waits counts.
    """
    out: list[Interval] = []
    place = 0
    for begin, end in idle:
        while place < len(waits) and waits[place][1] < begin:
            place += 1
        if place < len(waits) and waits[place][0] <= begin:
            out.append((begin, end))
        else:
            out += common([(begin, end)], waits[place:])
    return out
