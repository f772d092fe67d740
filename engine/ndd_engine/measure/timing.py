"""The fastest of a few runs of a function, within a time budget."""

from __future__ import annotations

import time
from collections.abc import Callable


def fastest(
    work: Callable[[], object],
    most: int,
    budget_ns: float,
    before: Callable[[], object] | None = None,
    slow_ns: float = 0.0,
) -> tuple[float, int]:
    """(nanoseconds of the fastest run, number of runs): at least one, as long as the next fits the budget.

    before: called before each run, untimed. slow_ns: a run up to this long is repeated once in any case.
    """
    best, runs, spent = float("inf"), 0, 0
    while not runs or (runs < most and (spent + best <= budget_ns or (runs == 1 and best <= slow_ns))):
        if before is not None:
            before()
        begin = time.perf_counter_ns()
        work()
        last = time.perf_counter_ns() - begin
        best, runs, spent = min(best, last), runs + 1, spent + last
    return float(best), runs
