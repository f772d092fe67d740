"""Busy and idle time, collectives, phases and findings of a trace, and the trace as the record of a run."""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from ndd_engine.diagnose import Finding, diagnose
from ndd_engine.errors import UsageError
from ndd_engine.hardware.gpus import match
from ndd_engine.measure.timeline import (
    RUNTIME,
    Interval,
    Span,
    TraceEvent,
    by_cause,
    is_upload,
    spans,
    timeline,
    union,
)
from ndd_engine.record.events import PHASES, EndEvent, Event, KernelsEvent, RunEvent, WindowEvent
from ndd_engine.record.profile_events import CaptureTimeline
from ndd_engine.record.snapshot import Snapshot
from ndd_engine.record.state import RunState
from ndd_engine.text import printable

from .recorded_files import ENGINE, OLD_BACKWARD, PHASE_WORDS, STEP, TraceFile, read_trace, word_of

_OURS = "ndd: "
# Shorter holes between operators are Python code of the same phase.
_FORWARD_HOLE_NS = 1_000_000
_BACKWARD_HOLE_NS = 2_000_000
_EVER = 1 << 62


@dataclass(frozen=True, slots=True)
class _Stretch:
    begin: int
    end: int
    phase: str
    # Of overlapping stretches the one with the highest rank is valid.
    rank: int
    source: str


def infer(trace: TraceFile) -> tuple[list[tuple[int, str]], dict[str, str]]:
    """The phases of the main thread: (nanoseconds, phase that begins) in order, and how each phase was inferred."""
    found = list(_recorded(trace)) or [*_named(trace), *_backward(trace), *_copies(trace), *_forward(trace)]
    sources: dict[str, str] = {}
    for item in sorted(found, key=lambda item: -item.rank):
        sources.setdefault(item.phase, item.source)
    begin = min([trace.span[0], *(item.begin for item in found), *(low for low, _ in trace.steps)])
    ordered = {phase: sources[phase] for phase in PHASES if phase in sources}
    return _swept(found, begin), {**ordered, "other": "the rest"}


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
        elif (phase := PHASE_WORDS.get(word_of(name))) is not None:
            yield _Stretch(
                item.begin, item.end, phase, 2 if phase == "forward" else 3, f"range {item.name[:40]}"
            )


def _backward(trace: TraceFile) -> Iterator[_Stretch]:
    """Where the autograd engine works, in its own threads or, without a GPU, in the training thread."""
    host = [item for item in trace.events if not item.on_gpu and not item.annotation]
    engine = [item for item in host if item.name.startswith(ENGINE)]
    work = engine or [item for item in host if OLD_BACKWARD.match(item.name)]
    inside = union(((item.begin, item.end) for item in work), -_EVER, _EVER)
    others = [item.begin for item in _on_main(trace) if not item.annotation and not _has(inside, item.begin)]
    for begin, end in _joined(inside, _BACKWARD_HOLE_NS, sorted(others)):
        yield _Stretch(begin, end, "backward", 3, "work of the autograd engine")


def _copies(trace: TraceFile) -> Iterator[_Stretch]:
    """Operators that copy to the GPU."""
    copied = {item.correlation for item in trace.events if item.on_gpu and is_upload(item)} - {0}
    calls = sorted(item.begin for item in trace.events if not item.on_gpu and item.correlation in copied)
    for item in _on_main(trace):
        if item.name in ("aten::to", "aten::copy_", "aten::_to_copy"):
            place = bisect_left(calls, item.begin)
            if place < len(calls) and calls[place] <= item.end:
                yield _Stretch(item.begin, item.end, "to_device", 3, "aten::to with a copy to the GPU")


def _forward(trace: TraceFile) -> Iterator[_Stretch]:
    """The other operators of the main thread."""
    work = (
        (item.begin, item.end)
        for item in _on_main(trace)
        if not item.annotation
        and "::" in item.name
        and not item.name.startswith(("autograd", "torch::", "profiler"))
    )
    for begin, end in _joined(union(work, -_EVER, _EVER), _FORWARD_HOLE_NS):
        yield _Stretch(begin, end, "forward", 0, "other operators of the main thread")


def _has(disjoint: list[Interval], time: int) -> bool:
    place = bisect_right(disjoint, time, key=lambda item: item[0]) - 1
    return place >= 0 and time < disjoint[place][1]


def _joined(disjoint: list[Interval], hole: int, cuts: list[int] | None = None) -> Iterator[Interval]:
    """Disjoint intervals, with holes shorter than `hole` closed unless one of the sorted `cuts` lies in them."""
    cuts = cuts or []
    current: Interval | None = None
    for begin, end in disjoint:
        cut = bisect_left(cuts, current[1]) < bisect_left(cuts, begin) if current is not None else False
        if current is not None and begin - current[1] < hole and not cut:
            current = current[0], end
            continue
        if current is not None:
            yield current
        current = begin, end
    if current is not None:
        yield current


SUFFIXES = (".json", ".json.gz", ".pt.trace.json")
# More files are not read from one folder.
MANY_FILES = 1024


@dataclass(frozen=True)
class DeviceUse:
    """What one GPU did. index: None for a trace without a GPU, where the operators on the CPU count."""

    index: int | None
    name: str
    time: CaptureTimeline

    @property
    def idle(self) -> float:
        """Share of the time in which nothing ran, 0..1."""
        return 1 - self.time.busy_ns / self.time.wall_ns


@dataclass(frozen=True)
class TraceUse:
    """One trace. steps: (begin, end) in nanoseconds of the steps examined, () if the trace has none.

    whole_steps: these are the profiler's, and nothing else was examined. begin, end: what was examined. begin_t: Unix
    time of the begin in seconds, None if the trace does not tell. phases: (begin, end, phase) of the main thread.
    sources: phase -> how it was inferred. unseen: what the trace does not show of the GPUs, "" if it shows all.
    operators: whether it has any of the host. longest_range: (name, nanoseconds) of the range of the host with the most
    time outside of all phases, ("", 0) without one.
    """

    path: Path
    rank: int | None
    world_size: int | None
    begin: int
    end: int
    steps: tuple[Interval, ...]
    whole_steps: bool
    begin_t: float | None
    devices: tuple[DeviceUse, ...]
    phases: tuple[Span, ...]
    sources: dict[str, str]
    skipped: int
    unseen: str
    operators: bool
    longest_range: tuple[str, int]

    @property
    def wall_ns(self) -> int:
        return self.end - self.begin

    def phase_ns(self, begin: int, end: int) -> dict[str, int]:
        """Nanoseconds by phase between two times; adds up to their distance."""
        found: dict[str, int] = {}
        for low, high, phase in self.phases:
            if (ns := min(high, end) - max(low, begin)) > 0:
                found[phase] = found.get(phase, 0) + ns
        return found


def trace_files(paths: tuple[Path, ...]) -> list[Path]:
    """The trace files that are named, and those in the folders that are named. Raises UsageError."""
    found: list[Path] = []
    for path in paths:
        if not path.is_dir():
            found.append(path)
            continue
        inside = sorted(
            entry for entry in path.iterdir() if entry.name.endswith(SUFFIXES) and entry.is_file()
        )
        if not inside:
            raise UsageError(
                f"{path}: there is no trace in this folder (a file that ends in .json or .json.gz)"
            )
        found += inside
    if len(found) > MANY_FILES:
        raise UsageError(f"{len(found):,} traces are too many; maximum: {MANY_FILES:,}")
    return found


def examine(path: Path, whole: bool = False) -> TraceUse:
    """What the GPUs did in a trace.

    whole: from the first to the last work on a GPU, instead of the whole profiled steps. Raises UsageError.
    """
    trace = read_trace(path)
    shown = printable(str(path))
    if not trace.events:
        raise UsageError(f"{shown} cannot be analysed: {trace.unseen}")
    whole_steps = bool(trace.steps) and not whole
    # Not the first of three or more steps: the profiler is still starting in it.
    steps = trace.steps[len(trace.steps) > 2 :] if whole_steps else _steps_in(trace)
    begin, end = (steps[0][0], steps[-1][1]) if whole_steps else trace.span
    ((first, phase), *rest), sources = infer(trace)
    marks = [(min(begin, first), phase), *rest]
    devices = []
    for index in trace.devices or (None,):
        try:
            name = trace.names.get(index, "") if index is not None else "CPU"
            profile = None if index is None else match(name, None)
            found = timeline(trace.events, marks, begin, end, index is not None, index, profile)
        except ValueError:
            continue  # this GPU only worked outside of the steps
        if index is None and trace.unseen:
            name = "CPU alone: the accelerator is not in these figures"
        devices.append(DeviceUse(index, name, found))
    if not devices:
        raise UsageError(f"{shown}: there is no GPU kernel and no operator in the profiled steps")
    parts = spans(marks, begin, end)
    return TraceUse(
        path=path,
        rank=trace.rank,
        world_size=trace.world_size,
        begin=begin,
        end=end,
        steps=tuple(steps),
        whole_steps=whole_steps,
        begin_t=None if trace.epoch_ns is None else (trace.epoch_ns + begin) * 1e-9,
        devices=tuple(devices),
        phases=tuple(parts),
        sources=sources,
        skipped=trace.skipped,
        unseen=trace.unseen,
        operators=any(
            not (item.on_gpu or item.annotation or RUNTIME.match(item.name)) for item in trace.events
        ),
        longest_range=_longest_range(trace, [(low, high) for low, high, phase in parts if phase == "other"]),
    )


def _longest_range(trace: TraceFile, outside: list[Interval]) -> tuple[str, int]:
    """The innermost range of the main thread with the most time in these disjoint intervals; ("", 0) without one."""
    if not outside:
        return "", 0
    begin, end = outside[0][0], outside[-1][1]
    ranges = [
        _Stretch(item.begin, item.end, item.name, 0, "")
        for item in _on_main(trace)
        if item.annotation and not item.name.startswith(STEP) and item.begin < end and item.end > begin
    ]
    marks = _swept(ranges, min([begin, *(item.begin for item in ranges)]))
    spent = by_cause(outside, spans(marks, begin, end))
    name, ns = max(
        ((name, ns) for name, ns in spent.items() if name != "other"), key=lambda one: one[1], default=("", 0)
    )
    return printable(name)[:80], ns


def _steps_in(trace: TraceFile) -> list[Interval]:
    """The whole trace cut into its steps: those of the profiler, else the updates of the optimizer; [] without any."""
    begin, end = trace.span
    cuts = [low for low, _ in trace.steps[1:]] if trace.steps else _updates(trace)[:-1]
    if not trace.steps and not cuts and not _updates(trace):
        return []
    edges = [begin, *(cut for cut in cuts if begin < cut < end), end]
    return list(pairwise(edges))


def _updates(trace: TraceFile) -> list[int]:
    """When each update ends. Optimizers that step one after the other, without backward between, make one update."""
    found = sorted(
        (item.begin, item.end)
        for item in _on_main(trace)
        if item.annotation and item.name.startswith("Optimizer.step")
    )
    backward = sorted(item.begin for item in _backward(trace))
    ends: list[int] = []
    for begin, end in found:
        inside = bool(ends) and begin < ends[-1]
        if ends and (
            inside or (backward and bisect_left(backward, ends[-1]) == bisect_left(backward, begin))
        ):
            ends[-1] = max(ends[-1], end)
        else:
            ends.append(end)
    return ends


def record(use: TraceUse, device: DeviceUse, ranks: Sequence[TraceUse] = ()) -> Iterator[tuple[float, Event]]:
    """(Unix time in seconds, event): the trace as a finished run on one of its GPUs. ranks: all traces of the job."""
    gpu = device.index is not None
    start = use.begin_t or 0.0
    steps = use.steps or ((use.begin, use.end),)
    asked = {
        "steps": len(use.steps), "operators": use.operators, "unseen": use.unseen, "range": use.longest_range,
        "others": _others(use, device, ranks),
    }  # fmt: skip
    yield start, RunEvent(
        name=use.path.name, workload="trace", config={"trace": asked}, pid=0, host="",
        device=f"cuda:{device.index}" if gpu else "cpu", device_name=device.name, gpu=None, versions={},
        parameters=0, precision="", item="step", token=None, tokens_per_item=0, items_per_step=1,
        items_per_epoch=len(steps), steps_per_epoch=len(steps), epochs=1, total_steps=len(steps),
        model="not in a trace", data="not in a trace",
    )  # fmt: skip
    for number, (begin, end) in enumerate(steps, start=1):
        yield start + (end - use.begin) * 1e-9, _window(use, number, begin, end)
    t = start + use.wall_ns * 1e-9
    method = "kernels" if gpu else "operators"
    yield (
        t,
        KernelsEvent(
            method=method, step=len(steps), steps=len(steps), trace=str(use.path), **vars(device.time)
        ),
    )
    yield t, EndEvent("done", "end of the trace", len(steps), 0)


def _window(use: TraceUse, number: int, begin: int, end: int) -> WindowEvent:
    wall = end - begin
    phases: dict[str, Any] = {
        phase: {"host_ns": ns, "p50_ns": ns, "p95_ns": ns, "max_ns": ns, "device_ns": None}
        for phase, ns in use.phase_ns(begin, end).items()
    }
    return WindowEvent(
        step=number, epoch=1, epoch_step=number, steps=1, micro_steps=1, items=1, tokens=0, wall_ns=wall,
        step_p50_ns=wall, step_p95_ns=wall, step_max_ns=wall, phases=phases,
    )  # fmt: skip


def _others(use: TraceUse, device: DeviceUse, ranks: Sequence[TraceUse]) -> list[tuple[str, float]] | None:
    """(name, share of the time that it waits in collectives) of the other ranks; None if that is not known of all."""
    every = [(other, one) for other in ranks for one in other.devices if not (other is use and one is device)]
    if not every or not all(one.time.collective_ns for _, one in every):
        return None
    return [
        (
            (f"rank {other.rank}" if other.rank is not None else printable(other.path.name))
            + (f" on GPU {one.index}" if len(other.devices) > 1 else ""),
            one.time.exposed_ns / one.time.wall_ns,
        )
        for other, one in every
    ]


def snapshot(use: TraceUse, device: DeviceUse, ranks: Sequence[TraceUse] = ()) -> Snapshot:
    """The trace as the state of a run."""
    state = RunState()
    for t, event in record(use, device, ranks):
        state.fold(t, event)
    return state.snapshot()


def findings(use: TraceUse, device: DeviceUse, ranks: Sequence[TraceUse] = ()) -> list[Finding]:
    """The findings of the rules for a live run, as far as a trace has what they need.

    ranks: all traces of the job, to tell which of them the others wait for.
    """
    return [_as_of_trace(use, found) for found in diagnose(snapshot(use, device, ranks), few_steps=True)]


# Words about steps, and what they are in a trace without any.
_STEPLESS = (("of each step", "of the trace"), ("per step", "in the trace"), ("in a step", "in the trace"))


def _as_of_trace(use: TraceUse, found: Finding) -> Finding:
    """The finding without settings, which only a run has, and about steps only if the trace has some.

    All of its evidence is from the trace.
    """

    def worded(text: str) -> str:
        for words, instead in () if use.steps else _STEPLESS:
            text = text.replace(words, instead)
        return text

    return replace(
        found,
        title=worded(found.title),
        evidence=tuple(replace(item, text=worded(item.text), source="trace") for item in found.evidence),
        changes=tuple(replace(change, text=worded(change.text), sets=()) for change in found.changes),
    )


def to_json(uses: list[TraceUse]) -> dict[str, Any]:
    """All figures; units are in the names."""
    return {"traces": [_use_json(use, uses) for use in uses]}


def _use_json(use: TraceUse, ranks: Sequence[TraceUse]) -> dict[str, Any]:
    return {
        "file": str(use.path),
        "rank": use.rank,
        "world_size": use.world_size,
        "wall_ns": use.wall_ns,
        "steps": len(use.steps) or None,
        "begin_unix_s": use.begin_t,
        "not_recorded": use.unseen or None,
        "skipped_events": use.skipped,
        "phases_ns": use.phase_ns(use.begin, use.end),
        "phases_inferred_from": use.sources,
        "devices": [
            {
                "index": device.index,
                "name": device.name,
                **asdict(device.time),
                "hidden_collective_ns": device.time.collective_ns - device.time.exposed_ns,
                "findings": [asdict(finding) for finding in findings(use, device, ranks)],
            }
            for device in use.devices
        ],
    }
