"""What a GPU did in a profiler capture: busy time, and idle time by cause.

A GPU is busy while a kernel, a copy or a memory fill runs on it, of CUDA, ROCm or XPU. Without a GPU, compute is busy
while an operator runs in a phase that computes; operators that make a batch count as waiting for data. All other time
is idle. If the next kernel had been launched before a gap began, the gap is between queued kernels; otherwise its cause
is what the host was doing then.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any

from ndd_engine.hardware.gpus import GpuProfile
from ndd_engine.hardware.kernels import Card, fitted
from ndd_engine.record.event import Kernel
from ndd_engine.record.figures import (
    BETWEEN_GPUS,
    COPY_KINDS,
    COPYING,
    EVALUATION_OR_CHECKPOINT,
    FILL,
    IDLE_CAUSES,
    LAUNCH_GAPS,
    OTHER_CAUSE,
    OTHER_COPY,
    PINNED_TO_GPU,
    QUEUED,
    SYNCHRONISING,
    TO_GPU,
    TO_HOST,
    TO_PINNED_HOST,
    WAITING_FOR_DATA,
    WITHIN_GPU,
)
from ndd_engine.record.profile_events import CaptureTimeline
from ndd_engine.text import printable

from .recorded_operations import recorded_kernels, whole

# "Disjoint" intervals are sorted, non-empty and do not overlap.
Interval = tuple[int, int]

# Runtime calls, which share their correlation id with the kernel or copy that they launch.
RUNTIME = re.compile(r"(cu|cuda|hip|ur|ze)[A-Z]")
# Entries that newer profilers add to the GPU's line and that are not work.
_NOT_WORK = frozenset({"Stream Sync", "Event Sync", "Context Sync", "Device Sync", "Stream Wait Event"})
# CUDA has "Memcpy HtoD (Pinned -> Device)", ROCm either that or "CopyHostToDevice". XPU writes H2D, or M2D for memory
# that is not pinned: "Memcpy M2D (Memory -> Device)".
_COPIES = ("Memcpy", "CopyDeviceTo", "CopyHostTo")
_WITHIN = ("Memcpy DtoD", "Memcpy D2D", "CopyDeviceToDevice")
_UPLOADS = ("Memcpy HtoD", "Memcpy H2D", "Memcpy M2D", "CopyHostToDevice")
_DOWNLOADS = ("Memcpy DtoH", "Memcpy D2H", "Memcpy D2M", "CopyDeviceToHost")
_BETWEEN = ("Memcpy PtoP", "Memcpy P2P")
_FILLS = ("Memset", "FillBuffer")
# A copy from or to pageable memory returns when it is done. ROCm names both kinds of host memory "Host".
_BLOCKING_MEMORY = ("Pageable", "Host", "(Memory", "> Memory")
# Libraries of collectives, and the words that their kernels and those of other packages have in their own names.
_COLLECTIVE = re.compile(
    r"(?<![a-z])(nccl|rccl|msccl|oneccl|hccl|nvshmem|rocshmem|deep_?ep|userbuffers)|cross_device_reduce"
    r"|(?<!warp)(?<!block)(?<!warp_)(?<!block_)"
    r"(all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|send_?recv)",
    re.IGNORECASE,
)
# What Inductor makes is named after the operators that it fuses, also after a collective beside it.
_FUSED = re.compile(r"triton_[a-z]{3}_")
# Operators of convolutions, and the kernels of those whose operator is unknown, as in a CUDA graph.
_CONVOLVES = re.compile(r"conv(?!ert)", re.IGNORECASE)
_CONVOLUTION = re.compile(r"conv|wgrad|dgrad|fprop|winograd|im2col|col2im|implicit_gemm", re.IGNORECASE)
_NO_CONVOLUTION = re.compile(r"bn_|batch_?norm|convert", re.IGNORECASE)
# Kernels of cuBLAS, cuDNN and CUTLASS that multiply fp32 matrices: on tensor cores they round to TF32.
_PRODUCT = re.compile(r"^(?!.*(f16|fp16|half))(.*(?<!convolve_)sgemm|.*s1688gemm|.*f32f32)", re.IGNORECASE)
_ROUNDS = re.compile(r"tf32|s1688gemm", re.IGNORECASE)
_GRAPH = "GraphLaunch"


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """One event of the profiler, in nanoseconds.

    thread: of the host, or the stream of the GPU. on_gpu: it ran on the GPU with index `device`. annotation: a named
    range. correlation: id that a kernel or copy shares with the runtime call that launched it, 0 if unknown. sequence:
    autograd's number, which an operator of forward shares with its node of backward, else -1. forward_thread: of a node
    of backward, the thread of that operator, else 0. given: what the operator was given, as the profiler writes it
    ("Input Dims", …); None if that is unknown.
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
    given: Any = field(default=None, compare=False)


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


def is_copy(item: TraceEvent) -> bool:
    """Whether work on the GPU is a copy from or to another memory."""
    return item.name.startswith(_COPIES) and not item.name.startswith(_WITHIN)


def is_upload(item: TraceEvent) -> bool:
    """Whether it is a copy from the host to the GPU."""
    return item.name.startswith(_UPLOADS)


def is_transfer(item: TraceEvent) -> bool:
    """Whether work on the GPU is a copy or a fill rather than a kernel."""
    return item.name.startswith((*_COPIES, *_FILLS))


def copy_kind(item: TraceEvent) -> str:
    """Which of `COPY_KINDS` work on the GPU is; "" for a kernel."""
    pinned = "Pinned" in item.name
    if is_upload(item):
        return PINNED_TO_GPU if pinned else TO_GPU
    if item.name.startswith(_DOWNLOADS):
        return TO_PINNED_HOST if pinned else TO_HOST
    if item.name.startswith(_FILLS):
        return FILL
    if item.name.startswith(_WITHIN):
        return WITHIN_GPU
    if item.name.startswith(_BETWEEN):
        return BETWEEN_GPUS
    return OTHER_COPY if item.name.startswith(_COPIES) else ""


def blocks_the_host(item: TraceEvent) -> bool:
    """Whether it is a copy during which the call that asked for it may wait."""
    return item.name.startswith(_COPIES) and any(memory in item.name for memory in _BLOCKING_MEMORY)


def is_collective(kernel: str) -> bool:
    """Whether a kernel of this name exchanges data with other GPUs."""
    name = own_name(kernel)
    return bool(_COLLECTIVE.search(name)) and not _FUSED.match(name)


def own_name(kernel: str) -> str:
    """The name of a kernel without its arguments, those of its template, and what it returns."""
    plain = kernel.replace("(anonymous namespace)::", "").removeprefix("void ")
    return re.split(r"[<(]", plain, maxsplit=1)[0]


def launches(seen: Iterable[TraceEvent]) -> dict[int, TraceEvent]:
    """The runtime call that launched the work with a correlation id."""
    return {
        item.correlation: item
        for item in seen
        if not item.on_gpu and item.correlation and RUNTIME.match(item.name)
    }


def by_graph(launch: TraceEvent | None) -> bool:
    """Whether a CUDA graph was launched."""
    return launch is not None and launch.name.endswith(_GRAPH)


def launchers(
    seen: Sequence[TraceEvent], launched: dict[int, TraceEvent]
) -> Callable[[TraceEvent], tuple[TraceEvent, ...]]:
    """Of a kernel, the operators around its launch, the outermost first; () if they are unknown, as in a CUDA graph."""
    operators: dict[int, list[TraceEvent]] = {}
    for item in seen:
        if not item.on_gpu and not item.annotation and not RUNTIME.match(item.name):
            operators.setdefault(item.thread, []).append(item)
    running = {thread: _Running(found) for thread, found in operators.items()}

    def around(kernel: TraceEvent) -> tuple[TraceEvent, ...]:
        launch = launched.get(kernel.correlation)
        if launch is None or by_graph(launch) or launch.thread not in running:
            return ()
        return running[launch.thread].at(launch.begin)

    return around


def _convolves(kernel: TraceEvent, around: Sequence[TraceEvent]) -> bool:
    """Whether a kernel computes a convolution: by the innermost operator, or by its name if there is none."""
    if around:
        return bool(_CONVOLVES.search(around[-1].name))
    return bool(_CONVOLUTION.search(kernel.name)) and not _NO_CONVOLUTION.search(kernel.name)


class _Running:
    """The operators of a thread that run at any time, the outermost first."""

    def __init__(self, operators: list[TraceEvent]) -> None:
        self._times: list[int] = []
        self._found: list[tuple[TraceEvent, ...]] = []
        running: tuple[TraceEvent, ...] = ()
        for item in sorted(operators, key=lambda item: (item.begin, -item.end)):
            running = (*self._ended(running, item.begin), item)
            self._mark(item.begin, running)
        self._ended(running, None)

    def _ended(self, running: tuple[TraceEvent, ...], time: int | None) -> tuple[TraceEvent, ...]:
        while running and (time is None or running[-1].end <= time):
            self._mark(running[-1].end, running[:-1])
            running = running[:-1]
        return running

    def _mark(self, time: int, running: tuple[TraceEvent, ...]) -> None:
        self._times.append(time)
        self._found.append(running)

    def at(self, time: int) -> tuple[TraceEvent, ...]:
        place = bisect_right(self._times, time) - 1
        return self._found[place] if place >= 0 else ()


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
_BLOCKED = frozenset({LAUNCH_GAPS, COPYING, OTHER_CAUSE})
# Phases whose host operators do not belong to the model.
_NOT_COMPUTING = frozenset({"data_wait", "to_device", "checkpoint"})
# cudaFree waits until the GPU is idle: the cost of empty_cache().
_WAITS = (
    "StreamSynchronize", "DeviceSynchronize", "EventSynchronize", "cudaFree", "hipFree", "urQueueFinish", "urEventWait",
    "QueueSynchronize", "HostSynchronize",
)  # fmt: skip
# These copy and return when they are done, whatever memory it is.
_COPY_CALLS = ("Memcpy", "MemcpyWithStream")
_READS = frozenset({"aten::item", "aten::_local_scalar_dense"})
# Namespaces of ranges that are not operators.
_ENGINE = frozenset({"autograd", "torch", "profiler"})
# Compiled code runs as one call without operators inside.
_COMPILED = "## Call CompiledFxGraph"
_TOP = 8
_NAME = 160  # characters kept of a kernel's name: C++ templates make names kilobytes long
# What is between kernels that were launched in time. A gap shorter than this is what starting a kernel takes.
SHORT_NS = 10_000
STREAM_WAITS, STREAM_GAPS, SHORT_GAPS = "another stream", "one stream", "short"
IN_GRAPH, BEFORE_GRAPH = "CUDA graph", "before a CUDA graph"


def timeline(
    seen: Sequence[TraceEvent],
    marks: Sequence[tuple[int, str]],
    begin: int,
    end: int,
    gpu: bool,
    device: int | None = None,
    profile: GpuProfile | None = None,
) -> CaptureTimeline:
    """Busy and idle time between `begin` and `end`.

    marks: (time, phase that begins) in order on the profiler's clock, the first one at or before `begin`. device: index
    of the GPU, None for all GPUs together. profile: of this GPU, to estimate its kernels.
    Raises ValueError if there is no kernel, copy or operator.
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
        causes, *_ = _causes(idle, phases, [])
        return CaptureTimeline(end - begin, total(busy), 0, causes, len(work), _longest(work, begin, end))
    launched = launches(seen)
    copying = _union_of((item for item in work if is_copy(item)), begin, end)
    kernels = [item for item in work if not is_transfer(item)]
    computed = [item for item in kernels if not is_collective(item.name)]
    exchanging = _union_of((item for item in kernels if is_collective(item.name)), begin, end)
    around = launchers(seen, launched)
    queued = _queued(idle, work, launched)
    waits = _waits(seen)
    found, waited, after = _causes(
        [gap for gap in idle if gap not in queued], phases, [wait[:2] for wait in waits]
    )
    if queued:
        found[QUEUED] = total(list(queued))
    return CaptureTimeline(
        wall_ns=end - begin,
        busy_ns=total(busy),
        copy_ns=total(copying),
        idle_ns={cause: found[cause] for cause in IDLE_CAUSES if found.get(cause)},
        launches=len(kernels),
        top=_longest(work, begin, end),
        collective_ns=total(exchanging),
        exposed_ns=_alone(exchanging, computed, begin, end),
        convolution_ns=sum(
            min(item.end, end) - max(item.begin, begin) for item in computed if _convolves(item, around(item))
        ),
        exposed_copies_ns=_exposed_copies(work, kernels, begin, end),
        queued=_summed((kind, high - low) for (low, high), kind in queued.items()),
        waits=_idle_in(waits, waited),
        after_waits_ns=after,
        products_ns=_products(computed, begin, end),
        estimated_ns={} if profile is None else _estimated(computed, around, Card(profile)),
    )


def _estimated(
    computed: Sequence[TraceEvent], around: Callable[[TraceEvent], tuple[TraceEvent, ...]], card: Card
) -> dict[str, int]:
    """See `estimated_ns` of record.events.KernelsEvent."""
    by_operator: dict[tuple[int, int, str], tuple[TraceEvent, list[TraceEvent]]] = {}
    for kernel in computed:
        found = around(kernel)
        if found:
            item = next((one for one in found if whole(one.name)), found[-1])
            key = item.thread, item.begin, item.name
            by_operator.setdefault(key, (item, []))[1].append(kernel)
    measured, estimated = 0, 0.0
    for item, kernels in by_operator.values():
        rounds = any(_ROUNDS.search(kernel.name) for kernel in kernels)
        if known := recorded_kernels(item.name, item.given, rounds):
            measured += sum(kernel.end - kernel.begin for kernel in kernels)
            estimated += sum(map(card.seconds, known))
    if not measured:
        return {}
    usual, error = round(estimated * 1e9), 1 + fitted().p90_error
    kernels_ns = sum(kernel.end - kernel.begin for kernel in computed)
    return {
        "kernels": kernels_ns, "measured": measured, "usual": usual, "low": round(usual / error),
        "high": round(usual * error),
    }  # fmt: skip


def _products(computed: Sequence[TraceEvent], begin: int, end: int) -> dict[str, int]:
    """See `products_ns` of record.events.KernelsEvent."""
    found: dict[str, int] = {}
    for item in computed:
        if _PRODUCT.search(item.name):
            kind = "tf32" if _ROUNDS.search(item.name) else "fp32"
            found[kind] = found.get(kind, 0) + min(item.end, end) - max(item.begin, begin)
    return found


def _alone(running: Sequence[Interval], others: Iterable[TraceEvent], begin: int, end: int) -> int:
    """Nanoseconds in which something runs and nothing of the others does."""
    return total(running) - total(common(running, _union_of(others, begin, end)))


def _exposed_copies(
    work: Sequence[TraceEvent], kernels: Iterable[TraceEvent], begin: int, end: int
) -> dict[str, int]:
    """See `exposed_copies_ns` of record.events.KernelsEvent. Of several kinds at once the first of the list counts."""
    by_kind: dict[str, list[TraceEvent]] = {}
    for item in work:
        if kind := copy_kind(item):
            by_kind.setdefault(kind, []).append(item)
    covered = _union_of(kernels, begin, end)
    found: dict[str, int] = {}
    for kind in COPY_KINDS:
        if kind in by_kind:
            running = _union_of(by_kind[kind], begin, end)
            if ns := total(running) - total(common(running, covered)):
                found[kind] = ns
            covered = union([*covered, *running], begin, end)
    return found


def _union_of(items: Iterable[TraceEvent], begin: int, end: int) -> list[Interval]:
    return union(((item.begin, item.end) for item in items), begin, end)


def _queued(
    idle: Sequence[Interval], work: Sequence[TraceEvent], launched: dict[int, TraceEvent]
) -> dict[Interval, str]:
    """The gaps whose next kernel or copy had been launched before they began, with what is between.

    The host is not their cause.
    """
    following: dict[int, list[TraceEvent]] = {}
    before: dict[int, list[TraceEvent]] = {}
    for item in work:
        following.setdefault(item.begin, []).append(item)
        before.setdefault(item.end, []).append(item)
    found = {}
    for low, high in idle:
        ready = [
            item
            for item in following.get(high, ())
            if (launch := launched.get(item.correlation)) is not None and launch.end <= low
        ]
        if not ready:
            continue
        if high - low < SHORT_NS:
            kind = SHORT_GAPS
        elif by_graph(launched[ready[0].correlation]):
            inside = any(item.correlation == ready[0].correlation for item in before.get(low, ()))
            kind = IN_GRAPH if inside else BEFORE_GRAPH
        elif {item.thread for item in ready} & {item.thread for item in before.get(low, ())}:
            kind = STREAM_GAPS
        else:
            kind = STREAM_WAITS
        found[low, high] = kind
    return found


def _summed(items: Iterable[tuple[str, int]]) -> list[Kernel]:
    """(label, total, count), the largest total first."""
    spent: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for label, ns in items:
        spent[label] += ns
        counts[label] += 1
    return [
        (label, spent[label], counts[label]) for label in sorted(spent, key=lambda one: (-spent[one], one))
    ]


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


def _waits(seen: Sequence[TraceEvent]) -> list[Span]:
    """When the host waits for the GPU, and by what: a synchronising call, or a copy that returns when it is done.

    Without the calls inside another one.
    """
    blocking = {
        item.correlation: "upload" if is_upload(item) else "copy"
        for item in seen
        if item.on_gpu and item.correlation and blocks_the_host(item)
    }
    found: list[Span] = []
    for item in seen:
        if item.on_gpu:
            continue
        if item.name.endswith(_WAITS) or item.name in _READS:
            found.append((item.begin, item.end, item.name))
        elif (item.correlation in blocking and "emcpy" in item.name) or item.name.endswith(_COPY_CALLS):
            kind = blocking.get(item.correlation, "copy")
            found.append((item.begin, item.end, f"{item.name} ({kind})"))
    found.sort(key=lambda wait: (wait[0], -wait[1]))
    outer: list[Span] = []
    for begin, end, name in found:
        if outer and begin < outer[-1][1]:
            begin = outer[-1][1]
        if begin < end:
            outer.append((begin, end, name))
    return outer


def _idle_in(waits: Sequence[Span], idle: Sequence[Interval]) -> list[Kernel]:
    """(name, idle nanoseconds inside, calls) of what waits, the longest first."""
    spent = by_cause(idle, waits)
    counts = Counter(name for _, _, name in waits)
    ranked = sorted(spent, key=lambda name: (-spent[name], name))[:_TOP]
    return [(printable(name)[:_NAME], spent[name], counts[name]) for name in ranked]


def _causes(
    idle: Sequence[Interval], phases: Sequence[Span], waits: Sequence[Interval]
) -> tuple[dict[str, int], list[Interval], int]:
    """Idle time by cause; the part that is synchronising; how much of the launch gaps follows from a wait.

    Without the wait, the host would have launched earlier, at most by as long as it waited.
    """
    causes = [(low, high, CAUSE_OF.get(_base(name), OTHER_CAUSE)) for low, high, name in phases]
    blocked = [(low, high) for low, high, cause in causes if cause in _BLOCKED]
    launching = [(low, high) for low, high, cause in causes if cause == LAUNCH_GAPS]
    waited = common(common(idle, waits), blocked)
    found = by_cause(idle, causes)
    for cause, ns in by_cause(waited, causes).items():
        found[cause] -= ns
        found[SYNCHRONISING] = found.get(SYNCHRONISING, 0) + ns
    after = common(_after(idle, waits), launching) if waits else []
    return {cause: found[cause] for cause in IDLE_CAUSES if found.get(cause)}, waited, total(after)


def _after(idle: Sequence[Interval], waits: Sequence[Interval]) -> list[Interval]:
    """What follows a wait in the gap that begins during it, at most as long as the wait."""
    out: list[Interval] = []
    place = 0
    for begin, end in idle:
        while place < len(waits) and waits[place][1] < begin:
            place += 1
        if place < len(waits) and waits[place][0] <= begin and waits[place][1] < end:
            low, high = waits[place]
            out.append((high, min(end, 2 * high - low)))
    return out


def _longest(work: Iterable[TraceEvent], begin: int, end: int) -> list[Kernel]:
    """(name, total nanoseconds, count) of the longest-running kernels or operators, longest first."""
    ranked = _summed((item.name, min(item.end, end) - max(item.begin, begin)) for item in work)[:_TOP]
    return [(printable(name)[:_NAME], ns, count) for name, ns, count in ranked]


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
