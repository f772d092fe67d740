"""The step time of a run from its beginning on, in a bounded number of points."""

from __future__ import annotations

from dataclasses import dataclass, field

from .event import Count, Figure
from .events import PHASES, WindowEvent

# Phases that are outside of the steps.
_ASIDE = ("evaluate", "checkpoint")
_FIRST_BATCH = "data_wait/first_batch"
# Most points, and how many become one when there are so many.
MOST_POINTS, MERGED = 128, 4

# (steps until its end, nanoseconds of a step, items of a step, nanoseconds of a step by phase in the order of PHASES,
# seconds from the beginning of the first window until its end).
Point = tuple[Count, Count, Count, list[Count], Figure]


@dataclass(slots=True)
class Pace:
    """The times of the steps, by windows of about a second without evaluations, checkpoints and profiled steps.

    points: oldest first. Each is the fastest of four of the level before, those again of four, and so on: whatever
    slows down a part of the windows, such as another program, leaves no trace. levels: points of each level that are
    not merged yet. begun: seconds of the record at which the first window began.
    """

    points: list[Point] = field(default_factory=list)
    levels: list[list[Point]] = field(default_factory=list)
    begun: Figure | None = None

    def add(self, window: WindowEvent, t: float) -> None:
        """Add a window that ends at `t` seconds, unless it tells nothing of usual steps."""
        if self.begun is None:
            self.begun = t - window.wall_ns * 1e-9
        if window.profiled or not window.steps or not window.step_p50_ns:
            return
        point: Point = (
            window.step, int(window.step_p50_ns), window.items // window.steps,
            [_host_ns(window, name) // window.steps for name in PHASES], t - self.begun,
        )  # fmt: skip
        for level in self.levels:
            level.append(point)
            if len(level) < MERGED:
                return
            point = _merged(level)
            level.clear()
        self.points.append(point)
        if len(self.points) == MOST_POINTS:
            groups = range(0, MOST_POINTS, MERGED)
            self.points = [_merged(self.points[begin : begin + MERGED]) for begin in groups]
            self.levels.append([])

    def cut(self, step: int) -> None:
        """Forget what comes after a step: a resumed run repeats those steps."""
        self.points = [point for point in self.points if point[0] <= step]
        self.levels = [[point for point in level if point[0] <= step] for level in self.levels]

    def view(self) -> tuple[Point, ...]:
        """The points, including those of the highest level that are not merged yet."""
        return (*self.points, *(self.levels[-1] if self.levels else ()))


def _merged(points: list[Point]) -> Point:
    """The fastest of these points, at the step and the time of the last one."""
    _, step_ns, items, phases, _ = min(points, key=lambda point: point[1])
    return points[-1][0], step_ns, items, phases, points[-1][4]


def _host_ns(window: WindowEvent, phase: str) -> int:
    if phase in _ASIDE or phase not in window.phases:
        return 0
    first = window.phases.get(_FIRST_BATCH, {}) if phase == "data_wait" else {}
    return max(int(window.phases[phase]["host_ns"]) - int(first.get("host_ns", 0)), 0)
