"""One pass over a record of any length: what the page shows over time, and everything that happened."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from ndd_engine.record.events import (
    EndEvent,
    Event,
    FindingEvent,
    KernelsEvent,
    MarkEvent,
    MemoryEvent,
    RunEvent,
    SampleEvent,
    StacksEvent,
    StageEvent,
    TrialEvent,
    WindowEvent,
    parse,
)
from ndd_engine.record.rundir import RunDir

from .timeline import Curve, RunClock, Timeline

# What a page can show of things that happen again and again; of more of one kind, the newest are kept.
KEPT = 500
_FOLD = b'"type":"fold"'
_BROKEN = (KeyError, TypeError, ValueError, AttributeError, IndexError)


@dataclass(frozen=True, slots=True)
class At:
    """When something happened: seconds of the run, unix seconds and the optimizer step."""

    x: float
    t: float
    step: int


@dataclass
class Collected:
    """What a record holds over time. skipped: lines that are torn, unknown or not what their type promises."""

    timeline: Timeline = field(default_factory=Timeline)
    curves: dict[str, Curve] = field(default_factory=dict)
    steps: Curve = field(default_factory=Curve)
    marks: dict[str, deque[tuple[At, MarkEvent]]] = field(default_factory=dict)
    findings: deque[tuple[At, FindingEvent]] = field(default_factory=lambda: deque(maxlen=KEPT))
    trials: deque[tuple[At, TrialEvent]] = field(default_factory=lambda: deque(maxlen=KEPT))
    captures: deque[tuple[At, KernelsEvent]] = field(default_factory=lambda: deque(maxlen=KEPT))
    resumed: deque[At] = field(default_factory=lambda: deque(maxlen=KEPT))
    run: RunEvent | None = None
    stacks: StacksEvent | None = None
    gc_watched: bool = False
    bytes_read: int = 0
    skipped: int = 0
    step: int = 0
    x: float = 0.0

    def marked(self, *kinds: str) -> list[tuple[At, MarkEvent]]:
        """Marks of these kinds in their order."""
        found = [item for kind in kinds for item in self.marks.get(kind, ())]
        return sorted(found, key=lambda item: item[0].x)

    @property
    def evaluations(self) -> list[tuple[At, MarkEvent]]:
        """Evaluations in their order."""
        return self.marked("evaluation")

    def curve(self, name: str) -> Curve:
        """A curve by its name; an empty one where nothing of it was recorded."""
        return self.curves.get(name) or Curve()

    def put(self, name: str, x: float, value: object) -> None:
        """A value of a curve; None is left out."""
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            self.curves.setdefault(name, Curve()).add(x, value)


def collect(run: RunDir) -> Collected:
    """Read a run's record to its present end. A record that is not there is an empty one."""
    found = Collected()
    clock = RunClock()
    fresh = True  # nothing of this process was seen yet
    ended = False
    for line in _lines(run, found):
        item = parse(line)
        if item is None or not math.isfinite(item[0]):
            found.skipped += 1
            continue
        t, event = item
        resumes = (isinstance(event, StageEvent) and event.name == "resume") or (
            isinstance(event, RunEvent) and event.resumed_step is not None
        )
        if resumes and not fresh:
            clock.go_on(t)
            fresh = True
            found.resumed.append(At(clock.now, t, found.step))
        elif isinstance(event, WindowEvent):
            fresh = False
        ended = isinstance(event, EndEvent) or (ended and not resumes)
        # Trials of a run that ended, an hour later perhaps, are no time of the run.
        if not isinstance(event, TrialEvent) and (not ended or isinstance(event, EndEvent)):
            found.x = clock.at(t)
        try:
            _take(found, At(found.x, t, found.step), event)
        except _BROKEN:
            found.skipped += 1
    return found


def _lines(run: RunDir, found: Collected) -> Iterator[bytes]:
    """The whole lines of the log, without the folded states, which repeat what is in the others."""
    try:
        with run.events.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    return  # torn, or being written
                found.bytes_read += len(line)
                if _FOLD not in line[:40]:
                    yield line
    except OSError:
        return


def _take(found: Collected, at: At, event: Event) -> None:
    if isinstance(event, WindowEvent):
        _window(found, at, event)
    elif isinstance(event, SampleEvent):
        _sample(found, at, event)
    elif isinstance(event, MemoryEvent):
        for name in (
            "allocated_bytes",
            "reserved_bytes",
            "peak_allocated_bytes",
            "free_bytes",
            "others_bytes",
        ):
            found.put(name, at.x, getattr(event, name))
    elif isinstance(event, MarkEvent):
        here = At(at.x, at.t, int(event.step))
        if event.kind == "evaluation":
            metrics = event.data.get("metrics") or {}
            for name, value in metrics.items():
                found.put(f"metric {name}", at.x, value)
        if event.kind != "status":
            found.marks.setdefault(event.kind, deque(maxlen=KEPT)).append((here, event))
    elif isinstance(event, FindingEvent):
        found.findings.append((At(at.x, at.t, int(event.step)), event))
    elif isinstance(event, TrialEvent):
        found.trials.append((at, event))
    elif isinstance(event, StacksEvent):
        found.stacks = event
    elif isinstance(event, KernelsEvent):
        found.captures.append((at, event))
    elif isinstance(event, RunEvent):
        found.run = event
        if event.resumed_step is not None:
            found.step = int(event.resumed_step)


def _window(found: Collected, at: At, event: WindowEvent) -> None:
    found.step = int(event.step)
    found.steps.add(at.x, event.step)
    found.put("loss", at.x, event.loss)
    found.put("lr", at.x, event.lr)
    found.put("grad_norm", at.x, event.grad_norm)
    found.put("loss_scale", at.x, event.loss_scale)
    if event.profiled:
        return  # a profiler made these steps slow
    found.timeline.add(at.x, event)
    found.gc_watched = found.gc_watched or event.gc_ns is not None
    for name in ("step_p50_ns", "step_p95_ns", "step_max_ns") if event.steps else ():
        found.put(name, at.x, getattr(event, name))


def _sample(found: Collected, at: At, event: SampleEvent) -> None:
    for prefix, table in (("host", event.host), ("card", event.card or {})):
        for name, value in table.items():
            if isinstance(value, (int, float)):
                found.put(f"{prefix} {name}", at.x, value)
