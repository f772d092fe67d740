"""The event of a profiler capture, from what the profiler recorded and what the process noted on its own clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from ndd_engine.record.event import LineTime, ModuleTime
from ndd_engine.record.events import KernelsEvent
from ndd_engine.text import printable
from ndd_watch.phases import ANCHOR

from .gpu_work import TraceEvent
from .module_times import Call, Line, Mark, ModuleMarks, line_times, module_times
from .timeline import spans, timeline


@dataclass(frozen=True)
class Noted:
    """What a process noted; times are nanoseconds on its clock.

    begin, end: of the steps. anchors: right before each of the ranges with that name. marks: (time, phase that begins).
    device: index of the GPU, None without one. names: (name, class) of the modules. calls: of modules; [] if they are
    compiled.
    """

    begin: int
    end: int
    anchors: Sequence[int]
    marks: Sequence[tuple[int, str]]
    device: int | None
    names: Sequence[tuple[str, str]] = ()
    lines: Sequence[Line] = ()
    calls: Sequence[Call] = field(default=())


def captured(seen: Sequence[TraceEvent], noted: Noted, step: int, steps: int) -> KernelsEvent:
    """What was recorded in `steps` steps, after `step` optimizer steps.

    Raises ValueError if the profiler recorded nothing, RuntimeError if its clock cannot be aligned with the other one.
    """
    gpu, device = noted.device is not None, noted.device or 0
    anchors = [item for item in seen if item.name == ANCHOR and not item.on_gpu]
    offset = _offset(anchors, noted.anchors)
    begin, end = noted.begin + offset, noted.end + offset
    marks = [(time + offset, name) for time, name in noted.marks]
    found = timeline(seen, marks, begin, end, gpu, device)
    modules: list[ModuleTime] = []
    lines: list[LineTime] = []
    if noted.calls:
        phases, thread = spans(marks, begin, end), anchors[0].thread
        calls = [(time + offset, module, line, begins) for time, module, line, begins in noted.calls]
        by_module = _marks(noted.names, [(call[0], call[1], call[3]) for call in calls], thread)
        places = [(f"{printable(file)}:{line}", printable(name)) for file, line, name in noted.lines]
        by_line = _marks(places, [(call[0], call[2], call[3]) for call in calls], thread)
        modules = module_times(seen, by_module, phases, gpu, device)
        lines = line_times(seen, by_line, phases, gpu, device)
    method = "kernels" if gpu else "operators"
    return KernelsEvent(method=method, step=step, steps=steps, modules=modules, lines=lines, **asdict(found))


def _marks(
    names: Sequence[tuple[str, str]], calls: Sequence[tuple[int, int, bool]], thread: int
) -> ModuleMarks:
    begun: list[Mark] = [(time, index) for time, index, begins in calls if begins and index >= 0]
    return ModuleMarks(names, [(time, index) for time, index, _ in calls], begun, thread)


def _offset(anchors: Sequence[TraceEvent], times: Sequence[int]) -> int:
    """How far the profiler's clock is ahead of the other one, in nanoseconds."""
    begins = sorted(item.begin for item in anchors)
    if not begins or len(begins) != len(times):
        raise RuntimeError(f"only {len(begins)} of {len(times)} ranges for aligning the clocks were kept")
    # A range always begins after its clock reading, so the smallest difference is the closest.
    return min(begin - time for begin, time in zip(begins, times, strict=True))
