"""Statistics of paired blocks: what the log-ratios of quads A B B A say about a change. No input, no output.

A quad is four blocks, the present, the change, the change, the present. Its value is the mean of the log-ratios of
its two pairs, in which a drift that is linear over the quad cancels. Quads are taken as independent, and their mean
gets Student's interval.

The quads cannot show what differs between the two processes as long as they live: where the loader put them in memory
alone makes two equal processes differ by up to about 1 %. So a gain or a loss has to be larger than FLOOR as well.
Looking after every quad gives chance many tries, so before the end only what is far from doubtful is called. With these
levels an A against A calls a gain or a loss in less than 5 % of trials, in the simulation of the tests: normal and
heavy-tailed noise, noise that wanders, and processes that differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean, stdev
from typing import Literal

# A ratio this near to 1 counts as none: two equal processes differ by almost as much.
FLOOR = 0.02
# And the interval has to keep this distance from 1, for the same reason.
MARGIN = 0.01
# Level of the interval that is reported.
CONFIDENCE = 0.95
# Level at which a gain or a loss is called before the budget is spent.
EARLY = 0.995
FEWEST_ABBA = 3

Call = Literal["gain", "no gain", "loss", "undecided"]


@dataclass(frozen=True)
class Estimate:
    """A ratio with its interval, from the log-ratios of `quads` quads."""

    ratio: float
    low: float
    high: float
    quads: int


def abba_log_ratio(a1: float, b1: float, b2: float, a2: float) -> float:
    """Log-ratio B over A of four rates in the order in which they were measured."""
    return (math.log(b1 / a1) + math.log(b2 / a2)) / 2


def estimate(values: Sequence[float], confidence: float = CONFIDENCE) -> Estimate | None:
    """The mean of log-ratios with Student's interval, as ratios; None below 2 values."""
    if len(values) < 2:
        return None
    mean = fmean(values)
    reach = student_quantile((1 + confidence) / 2, len(values) - 1) * stdev(values) / math.sqrt(len(values))
    # A few quads that differ wildly have an interval without bounds that a float could hold.
    low, high = (math.exp(min(max(edge, -50.0), 50.0)) for edge in (mean - reach, mean + reach))
    return Estimate(math.exp(mean), low, high, len(values))


def early(values: Sequence[float]) -> Call | None:
    """What is clear already, so that measuring on is a waste; None while it is not."""
    strict, usual = estimate(values, EARLY), estimate(values)
    if len(values) < FEWEST_ABBA or strict is None or usual is None:
        return None
    if strict.low > 1 + FLOOR:
        return "gain"
    if strict.high < 1 / (1 + FLOOR):
        return "loss"
    if usual.low > 1 / (1 + FLOOR) and usual.high < 1 + FLOOR:
        return "no gain"
    return None


def last(values: Sequence[float]) -> Call:
    """What all quads together say when no more can be had."""
    found = estimate(values)
    if len(values) < FEWEST_ABBA or found is None:
        return "undecided"
    if found.low > 1 + MARGIN and found.ratio > 1 + FLOOR:
        return "gain"
    if found.high < 1 / (1 + MARGIN) and found.ratio < 1 / (1 + FLOOR):
        return "loss"
    # Either no gain worth having is possible, or what there is lies within what two equal processes differ by.
    near = 1 / (1 + FLOOR) <= found.ratio <= 1 + FLOOR
    if found.high < 1 + FLOOR or (near and not found.low <= 1 <= found.high):
        return "no gain"
    return "undecided"


# Student's distribution.


@cache
def student_quantile(p: float, freedom: float) -> float:
    """The value that Student's t with `freedom` degrees of freedom stays below with probability p (0 < p < 1)."""
    if p < 0.5:
        return -student_quantile(1 - p, freedom)
    low, high = 0.0, 1.0
    while student_cdf(high, freedom) < p:
        low, high = high, high * 2
    for _ in range(80):
        middle = (low + high) / 2
        if student_cdf(middle, freedom) < p:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def student_cdf(t: float, freedom: float) -> float:
    """Probability that Student's t is at most t."""
    tail = 0.5 * _incomplete_beta(freedom / 2, 0.5, freedom / (freedom + t * t))
    return 1 - tail if t >= 0 else tail


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """Regularised incomplete beta function I_x(a, b), by its continued fraction (DLMF 8.17.22)."""
    if x <= 0 or x >= 1:
        return 0.0 if x <= 0 else 1.0
    if x > (a + 1) / (a + b + 2):  # the fraction converges fast on the other side
        return 1 - _incomplete_beta(b, a, 1 - x)
    front = math.exp(
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    )
    # Lentz's method.
    tiny = 1e-300
    value, c, d = 1.0, 1.0, 0.0
    for index in range(400):
        m = index // 2
        if index == 0:
            term = 1.0
        elif index % 2 == 0:
            term = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        else:
            term = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        d = 1 / ((1 + term * d) or tiny)
        c = (1 + term / c) or tiny
        value *= c * d
        if index and abs(c * d - 1) < 1e-15:
            break
    return front * (value - 1) / a
