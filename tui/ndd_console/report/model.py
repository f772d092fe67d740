"""The data of a report: a record of any length read in one pass, its newest snapshot and findings."""

from __future__ import annotations

import contextlib
import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from ndd_console.words.blocks import Block, Curves, Kind, Line, Point, Time
from ndd_console.words.finding import Diagnosis, DiagnosisResult
from ndd_engine.diagnose.worker_facts import workers_figures
from ndd_engine.record import events
from ndd_engine.record.event import ASIDES, ranks_figures
from ndd_engine.record.events import WindowEvent
from ndd_engine.record.figures import figures
from ndd_engine.record.file import EventLog, RunReader
from ndd_engine.record.rundir import RunDir
from ndd_engine.record.snapshot import Snapshot

# Maximum number of slices and of points of a curve; neighbours merge beyond it.
CAPACITY = 512
FIRST_WIDTH_S = 0.05

# Events kept of each kind; the newest ones win.
KEPT = 500
_BROKEN = (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError)
_TRAINING = ("step", "loss", "lr", "grad_norm", "loss_scale")
_TIMES = ("step_p50_ns", "step_p95_ns", "step_max_ns")
_MEMORY = ("allocated_bytes", "reserved_bytes", "peak_allocated_bytes", "free_bytes", "others_bytes")
SLICES = 256  # maximum number of slices in a plot


class RunClock:
    """Seconds since the start of the run, without the time between a process that ended and the one that resumed."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._before = 0.0
        self.now = 0.0

    def at(self, t: float) -> float:
        """Seconds of the run at unix time `t`; never decreases, even if the system clock does."""
        if self._began is None:
            self._began = t
        self.now = max(self.now, self._before + t - self._began)
        return self.now

    def resume(self, t: float) -> None:
        """Another process resumes the run at unix time `t`."""
        self._before, self._began = self.now, t


@dataclass(slots=True)
class Slice:
    """Sums over a part of the run. host, device: nanoseconds by phase; device over `device_steps` steps."""

    wall_ns: float = 0.0
    steps: float = 0.0
    items: float = 0.0
    device_steps: float = 0.0
    step: int = 0
    gc_ns: float = 0.0
    gc_max_ns: int = 0
    host: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    device: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    @classmethod
    def of(cls, window: WindowEvent) -> Slice:
        gc = (window.gc_ns or 0, window.gc_max_ns or 0)
        part = cls(window.wall_ns, window.steps, window.items, window.device_steps, window.step, *gc)
        for name, times in window.phases.items():
            part.host[name] = times["host_ns"]
            if (device_ns := times.get("device_ns")) is not None:
                part.device[name] = device_ns * (1 if name in ASIDES else window.device_steps)
        return part

    def add(self, later: Slice, part: float = 1.0) -> None:
        """Add this part (0..1) of the slice that follows."""
        for name in ("wall_ns", "steps", "items", "device_steps", "gc_ns"):
            setattr(self, name, getattr(self, name) + getattr(later, name) * part)
        self.step = later.step or self.step
        self.gc_max_ns = max(self.gc_max_ns, later.gc_max_ns)
        for mine, theirs in ((self.host, later.host), (self.device, later.device)):
            for name, value in theirs.items():
                mine[name] += value * part

    @property
    def stepping_ns(self) -> float:
        """Wall time without evaluation and checkpoints, which rates leave out."""
        return self.wall_ns - self.host.get("evaluate", 0.0) - self.host.get("checkpoint", 0.0)

    def device_step_ns(self, name: str) -> float | None:
        count = self.steps if name in ASIDES else self.device_steps
        return self.device[name] / count if name in self.device and count else None

    def as_window(self) -> WindowEvent:
        """The same sums as a window of the record, for functions that derive figures from windows."""
        return WindowEvent(
            step=self.step, epoch=0, epoch_step=0, steps=math.ceil(self.steps), micro_steps=0, items=0, tokens=0,
            wall_ns=round(self.wall_ns), step_p50_ns=None, step_p95_ns=None, step_max_ns=None,
            phases={
                name: {
                    "host_ns": round(value),
                    "device_ns": self.device.get(name) if name in ASIDES else self.device_step_ns(name),
                }
                for name, value in self.host.items()
            },
            device_steps=max(round(self.device_steps), 1) if self.device_steps else 0,
        )  # fmt: skip


class RunTimeline:
    """Windows summed over slices of equal length; slices double in length when there are too many."""

    def __init__(self) -> None:
        self.width_s = FIRST_WIDTH_S
        self._slices: dict[int, Slice] = defaultdict(Slice)

    @property
    def whole(self) -> Slice:
        total = Slice()
        for _, part in sorted(self._slices.items()):
            total.add(part)
        return total

    def add(self, end_s: float, window: WindowEvent) -> None:
        """Add a window that ended at `end_s`, split over the slices it overlaps."""
        begin_s = max(end_s - window.wall_ns * 1e-9, 0.0)
        while end_s / self.width_s >= CAPACITY:
            self.width_s, self._slices = self.width_s * 2, _pairs(self._slices)
        first, last = int(begin_s / self.width_s), int(end_s / self.width_s)
        whole = Slice.of(window)
        for index in range(first, last + 1):
            inside = min(end_s, (index + 1) * self.width_s) - max(begin_s, index * self.width_s)
            part = inside / (end_s - begin_s) if first < last else 1.0
            if part > 0:
                self._slices[index].add(whole, part)

    def slices(self, count: int) -> tuple[float, dict[int, Slice]]:
        """(length in seconds, slices by index) with indices below `count`; missing ones were not measured."""
        width, parts = self.width_s, self._slices
        while parts and max(parts) >= count:
            width, parts = width * 2, _pairs(parts)
        # A slice with hardly any measured time says little.
        return width, {i: item for i, item in sorted(parts.items()) if item.wall_ns >= 0.02 * width * 1e9}


def _pairs(slices: dict[int, Slice]) -> dict[int, Slice]:
    merged: dict[int, Slice] = defaultdict(Slice)
    for index, part in sorted(slices.items()):
        merged[index // 2].add(part)
    return merged


@dataclass(slots=True)
class PlotPoint:
    """Mean, lowest and highest of neighbouring values. first, last: seconds of the run."""

    first: float
    last: float
    mean: float
    low: float
    high: float
    count: int = 1

    def join(self, later: PlotPoint) -> None:
        count = self.count + later.count
        self.mean += (later.mean - self.mean) * (later.count / count)
        self.last, self.count = later.last, count
        self.low, self.high = min(self.low, later.low), max(self.high, later.high)

    @property
    def x(self) -> float:
        return (self.first + self.last) / 2


class Curve:
    """Values over the time of the run, in at most CAPACITY points."""

    def __init__(self) -> None:
        self.points: list[PlotPoint] = []
        self._stride = 1

    def add(self, x: float, value: float | None) -> None:
        """Add a value; None, NaN and infinity are ignored."""
        if value is None or not math.isfinite(value):
            return
        point = PlotPoint(x, x, float(value), float(value), float(value))
        if self.points and self.points[-1].count < self._stride:
            self.points[-1].join(point)
            return
        self.points.append(point)
        if len(self.points) > CAPACITY:
            for earlier, later in zip(self.points[::2], self.points[1::2], strict=False):
                earlier.join(later)
            self.points = self.points[::2]
            self._stride *= 2

    def pieces(self, whole_s: float) -> list[list[PlotPoint]]:
        """The points in pieces, cut where nothing was recorded for much longer than usual."""
        if not self.points:
            return []
        gaps = sorted(b.first - a.last for a, b in pairwise(self.points))
        usual = gaps[len(gaps) // 2] if gaps else 0.0
        limit = max(6 * usual, 0.02 * whole_s)
        out = [[self.points[0]]]
        for point in self.points[1:]:
            if point.first - out[-1][-1].last > limit:
                out.append([])
            out[-1].append(point)
        return out

    @property
    def mean(self) -> float | None:
        total = sum(point.count for point in self.points)
        return sum(point.mean * point.count for point in self.points) / total if total else None


class LateSpan(NamedTuple):
    """Steps in which a rank was late."""

    rank: int
    phase: str
    host: str
    first_step: int
    last_step: int
    most_ns: float
    ceiling: float


class RunMoment(NamedTuple):
    """When something happened: seconds of the run, unix seconds and the optimizer step."""

    x: float
    t: float
    step: int


def _newest() -> deque[Any]:
    return deque(maxlen=KEPT)


@dataclass
class History:
    """A run over time. skipped: number of damaged lines. preparation_s: before the first steps, of all processes."""

    timeline: RunTimeline = field(default_factory=RunTimeline)
    curves: defaultdict[str, Curve] = field(default_factory=lambda: defaultdict(Curve))
    marks: defaultdict[str, deque[tuple[RunMoment, events.MarkEvent]]] = field(
        default_factory=lambda: defaultdict(_newest)
    )
    findings: deque[tuple[RunMoment, events.FindingEvent]] = field(default_factory=_newest)
    trials: deque[tuple[RunMoment, events.TrialEvent]] = field(default_factory=_newest)
    captures: deque[tuple[RunMoment, events.KernelsEvent]] = field(default_factory=_newest)
    resumed: deque[RunMoment] = field(default_factory=_newest)
    late: deque[LateSpan] = field(default_factory=_newest)
    still_late: bool = False  # whether the newest window belongs to the newest of `late`
    run: events.RunEvent | None = None
    stacks: events.StacksEvent | None = None
    functions: events.FunctionsEvent | None = None
    texts: events.TextsEvent | None = None
    gc_watched: bool = False
    bytes_read: int = 0
    skipped: int = 0
    step: int = 0
    x: float = 0.0
    preparation_s: float = 0.0

    def marked(self, *kinds: str) -> list[tuple[RunMoment, events.MarkEvent]]:
        marks = [item for kind in kinds for item in self.marks[kind]]
        return sorted(marks, key=lambda item: item[0].x)

    def put(self, x: float, values: Mapping[str, object], prefix: str = "") -> None:
        """Add values to the curves of these names; anything but a number is ignored."""
        for name, value in values.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                self.curves[prefix + name].add(x, value)


def collect(run: RunDir) -> History:
    """Read a run's record up to its current end. A missing record is an empty one."""
    history = History()
    clock = RunClock()
    fresh = True  # no step of this process yet
    began = 0.0
    ended = False
    log = EventLog(run.events)
    for t, event in _events(log):
        resumes = isinstance(event, events.StageEvent) and event.name == "resume"
        if resumes:
            history.preparation_s += history.x - began if fresh else 0.0
            clock.resume(t)
            fresh, began = True, clock.now
            history.resumed.append(RunMoment(clock.now, t, history.step))
        ended = isinstance(event, events.EndEvent) or (ended and not resumes)
        # Trials after the end of a run are not part of its time.
        if not isinstance(event, events.TrialEvent) and (not ended or isinstance(event, events.EndEvent)):
            history.x = clock.at(t)
        if isinstance(event, events.WindowEvent) and fresh:
            fresh = False
            history.preparation_s += max(history.x - began - event.wall_ns * 1e-9, 0.0)
        try:
            _take(history, RunMoment(history.x, t, history.step), event)
        except _BROKEN:
            history.skipped += 1
    history.preparation_s += history.x - began if fresh else 0.0
    history.bytes_read = log.offset
    history.skipped += log.damaged
    return history


def _events(log: EventLog) -> Iterator[tuple[float, events.Event]]:
    with contextlib.suppress(OSError):
        yield from log.new()


def _take(history: History, at: RunMoment, event: events.Event) -> None:
    match event:
        case events.WindowEvent():
            history.step = int(event.step)
            history.put(at.x, {name: getattr(event, name) for name in _TRAINING})
            if not event.profiled:  # the profiler slows these steps down
                history.timeline.add(at.x, event)
                history.gc_watched = history.gc_watched or event.gc_ns is not None
                history.put(at.x, {name: getattr(event, name) for name in _TIMES} if event.steps else {})
        case events.RanksEvent():
            _ranks(history, at, event)
        case events.SampleEvent():
            history.put(at.x, event.host, "host ")
            history.put(at.x, event.gpu or {}, "gpu ")
        case events.MemoryEvent():
            history.put(at.x, {name: getattr(event, name) for name in _MEMORY})
        case events.ScalarsEvent():
            history.put(at.x, event.values, "own ")
        case events.TextsEvent():
            history.texts = event
        case events.MarkEvent():
            at = RunMoment(at.x, at.t, int(event.step))
            if event.kind == "evaluation":
                history.put(at.x, event.data.get("metrics") or {}, "metric ")
            if event.kind != "status":
                history.marks[event.kind].append((at, event))
        case events.FindingEvent():
            history.findings.append((RunMoment(at.x, at.t, int(event.step)), event))
        case events.TrialEvent():
            history.trials.append((at, event))
        case events.StacksEvent():
            history.stacks = event
        case events.FunctionsEvent():
            if not event.inside:
                history.functions = event
        case events.KernelsEvent():
            history.captures.append((at, event))
        case events.RunEvent():
            history.run = event
            if event.resumed_step is not None:
                history.step = int(event.resumed_step)


def _ranks(history: History, at: RunMoment, event: events.RanksEvent) -> None:
    """Exchange and skew as shares of the wall time of a window, and when which rank was late."""
    late = event.late
    if event.steps and event.wall_ns:
        shares = {"exchange": event.exchange_ns / event.wall_ns, "skew": event.skew_ns / event.wall_ns}
        if late is not None:
            shares["late_ns"] = late["late_ns"]
        history.put(at.x, shares, "ranks ")
    if late is None:
        history.still_late = False
        return
    before = history.late[-1] if history.still_late else None
    first, most_ns, ceiling = late.get("since_step") or event.step, late["late_ns"], late["ceiling"]
    host = late.get("host", "")
    if before is not None and (before.rank, before.phase) == (late["rank"], late["phase"]):
        history.late.pop()
        first, host = before.first_step, before.host
        most_ns, ceiling = max(before.most_ns, most_ns), max(before.ceiling, ceiling)
    history.late.append(LateSpan(late["rank"], late["phase"], host, first, event.step, most_ns, ceiling))
    history.still_late = True


@dataclass(frozen=True)
class Report:
    """A run as of `made_t` (unix seconds)."""

    directory: RunDir
    snapshot: Snapshot
    diagnosis: DiagnosisResult
    data: History
    made_t: float

    @property
    def name(self) -> str:
        return self.directory.name

    @property
    def time(self) -> Time:
        steps = sorted((point.last, round(point.high)) for point in self.data.curves["step"].points)
        return Time(self.data.x, tuple(steps), tuple(pauses(self.data)))

    @property
    def paused_s(self) -> float:
        return sum((end - begin for begin, end in pauses(self.data)), 0.0)

    def line(
        self, key: str, name: str, tint: str, scale: float = 1.0, band: bool = False, dots: bool = False
    ) -> Line | None:
        """A recorded curve times `scale`, or None. band: with the lowest and highest value of each point."""
        curve = self.data.curves[key]
        if curve.mean is None:
            return None
        curve_pieces = curve.pieces(self.data.x)
        band = band and any(point.count > 1 for point in curve.points)
        pieces = tuple(tuple((point.x, point.mean * scale) for point in piece) for piece in curve_pieces)
        bands = tuple(
            tuple((p.x, p.low * scale, p.high * scale) for p in piece) for piece in curve_pieces if band
        )
        return Line(name, tint, pieces, bands, dots, curve.mean * scale)

    def sliced(
        self, name: str, tint: str, mean: float, value: Callable[[Slice], float | None]
    ) -> Line | None:
        """A value of each slice as a line, cut where more than two slices have none; None without any value."""
        width, slices = self.data.timeline.slices(SLICES)
        values = {index: shown for index, item in slices.items() if (shown := value(item)) is not None}
        pieces: list[list[Point]] = []
        for index, shown in values.items():
            if not values.keys() & {index - 1, index - 2, index - 3}:
                pieces.append([])
            pieces[-1].append(((index + 0.5) * width, shown))
        return Line(name, tint, tuple(map(tuple, pieces)), mean=mean) if pieces else None

    def plot(
        self,
        title: str,
        kind: Kind,
        *lines: Line | None,
        unit: str = "",
        log_above: float = math.inf,
        **more: Any,
    ) -> list[Block]:
        """A plot of the lines that are not None, or []. log_above: highest to lowest value for a logarithmic axis."""
        shown = tuple(line for line in lines if line is not None)
        values = [value for line in shown for _, value in line.points]
        log = bool(values) and min(values) > 0 and max(values) > log_above * min(values)
        return [Curves(title, kind, unit, shown, self.time, log=log, **more)] if shown else []

    def to_json(self) -> dict[str, Any]:
        """The figures of the report as JSON values; null means unknown."""
        snapshot, data, idle = self.snapshot, self.data, self.snapshot.idle
        whole = data.timeline.whole
        return {
            "run": self.name,
            "status": snapshot.status,
            "reason": snapshot.reason or None,
            "step": snapshot.step,
            "whole_s": data.x,
            "preparation_s": data.preparation_s,
            "training_s": snapshot.elapsed_s,
            "paused_s": self.paused_s,
            "findings": [finding.to_dict() for finding in self.diagnosis.findings],
            "figures": figures(snapshot),
            "phases_s": {name: value * 1e-9 for name, value in whole.host.items()},
            "measured_s": whole.wall_ns * 1e-9,
            "ranks": None if snapshot.ranks is None else ranks_figures(snapshot.ranks),
            "workers": workers_figures(snapshot),
            "idle": {"share": idle.share, "method": idle.method, "causes": dict(idle.causes)},
            "evaluations": [
                {"step": at.step, "metrics": mark.data.get("metrics"), "seconds": mark.data.get("seconds")}
                for at, mark in data.marked("evaluation")
            ],
            "scalars": {name: trend[-1][1] for name, trend in snapshot.scalars if trend},
            "samples": None if data.texts is None else {"step": data.texts.step, "texts": data.texts.texts},
            "trials": [asdict(trial) for _, trial in data.trials],
            "not_in_effect": [setting.name for setting in snapshot.settings if setting.in_effect is False],
            "warnings": snapshot.warnings,
            "skipped_lines": data.skipped,
            "capture": None if snapshot.kernels is None else asdict(snapshot.kernels),
        }


def load(directory: RunDir) -> Report:
    """Read a run's record; of a live run, what is written so far."""
    reader = RunReader(directory)
    reader.poll()
    snapshot = reader.snapshot()
    return Report(directory, snapshot, Diagnosis().of(snapshot), collect(directory), time.time())


def pauses(data: History) -> list[tuple[float, float]]:
    """Pauses as (begin, end) in seconds of the run; an open one lasts until the next process or the end."""
    spans: list[tuple[float, float]] = []
    began: float | None = None
    for at, mark in data.marked("pause", "resume"):
        if mark.kind == "pause":
            began = at.x
        elif began is not None:
            spans.append((began, at.x))
            began = None
    if began is not None:
        spans.append((began, next((at.x for at in data.resumed if at.x >= began), data.x)))
    return spans
