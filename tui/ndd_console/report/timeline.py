"""A run of any length in a bounded number of slices and points, built in one pass over its record."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise

from ndd_engine.record.event import ASIDES
from ndd_engine.record.events import WindowEvent

# Maximum number of slices and of points of a curve; neighbours merge beyond it.
CAPACITY = 512
FIRST_WIDTH_S = 0.05


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
        """The sums of one window."""
        gc = (window.gc_ns or 0, window.gc_max_ns or 0)
        part = cls(window.wall_ns, window.steps, window.items, window.device_steps, window.step, *gc)
        for name, figures in window.phases.items():
            part.host[name] = figures["host_ns"]
            if (device_ns := figures.get("device_ns")) is not None:
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
        """Time of a phase on the GPU per step."""
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
        """The sums over the whole run."""
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
        """Add the point that follows."""
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
        """The mean of all values."""
        total = sum(point.count for point in self.points)
        return sum(point.mean * point.count for point in self.points) / total if total else None
