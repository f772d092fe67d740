"""Whether a noisy curve grows: a robust slope with an interval, told from noise and from a rise at one moment.

The slope is the median of the slopes between all pairs of points (Theil and Sen), its interval that of Sen. A rise at
one moment is the median of the differences of all pairs from both sides of it (Hodges and Lehmann). The points are
those of equal parts of the curve, since neighbouring values of a measurement are alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt
from statistics import fmean, median

StepValue = tuple[float, float]
Points = Sequence[StepValue]

# The fewest points that tell something.
FEWEST = 4
# Two-sided 95 % of the normal distribution.
NORMAL = 1.96


@dataclass(frozen=True, slots=True)
class Line:
    """A line through a curve. slope, low, high: per step, with an interval of 95 %; begin, end: values of the line.

    noise: usual distance of a point from the line. rising: part of the pairs of points that rise, 0..1.
    """

    slope: float
    low: float
    high: float
    begin: float
    end: float
    noise: float
    rising: float


def condensed(points: Points, groups: int, part: float = 0.5) -> list[StepValue]:
    """The curve reduced to at most `groups` points by quantiles, at most one per step. part: 0.5 for medians."""
    size_of = -(-len(points) // groups)
    out: list[StepValue] = []
    for start in range(0, len(points), size_of):
        group = points[start : start + size_of]
        x, y = group[len(group) // 2][0], quantile([value for _, value in group], part)
        if not out or x > out[-1][0]:
            out.append((x, y))
    return out


def quantile(values: Sequence[float], part: float) -> float:
    """The median for 0.5; for any other part, the value with this part of the others below it, rounded down."""
    return median(values) if part == 0.5 else sorted(values)[int((len(values) - 1) * part)]


def line_through(points: Points) -> Line | None:
    """The line through points with rising steps; None if there are fewer than FEWEST."""
    count = len(points)
    if count < FEWEST:
        return None
    slopes = sorted(
        (b[1] - a[1]) / (b[0] - a[0]) for index, a in enumerate(points) for b in points[index + 1 :]
    )
    # How many of the slopes are within the interval, by the variance of Kendall's statistic.
    within = NORMAL * sqrt(count * (count - 1) * (2 * count + 5) / 18)
    low = max(round((len(slopes) - within) / 2), 0)
    slope = median(slopes)
    at = median(y - slope * x for x, y in points)
    noise = 1.5 * median(abs(y - slope * x - at) for x, y in points)
    rising = sum(one > 0 for one in slopes) / len(slopes)
    begin, end = (at + slope * x for x in (points[0][0], points[-1][0]))
    return Line(slope, slopes[low], slopes[-1 - low], begin, end, noise, rising)


def stepped(points: Points, line: Line) -> float:
    """How much better a rise at one moment fits than a line through the same points; above 1 it fits better.

    It is the ratio of the distances of the points from the line, and from the medians before and after that moment.
    """
    at = line.begin - line.slope * points[0][0]
    from_line = fmean(abs(y - line.slope * x - at) for x, y in points)
    values = [y for _, y in points]
    from_steps = _apart(values, moment(values)) / len(values)
    return from_line / from_steps if from_steps else inf if from_line else 0.0


def moment(values: Sequence[float]) -> int:
    """The place from which on a curve is best described by another level than before; two values are on each side."""
    return min(range(2, len(values) - 1), key=lambda cut: _apart(values, cut))


def shift(before: Sequence[float], after: Sequence[float]) -> tuple[float, float, float]:
    """By how much values after a moment are higher than those before it, with an interval of 95 %."""
    pairs = sorted(b - a for a in before for b in after)
    # How many of the differences are within the interval, by the variance of the statistic of Mann and Whitney.
    within = NORMAL * sqrt(len(pairs) * (len(before) + len(after) + 1) / 12)
    low = max(round(len(pairs) / 2 - within), 0)
    return median(pairs), pairs[low], pairs[-1 - low]


def _apart(values: Sequence[float], cut: int) -> float:
    """The distances of values from the median of those before a place, and from there on."""
    return sum(abs(one - median(part)) for part in (values[:cut], values[cut:]) for one in part)
