"""A run of any length in a fixed number of stretches and points, gathered in one pass over its record."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ndd_engine.record.events import WindowEvent

# Stretches of a timeline and points of a curve at most; neighbours merge when there are more.
CAPACITY = 512
FIRST_WIDTH_S = 0.05


class RunClock:
    """Seconds of the run at a moment: the time between a process that ended and the one that went on is left out."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._before = 0.0
        self.now = 0.0

    def at(self, t: float) -> float:
        """Seconds of the run at unix time `t`; never falls, whatever the machine's clock does."""
        if self._began is None:
            self._began = t
        self.now = max(self.now, self._before + t - self._began)
        return self.now

    def go_on(self, t: float) -> None:
        """Another process begins at unix time `t`."""
        self._before, self._began = self.now, t


@dataclass(slots=True)
class Stretch:
    """Sums over a stretch of the run. host, device: nanoseconds by phase; device over `device_steps` steps."""

    wall_ns: float = 0.0
    steps: float = 0.0
    items: float = 0.0
    device_steps: float = 0.0
    step: int = 0
    gc_ns: float = 0.0
    gc_max_ns: int = 0
    host: dict[str, float] = field(default_factory=dict)
    device: dict[str, float] = field(default_factory=dict)

    def take(self, window: WindowEvent, part: float) -> None:
        """Add this part (0..1) of a window."""
        self.wall_ns += window.wall_ns * part
        self.steps += window.steps * part
        self.items += window.items * part
        self.device_steps += window.device_steps * part
        self.step = window.step
        self.gc_ns += (window.gc_ns or 0) * part
        self.gc_max_ns = max(self.gc_max_ns, window.gc_max_ns or 0)
        for name, figures in window.phases.items():
            self.host[name] = self.host.get(name, 0.0) + figures["host_ns"] * part
            device_ns = figures.get("device_ns")
            if device_ns is not None:
                self.device[name] = self.device.get(name, 0.0) + device_ns * window.device_steps * part

    def join(self, later: Stretch) -> None:
        """Add the stretch that follows."""
        for name in ("wall_ns", "steps", "items", "device_steps", "gc_ns"):
            setattr(self, name, getattr(self, name) + getattr(later, name))
        self.step = later.step or self.step
        self.gc_max_ns = max(self.gc_max_ns, later.gc_max_ns)
        for mine, theirs in ((self.host, later.host), (self.device, later.device)):
            for name, value in theirs.items():
                mine[name] = mine.get(name, 0.0) + value

    @property
    def stepping_ns(self) -> float:
        """Wall time without evaluation and checkpoints, which rates leave out."""
        return self.wall_ns - self.host.get("evaluate", 0.0) - self.host.get("checkpoint", 0.0)

    def as_window(self) -> WindowEvent:
        """The same as one window of a record, for what derives figures from windows."""
        counted = max(round(self.device_steps), 1) if self.device_steps else 0
        return WindowEvent(
            step=self.step, epoch=0, epoch_step=0, steps=math.ceil(self.steps), micro_steps=0, items=0, tokens=0,
            wall_ns=round(self.wall_ns), step_p50_ns=None, step_p95_ns=None, step_max_ns=None,
            phases={
                name: {
                    "host_ns": round(value),
                    "device_ns": self.device[name] / self.device_steps
                    if name in self.device and self.device_steps
                    else None,
                }
                for name, value in self.host.items()
            },
            device_steps=counted,
        )  # fmt: skip


class Timeline:
    """Windows over stretches of equal length; when there are too many, each becomes twice as long."""

    def __init__(self) -> None:
        self.width_s = FIRST_WIDTH_S
        self.stretches: dict[int, Stretch] = {}

    @property
    def whole(self) -> Stretch:
        """The sums of the whole run."""
        found = Stretch()
        for _, item in sorted(self.stretches.items()):
            found.join(item)
        return found

    def add(self, end_s: float, window: WindowEvent) -> None:
        """A window that ended then; it counts in every stretch that it lay in, by its part there."""
        begin_s = max(end_s - window.wall_ns * 1e-9, 0.0)
        while end_s / self.width_s >= CAPACITY:
            self._double()
        first, last = int(begin_s / self.width_s), int(end_s / self.width_s)
        if first == last:
            self.stretches.setdefault(first, Stretch()).take(window, 1.0)
            return
        for index in range(first, last + 1):
            inside = min(end_s, (index + 1) * self.width_s) - max(begin_s, index * self.width_s)
            if inside > 0:
                self.stretches.setdefault(index, Stretch()).take(window, inside / (end_s - begin_s))

    def _double(self) -> None:
        self.width_s *= 2
        self.stretches = _pairs(self.stretches)

    def columns(self, count: int) -> tuple[float, dict[int, Stretch]]:
        """(seconds of one, stretches by number) with at most `count` numbers; one that is missing was not measured."""
        width, found = self.width_s, self.stretches
        while found and max(found) >= count:
            width, found = width * 2, _pairs(found)
        # What was hardly touched says little of its time.
        return width, {
            index: item for index, item in sorted(found.items()) if item.wall_ns >= 0.02 * width * 1e9
        }


def _pairs(stretches: dict[int, Stretch]) -> dict[int, Stretch]:
    found: dict[int, Stretch] = {}
    for index, item in sorted(stretches.items()):
        target = found.setdefault(index // 2, Stretch())
        target.join(item)
    return found


@dataclass(slots=True)
class PlotPoint:
    """Values that lie next to each other: their mean, lowest and highest; first and last are seconds of the run."""

    first: float
    last: float
    mean: float
    low: float
    high: float
    count: int

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
        """One value; None and what is not a finite number leave a gap or nothing."""
        if value is None or not math.isfinite(value):
            return
        value = float(value)
        if self.points and (last := self.points[-1]).count < self._stride:
            # By hand, and not by joining points: this is done a few times for every line of a record.
            last.count += 1
            last.mean += (value - last.mean) / last.count
            last.last = x
            if value < last.low:
                last.low = value
            elif value > last.high:
                last.high = value
            return
        self.points.append(PlotPoint(x, x, value, value, value, 1))
        if len(self.points) > CAPACITY:
            merged: list[PlotPoint] = []
            for index, point in enumerate(self.points):
                if index % 2:
                    merged[-1].join(point)
                else:
                    merged.append(point)
            self.points = merged
            self._stride *= 2

    def pieces(self, whole_s: float) -> list[list[PlotPoint]]:
        """The points in pieces, cut where nothing was recorded for much longer than usual."""
        if not self.points:
            return []
        steps = sorted(b.first - a.last for a, b in zip(self.points, self.points[1:], strict=False))
        usual = steps[len(steps) // 2] if steps else 0.0
        limit = max(6 * usual, 0.02 * whole_s)
        out = [[self.points[0]]]
        for point in self.points[1:]:
            if point.first - out[-1][-1].last > limit:
                out.append([])
            out[-1].append(point)
        return out

    @property
    def mean(self) -> float | None:
        """Of all values."""
        total = sum(point.count for point in self.points)
        return sum(point.mean * point.count for point in self.points) / total if total else None

    def __bool__(self) -> bool:
        return bool(self.points)
