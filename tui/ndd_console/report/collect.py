"""Reads a record of any length in one pass: values over time, and everything that happened."""

from __future__ import annotations

import contextlib
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ndd_engine.record import events
from ndd_engine.record.file import EventLog
from ndd_engine.record.rundir import RunDir

from .timeline import Curve, RunClock, RunTimeline

# Events kept of each kind; the newest ones win.
KEPT = 500
_BROKEN = (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError)
_TRAINING = ("step", "loss", "lr", "grad_norm", "loss_scale")
_TIMES = ("step_p50_ns", "step_p95_ns", "step_max_ns")
_MEMORY = ("allocated_bytes", "reserved_bytes", "peak_allocated_bytes", "free_bytes", "others_bytes")


class LateSpan(NamedTuple):
    """Steps in which a rank was late."""

    rank: int
    phase: str
    host: str
    first_step: int
    last_step: int
    most_ns: float
    ceiling: float


class Moment(NamedTuple):
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
    marks: defaultdict[str, deque[tuple[Moment, events.MarkEvent]]] = field(
        default_factory=lambda: defaultdict(_newest)
    )
    findings: deque[tuple[Moment, events.FindingEvent]] = field(default_factory=_newest)
    trials: deque[tuple[Moment, events.TrialEvent]] = field(default_factory=_newest)
    captures: deque[tuple[Moment, events.KernelsEvent]] = field(default_factory=_newest)
    resumed: deque[Moment] = field(default_factory=_newest)
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

    def marked(self, *kinds: str) -> list[tuple[Moment, events.MarkEvent]]:
        """Marks of these kinds, ordered by time."""
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
    announced = False  # the present process by its first stage, which records of early versions do not have
    began = 0.0
    ended = False
    log = EventLog(run.events)
    for t, event in _events(log):
        stage = isinstance(event, events.StageEvent) and event.name == "resume"
        resumes = stage or (isinstance(event, events.RunEvent) and event.resumed_step is not None)
        if stage or (resumes and not announced):
            history.preparation_s += history.x - began if fresh else 0.0
            clock.resume(t)
            fresh, announced, began = True, stage, clock.now
            history.resumed.append(Moment(clock.now, t, history.step))
        ended = isinstance(event, events.EndEvent) or (ended and not resumes)
        # Trials after the end of a run are not part of its time.
        if not isinstance(event, events.TrialEvent) and (not ended or isinstance(event, events.EndEvent)):
            history.x = clock.at(t)
        if isinstance(event, events.WindowEvent) and fresh:
            fresh = announced = False
            history.preparation_s += max(history.x - began - event.wall_ns * 1e-9, 0.0)
        try:
            _take(history, Moment(history.x, t, history.step), event)
        except _BROKEN:
            history.skipped += 1
    history.preparation_s += history.x - began if fresh else 0.0
    history.bytes_read = log.offset
    history.skipped += log.damaged
    return history


def _events(log: EventLog) -> Iterator[tuple[float, events.Event]]:
    with contextlib.suppress(OSError):
        yield from log.new()


def _take(history: History, at: Moment, event: events.Event) -> None:
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
            at = Moment(at.x, at.t, int(event.step))
            if event.kind == "evaluation":
                history.put(at.x, event.data.get("metrics") or {}, "metric ")
            if event.kind != "status":
                history.marks[event.kind].append((at, event))
        case events.FindingEvent():
            history.findings.append((Moment(at.x, at.t, int(event.step)), event))
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


def _ranks(history: History, at: Moment, event: events.RanksEvent) -> None:
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
