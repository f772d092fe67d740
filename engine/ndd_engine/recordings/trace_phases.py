"""Infers the phases of a training step from the ranges and operators of a trace.

A trace of this program contains the phases as ranges. In others, torch itself marks data loading and the optimizer;
backward is where the autograd engine works, and forward is what remains of the training thread's operators.
"""

from __future__ import annotations

import heapq
import re
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

from ndd_engine.measure.timeline import TraceEvent, union
from ndd_engine.record.events import PHASES

from .trace_file import TraceFile

_OURS = "ndd: "
# Shorter holes between operators are Python code of the same phase.
_FORWARD_HOLE_NS = 1_000_000
_BACKWARD_HOLE_NS = 2_000_000
_EVER = 1 << 62
# Operators of backward in traces before 2021-07, which do not contain the engine's own ranges.
_OLD_BACKWARD = re.compile(r"\w+Backward\d*$|torch::autograd::AccumulateGrad")
# First words of ranges that libraries and people write -> phase.
_WORDS = {
    "backward": "backward",
    "forward": "forward",
    "distributeddataparallel.forward": "forward",
    "fullyshardeddataparallel.forward": "forward",
    "loss": "loss",
    "dataloader": "data_wait",
    "data": "data_wait",
    "evaluate": "evaluate",
    "validation": "evaluate",
}


@dataclass(frozen=True)
class Phases:
    """marks: (time in nanoseconds, phase that begins), in order. sources: phase -> how it was inferred."""

    marks: list[tuple[int, str]]
    sources: dict[str, str]


@dataclass(frozen=True, slots=True)
class _Stretch:
    begin: int
    end: int
    phase: str
    # Of overlapping stretches the one with the highest rank is valid.
    rank: int
    source: str


def infer(trace: TraceFile) -> Phases:
    """The phases of the training thread."""
    found = list(_recorded(trace)) or [*_named(trace), *_backward(trace), *_copies(trace), *_forward(trace)]
    sources: dict[str, str] = {}
    for item in sorted(found, key=lambda item: -item.rank):
        sources.setdefault(item.phase, item.source)
    begin = min([trace.span[0], *(item.begin for item in found), *(low for low, _ in trace.steps)])
    ordered = {phase: sources[phase] for phase in PHASES if phase in sources}
    return Phases(_swept(found, begin), {**ordered, "other": "the rest"})


def _swept(found: list[_Stretch], begin: int) -> list[tuple[int, str]]:
    """Marks from overlapping stretches."""
    marks = [(begin, "other")]
    edges = sorted({edge for item in found for edge in (item.begin, item.end)})
    waiting = sorted(found, key=lambda item: item.begin)
    active: list[tuple[int, int, int, str]] = []
    place = 0
    for edge in edges:
        while place < len(waiting) and waiting[place].begin <= edge:
            item = waiting[place]
            heapq.heappush(active, (-item.rank, -item.begin, item.end, item.phase))
            place += 1
        while active and active[0][2] <= edge:
            heapq.heappop(active)
        phase = active[0][3] if active else "other"
        if phase != marks[-1][1]:
            marks.append((edge, phase))
    return marks


def _on_main(trace: TraceFile) -> Iterator[TraceEvent]:
    return (item for item in trace.events if not item.on_gpu and item.thread == trace.main)


def _recorded(trace: TraceFile) -> Iterator[_Stretch]:
    """The phases that this program wrote."""
    for item in _on_main(trace):
        if item.annotation and item.name.startswith(_OURS):
            phase = item.name.removeprefix(_OURS).partition("/")[0]
            if phase in PHASES:
                yield _Stretch(item.begin, item.end, phase, 1, "recorded by ndd-console")


def _named(trace: TraceFile) -> Iterator[_Stretch]:
    """Ranges of torch and of the user."""
    for item in _on_main(trace):
        if not item.annotation:
            continue
        name = item.name.strip("# ")
        if name.startswith("enumerate(DataLoader)"):
            yield _Stretch(item.begin, item.end, "data_wait", 4, "range enumerate(DataLoader)")
        elif name.startswith("Optimizer.step"):
            yield _Stretch(item.begin, item.end, "optimizer", 4, "range Optimizer.step")
        elif name.startswith("Optimizer.zero_grad"):
            yield _Stretch(item.begin, item.end, "zero_grad", 4, "range Optimizer.zero_grad")
        elif (phase := _WORDS.get(name.partition(" ")[0].lower().rstrip(":"))) is not None:
            yield _Stretch(
                item.begin, item.end, phase, 2 if phase == "forward" else 3, f"range {item.name[:40]}"
            )


def _backward(trace: TraceFile) -> Iterator[_Stretch]:
    """Where the autograd engine works, in its own threads or, without a GPU, in the training thread."""
    host = [item for item in trace.events if not item.on_gpu and not item.annotation]
    engine = [item for item in host if item.name.startswith("autograd::engine::evaluate_function")]
    work = engine or [item for item in host if _OLD_BACKWARD.match(item.name)]
    for begin, end in _joined(((item.begin, item.end) for item in work), _BACKWARD_HOLE_NS):
        yield _Stretch(begin, end, "backward", 3, "work of the autograd engine")


def _copies(trace: TraceFile) -> Iterator[_Stretch]:
    """Operators that copy to the GPU."""
    copied = {item.correlation for item in trace.events if item.on_gpu and "HtoD" in item.name} - {0}
    calls = sorted(item.begin for item in trace.events if not item.on_gpu and item.correlation in copied)
    for item in _on_main(trace):
        if item.name in ("aten::to", "aten::copy_", "aten::_to_copy"):
            place = bisect_left(calls, item.begin)
            if place < len(calls) and calls[place] <= item.end:
                yield _Stretch(item.begin, item.end, "to_device", 3, "aten::to with a copy to the GPU")


def _forward(trace: TraceFile) -> Iterator[_Stretch]:
    """The other operators of the training thread."""
    work = (
        (item.begin, item.end)
        for item in _on_main(trace)
        if not item.annotation
        and "::" in item.name
        and not item.name.startswith(("autograd", "torch::", "profiler"))
    )
    for begin, end in _joined(work, _FORWARD_HOLE_NS):
        yield _Stretch(begin, end, "forward", 0, "other operators of the training thread")


def _joined(intervals: Iterator[tuple[int, int]], hole: int) -> Iterator[tuple[int, int]]:
    """The union of intervals, with holes shorter than `hole` closed."""
    current: tuple[int, int] | None = None
    for begin, end in union(intervals, -_EVER, _EVER):
        if current is not None and begin - current[1] < hole:
            current = current[0], end
            continue
        if current is not None:
            yield current
        current = begin, end
    if current is not None:
        yield current
