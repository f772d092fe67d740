"""Phases and `other` against an independent clock: does every window add up to the time that really passed?

The real loop trains with windows of several lengths. The engine's clock reads perf_counter; this reads
CLOCK_MONOTONIC_RAW, another clock of the kernel (without NTP's corrections), right before and right after each of
those readings. A window's independent length is between the middles of the two brackets at its ends. Where a
bracket is wider than a thousandth of the window, another thread held the interpreter in between and the two clocks
were not read together: such windows are left out and counted. The figures of the engine are taken from
events.jsonl, as anybody who reads the record sees them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise

from ndd_engine.measure.clock import PhaseClock, Window
from ndd_engine.record.events import WindowEvent

from .common import Options, Table, Target, as_percent, quantile, say
from .engine import ONLY_STEPS, TINY, TINY_WORKLOAD, engine

TITLE = "clock: phases + other against an independent clock (error as a share of the window)"
TARGET = Target(0.005)
COLUMNS = (
    "case",
    "windows",
    "left out",
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
    ("every step a window", 0.0, (), 3000),
    ("windows of 20 ms", 0.02, (), 5000),
    ("windows of 250 ms", 0.25, (), 8000),
    ("windows of 1 s, the default", 1.0, (), 10000),
    ("20 ms, evaluations and checkpoints", 0.02, _EVERYTHING, 3000),
)


class WitnessedClock(PhaseClock):
    """The engine's clock; `brackets` holds the independent clock (ns, before and after) at each end of a window."""

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

    def take(self) -> Window:
        window = super().take()
        self.brackets.append(self._bracket)
        return window


def measure(options: Options) -> Table:
    """All window lengths in one table."""
    table = Table(TITLE, COLUMNS)
    for name, window_s, sets, steps in CASES:
        say(f"clock: {name}")
        _case(table, name, window_s, sets, steps // 6 if options.quick else steps)
    table.note("phases/wall: the sum of the phases against the window's own wall_ns, in the record")
    table.note("phases/raw: the sum of the phases against CLOCK_MONOTONIC_RAW at the ends of the window")
    table.note("whole run: all windows together against CLOCK_MONOTONIC_RAW around the call of the loop")
    table.note(
        f"left out: the two clocks were not read within {as_percent(WIDEST_BRACKET)} of the window of each other"
    )
    return table


def _case(table: Table, name: str, window_s: float, sets: Sequence[str], steps: int) -> None:
    settings = (*TINY, *ONLY_STEPS, f"log.window_s={window_s}", "run.device=cpu", *sets)
    with engine(TINY_WORKLOAD, settings) as subject:
        clock = subject.loop.clock = WitnessedClock()
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
    """(error of each window as a share of it, number left out). brackets: one more than windows.

    Raises ValueError when the record does not hold every window.
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
    """Sum of the phases; a part ("forward/encoder") is in its parent already."""
    return sum(int(figures["host_ns"]) for name, figures in window.phases.items() if "/" not in name)


def _raw_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW)
