"""Statistics of a recorded series of rates: warm-up, mean and confidence interval.

Neighbouring windows of a run are correlated (a slow minute is sixty slow windows). They are joined into batches, and
the remaining correlation of neighbouring batches widens the interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from .paired import interval
from .replicates import Usual

# Batches of a series: enough to estimate their variance, few enough to be long.
BATCHES = 30
# Minimum number of windows for an interval.
FEWEST = 4
# Limits of the warm-up: share of a series, and number of windows.
WARM_UP_SHARE = 0.25
WARM_UP_MOST = 120
_STRONGEST = 0.9  # maximum correlation; above it the correction is unreliable


@dataclass(frozen=True, slots=True)
class Stretch:
    """Items, and the nanoseconds they took."""

    items: float
    ns: float


@dataclass(frozen=True, slots=True)
class Rate:
    """Items per second of a series. error: standard error of its logarithm, None below FEWEST; df: of that error."""

    value: float
    error: float | None
    df: float
    count: int


@dataclass(frozen=True, slots=True)
class Interval:
    """A ratio; low and high at CONFIDENCE, None if unknown."""

    ratio: float
    low: float | None = None
    high: float | None = None

    @classmethod
    def exact(cls, ratio: float) -> Interval:
        """Without uncertainty."""
        return cls(ratio, ratio, ratio)

    def map(self, change: Callable[[float], float]) -> Interval:
        """A monotonically increasing function of it."""
        low, high = (None if edge is None else change(edge) for edge in (self.low, self.high))
        return Interval(change(self.ratio), low, high)


def warm_up(stretches: Sequence[Stretch]) -> int:
    """How many stretches at the start of a process are warm-up: the first one, and further slower ones.

    The cut minimises the standard error of the mean of the rest (MSER rule of simulation output analysis).
    """
    if len(stretches) < FEWEST:
        return 0
    logs = [math.log(part.items / part.ns) for part in stretches]
    most = max(min(int(len(logs) * WARM_UP_SHARE), WARM_UP_MOST), 1)
    # Running sums from the end.
    total = square = 0.0
    best, least = 1, math.inf
    centre = fmean(logs)
    for index in range(len(logs) - 1, 0, -1):
        value = logs[index] - centre
        total, square = total + value, square + value * value
        left = len(logs) - index
        error = (square - total * total / left) / left**2
        if index <= most and error <= least:
            best, least = index, error
    return best


def rate(stretches: Sequence[Stretch]) -> Rate:
    """Total items over total time, with its error by batch means. Raises ValueError without stretches."""
    if not stretches:
        raise ValueError("nothing was measured")
    items, ns = sum(part.items for part in stretches), sum(part.ns for part in stretches)
    value = items / ns * 1e9
    if len(stretches) < FEWEST:
        return Rate(value, None, 0, len(stretches))
    batches = _batches(stretches, min(len(stretches), BATCHES))
    count = len(batches)
    # Relative deviation of each batch from the mean rate (linearised error of a ratio of two sums).
    off = [part.items * count / items - part.ns * count / ns for part in batches]
    variance = sum(value * value for value in off) / (count * (count - 1))
    correlation = _correlation(off)
    widened = (1 + correlation) / (1 - correlation)
    return Rate(value, math.sqrt(variance * widened), max(count / widened - 1, 2), len(stretches))


def spread(found: Rate) -> Interval:
    """A rate with its interval."""
    if found.error is None:
        return Interval(found.value)
    return Interval(found.value, *interval(found.value, found.error, found.df))


def ratio(b: Rate, a: Rate, between: Usual | None = None) -> Interval:
    """B over A of two independent series. between: variance of the log-ratio that the series do not show."""
    value = b.value / a.value
    if a.error is None or b.error is None:
        return Interval(value)
    parts = [(a.error**2, a.df), (b.error**2, b.df)]
    if between is not None:
        parts.append((between.variance, between.df))
    variance = sum(part for part, _ in parts)
    if variance == 0:
        return Interval(value, value, value)
    df = variance**2 / sum(part**2 / df for part, df in parts)
    return Interval(value, *interval(value, math.sqrt(variance), df))


def _batches(stretches: Sequence[Stretch], count: int) -> list[Stretch]:
    edges = [round(index * len(stretches) / count) for index in range(count + 1)]
    return [
        Stretch(sum(part.items for part in group), sum(part.ns for part in group))
        for group in (stretches[begin:end] for begin, end in pairwise(edges))
    ]


def _correlation(off: Sequence[float]) -> float:
    """Lag-1 autocorrelation, 0.._STRONGEST, corrected for its bias in short series."""
    square = sum(value * value for value in off)
    if not square:
        return 0.0
    found = sum(first * second for first, second in pairwise(off)) / square
    return min(max(found + (1 + 4 * found) / len(off), 0.0), _STRONGEST)
