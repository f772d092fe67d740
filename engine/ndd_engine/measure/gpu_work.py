"""What an event on a GPU is: kernel, copy, fill or collective, of CUDA and ROCm, and what launched it."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

# "Disjoint" intervals are sorted, non-empty and do not overlap.
Interval = tuple[int, int]

# Runtime calls, which share their correlation id with the kernel or copy that they launch.
RUNTIME = re.compile(r"(cu|cuda|hip)[A-Z]")
# Entries that newer profilers add to the GPU's line and that are not work.
_NOT_WORK = frozenset({"Stream Sync", "Event Sync", "Context Sync", "Device Sync", "Stream Wait Event"})
# CUDA has "Memcpy HtoD (Pinned -> Device)", ROCm either that or "CopyHostToDevice".
_COPIES = ("Memcpy", "CopyDeviceTo", "CopyHostTo")
_WITHIN = ("Memcpy DtoD", "CopyDeviceToDevice")
_UPLOADS = ("Memcpy HtoD", "CopyHostToDevice")
_FILLS = ("Memset", "FillBuffer")
# A copy from or to pageable memory returns when it is done. ROCm names both kinds of host memory "Host".
_BLOCKING_MEMORY = ("Pageable", "Host")
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
_GRAPH = "GraphLaunch"


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """One event of the profiler, in nanoseconds.

    thread: of the host, or the stream of the GPU. on_gpu: it ran on the GPU with index `device`. annotation: a named
    range. correlation: id that a kernel or copy shares with the runtime call that launched it, 0 if unknown. sequence:
    autograd's number, which an operator of forward shares with its node of backward, else -1. forward_thread: of a node
    of backward, the thread of that operator, else 0.
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


def convolving(seen: Sequence[TraceEvent], launched: dict[int, TraceEvent]) -> Callable[[TraceEvent], bool]:
    """Whether a kernel computes a convolution: the innermost operator around its launch does.

    Where no operator launched it, as in a CUDA graph, its name decides.
    """
    operators: dict[int, list[TraceEvent]] = {}
    for item in seen:
        if not item.on_gpu and not item.annotation and not RUNTIME.match(item.name):
            operators.setdefault(item.thread, []).append(item)
    innermost = {thread: _Innermost(found) for thread, found in operators.items()}

    def convolution(kernel: TraceEvent) -> bool:
        launch = launched.get(kernel.correlation)
        if launch is not None and not by_graph(launch) and launch.thread in innermost:
            name = innermost[launch.thread].at(launch.begin)
            if name is not None:
                return bool(_CONVOLVES.search(name))
        return bool(_CONVOLUTION.search(kernel.name)) and not _NO_CONVOLUTION.search(kernel.name)

    return convolution


class _Innermost:
    """The innermost operator of a thread at any time."""

    def __init__(self, operators: list[TraceEvent]) -> None:
        self._times: list[int] = []
        self._names: list[str | None] = []
        running: list[TraceEvent] = []
        for item in sorted(operators, key=lambda item: (item.begin, -item.end)):
            self._ended(running, item.begin)
            running.append(item)
            self._mark(item.begin, item.name)
        self._ended(running, None)

    def _ended(self, running: list[TraceEvent], time: int | None) -> None:
        while running and (time is None or running[-1].end <= time):
            end = running.pop().end
            self._mark(end, running[-1].name if running else None)

    def _mark(self, time: int, name: str | None) -> None:
        self._times.append(time)
        self._names.append(name)

    def at(self, time: int) -> str | None:
        place = bisect_right(self._times, time) - 1
        return self._names[place] if place >= 0 else None
