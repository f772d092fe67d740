"""Statistics of a recorded series of rates: what of it is warm-up, its mean, and how sure that is.

Neighbouring windows of a run are alike (a slow minute is sixty slow windows), so they are not so many independent
measurements: they are joined into batches, and what resemblance is left between those widens the interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from .paired import CONFIDENCE, student_quantile

# Batches of a series: enough to know how much they differ, few enough to be long.
BATCHES = 30
# Below this many windows, how much they differ is not known.
FEWEST = 4
# Warm-up ends within this share of a series, and within so many windows of its beginning.
WARM_UP_SHARE = 0.25
WARM_UP_MOST = 120
_STRONGEST = 0.9  # resemblance that is corrected for; beyond it the correction itself is a guess


@dataclass(frozen=True, slots=True)
class Stretch:
    """Some work and the time it took: items, and nanoseconds."""

    items: float
    ns: float


@dataclass(frozen=True, slots=True)
class Rate:
    """Items a second of a series. error: standard error of its logarithm, None below FEWEST; df: of that error."""

    value: float
    error: float | None
    df: float
    count: int


@dataclass(frozen=True, slots=True)
class Interval:
    """A ratio; low and high at CONFIDENCE, None where they are not known."""

    ratio: float
    low: float | None = None
    high: float | None = None


def warm_up(stretches: Sequence[Stretch]) -> int:
    """How many stretches at the beginning of a process are warm-up: the first one, and more where they are slower.

    The cut is where the standard error of the rest's mean is least (the MSER rule of simulation output analysis).
    """
    if len(stretches) < FEWEST:
        return 0
    logs = [math.log(part.items / part.ns) for part in stretches]
    most = max(min(int(len(logs) * WARM_UP_SHARE), WARM_UP_MOST), 1)
    # Sums of all that follows, from the end on.
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
    """All items over all time, and its error by batch means. Raises ValueError without stretches."""
    if not stretches:
        raise ValueError("nothing was measured")
    items, ns = sum(part.items for part in stretches), sum(part.ns for part in stretches)
    value = items / ns * 1e9
    if len(stretches) < FEWEST:
        return Rate(value, None, 0, len(stretches))
    batches = _batches(stretches, min(len(stretches), BATCHES))
    count = len(batches)
    # How far each batch is above or below the mean rate, as a share (the error of a ratio of two sums).
    off = [part.items * count / items - part.ns * count / ns for part in batches]
    variance = sum(value * value for value in off) / (count * (count - 1))
    alike = _resemblance(off)
    widened = (1 + alike) / (1 - alike)
    return Rate(value, math.sqrt(variance * widened), max(count / widened - 1, 2), len(stretches))


def spread(found: Rate) -> Interval:
    """A rate itself with its interval."""
    if found.error is None:
        return Interval(found.value)
    reach = math.exp(student_quantile((1 + CONFIDENCE) / 2, found.df) * found.error)
    return Interval(found.value, found.value / reach, found.value * reach)


def ratio(b: Rate, a: Rate) -> Interval:
    """B over A, of two independent series."""
    value = b.value / a.value
    if a.error is None or b.error is None:
        return Interval(value)
    parts = ((a.error**2, a.df), (b.error**2, b.df))
    variance = sum(part for part, _ in parts)
    if variance == 0:
        return Interval(value, value, value)
    df = variance**2 / sum(part**2 / df for part, df in parts)
    half = student_quantile((1 + CONFIDENCE) / 2, df) * math.sqrt(variance)
    return Interval(value, value * math.exp(-half), value * math.exp(half))


def _batches(stretches: Sequence[Stretch], count: int) -> list[Stretch]:
    edges = [round(index * len(stretches) / count) for index in range(count + 1)]
    return [
        Stretch(sum(part.items for part in group), sum(part.ns for part in group))
        for group in (stretches[begin:end] for begin, end in pairwise(edges))
    ]


def _resemblance(off: Sequence[float]) -> float:
    """Correlation of neighbours, 0.._STRONGEST, with its bias in short series taken out."""
    square = sum(value * value for value in off)
    if not square:
        return 0.0
    found = sum(first * second for first, second in pairwise(off)) / square
    return min(max(found + (1 + 4 * found) / len(off), 0.0), _STRONGEST)
