"""Phases and `other` against an independent clock: do the phases of every window add up to the wall time?

The real loop trains with windows of several lengths. The engine's clock reads perf_counter; this benchmark reads
CLOCK_MONOTONIC_RAW, a kernel clock without NTP corrections, right before and right after each of those readings. The
independent length of a window is the distance between the middles of the brackets at its ends. If a bracket is wider
than a thousandth of the window, another thread held the GIL between the readings: such windows are excluded and
counted. The engine's figures are read from events.jsonl.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise

from ndd_engine.record.events import WindowEvent
from ndd_watch.clock import PhaseClock

from .common import Options, Table, Target, as_percent, quantile, say
from .engine import ONLY_STEPS, TINY, TINY_WORKLOAD, engine

TITLE = "clock: phases + other against an independent clock (relative error per window)"
TARGET = Target(0.005)
COLUMNS = (
    "case",
    "windows",
    "excluded",
    "phases/wall max",
    "phases/raw p50",
    "p99",
    "max",
    "whole run",
    "target",
    "by the largest",
)
WIDEST_BRACKET = 1e-3  # of the window
_EVERYTHING = ("evaluate.every_steps=150", "evaluate.batches=5", "checkpoint.every_steps=400")
# (name, log.window_s, further settings, steps)
CASES = (
    ("one window per step", 0.0, (), 3000),
    ("windows of 20 ms", 0.02, (), 5000),
    ("windows of 250 ms", 0.25, (), 8000),
    ("windows of 1 s, the default", 1.0, (), 10000),
    ("20 ms, evaluations and checkpoints", 0.02, _EVERYTHING, 3000),
)


class WitnessedClock(PhaseClock):
    """The engine's clock; `brackets` holds readings of the independent clock (ns) around each end of a window."""

    def __init__(self) -> None:
        self._bracket = (0, 0)
        self.brackets: list[tuple[int, int]] = []
        super().__init__(self._read)

    def _read(self) -> int:
        before = _raw_ns()
        value = time.perf_counter_ns()
        self._bracket = (before, _raw_ns())
        return value

    def skip(self) -> None:
        super().skip()
        self.brackets.append(self._bracket)

    def take(self) -> tuple[int, list[int]]:
        taken = super().take()
        self.brackets.append(self._bracket)
        return taken


def measure(options: Options) -> Table:
    """All window lengths in one table."""
    table = Table(TITLE, COLUMNS)
    for name, window_s, sets, steps in options.cases(CASES):
        say(f"clock: {name}")
        _case(table, name, window_s, sets, options.repeats(steps, steps // 6, steps // 60))
    table.note("phases/wall: sum of the phases vs. the window's own wall_ns, in the record")
    table.note("phases/raw: sum of the phases vs. CLOCK_MONOTONIC_RAW at the ends of the window")
    table.note("whole run: total of all windows vs. CLOCK_MONOTONIC_RAW around the call of the loop")
    table.note(
        f"excluded: the two clocks were read more than {as_percent(WIDEST_BRACKET)} of the window apart"
    )
    return table


def _case(table: Table, name: str, window_s: float, sets: Sequence[str], steps: int) -> None:
    settings = (*TINY, *ONLY_STEPS, f"log.window_s={window_s}", "run.device=cpu", *sets)
    with engine(TINY_WORKLOAD, settings) as subject:
        clock = subject.loop.clock = subject.loop.reporter.clock = WitnessedClock()
        begin = _raw_ns()
        subject.train(steps)
        stretch = _raw_ns() - begin
        windows = [window for _, window in subject.windows()]
    errors, left_out = errors_against(windows, clock.brackets)
    closure = max(abs(_phases(window) - window.wall_ns) / window.wall_ns for window in windows)
    whole = abs(sum(map(_phases, windows)) - stretch) / stretch
    spread = [as_percent(quantile(errors, share)) for share in (0.5, 0.99, 1.0)] if errors else ["n/a"] * 3
    verdict = TARGET.cells(max(closure, whole, *errors), as_percent)
    table.add(
        name, str(len(windows)), str(left_out), as_percent(closure), *spread, as_percent(whole), *verdict
    )


def errors_against(
    windows: Sequence[WindowEvent], brackets: Sequence[tuple[int, int]]
) -> tuple[list[float], int]:
    """(relative error of each window, number excluded). brackets: one more than windows.

    Raises ValueError if the record lacks a window.
    """
    errors: list[float] = []
    left_out = 0
    for window, (begin, end) in zip(windows, pairwise(brackets), strict=True):
        raw = (sum(end) - sum(begin)) / 2
        if max(begin[1] - begin[0], end[1] - end[0]) > WIDEST_BRACKET * raw:
            left_out += 1
        else:
            errors.append(abs(_phases(window) - raw) / raw)
    return errors, left_out


def _phases(window: WindowEvent) -> int:
    """Sum of the phases, without sub-phases ("forward/encoder")."""
    return sum(int(figures["host_ns"]) for name, figures in window.phases.items() if "/" not in name)


def _raw_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW)
