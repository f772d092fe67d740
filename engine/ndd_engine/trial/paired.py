"""Statistics of ABBA blocks: estimates the effect of a change from log-ratios. No input, no output.

An ABBA block has four segments: baseline, candidate, candidate, baseline. Its value is the mean of the log-ratios of
its two pairs, in which a drift that is linear over the block cancels. Blocks are treated as independent; their mean
gets a Student's t interval.

The blocks do not show constant differences between the two processes: memory layout alone makes two identical
processes differ by up to about 1 %. A gain or a loss therefore has to exceed FLOOR as well. Testing after every block
multiplies the chances of a false positive, so before the end only clear results are called. With these levels, A/A
trials call a gain or a loss in less than 5 % of cases in the simulation of the tests: normal and heavy-tailed noise,
autocorrelated noise, and processes with different speeds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean, stdev
from typing import Literal

# Smaller differences do not count: two identical processes differ by almost as much.
FLOOR = 0.02
# Minimum distance of the interval from 1, for the same reason.
MARGIN = 0.01
# Level of the reported interval.
CONFIDENCE = 0.95
# Level required to call a gain or a loss before the budget is spent.
EARLY = 0.995
FEWEST_ABBA = 3

Call = Literal["gain", "no gain", "loss", "inconclusive"]


@dataclass(frozen=True)
class Estimate:
    """A ratio with its interval, from `blocks` ABBA blocks."""

    ratio: float
    low: float
    high: float
    blocks: int


def abba_log_ratio(a1: float, b1: float, b2: float, a2: float) -> float:
    """The log-ratio B over A of four rates, in the order in which they were measured."""
    return (math.log(b1 / a1) + math.log(b2 / a2)) / 2


def estimate(values: Sequence[float], confidence: float = CONFIDENCE) -> Estimate | None:
    """The mean of log-ratios with Student's t interval, as ratios; None below 2 values."""
    count = len(values)
    if count < 2:
        return None
    ratio = math.exp(fmean(values))
    low, high = interval(ratio, stdev(values) / math.sqrt(count), count - 1, confidence)
    return Estimate(ratio, low, high, count)


def interval(ratio: float, error: float, df: float, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """(low, high) of a ratio. error, df: standard error of its logarithm, and the degrees of freedom of that error."""
    # exp(100) is as good as unbounded and does not overflow.
    reach = math.exp(min(student_quantile((1 + confidence) / 2, df) * error, 100.0))
    return ratio / reach, ratio * reach


def early(values: Sequence[float]) -> Call | None:
    """The verdict if it is already clear, else None."""
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
    """The verdict from all blocks once the budget is spent."""
    found = estimate(values)
    if len(values) < FEWEST_ABBA or found is None:
        return "inconclusive"
    if found.low > 1 + MARGIN and found.ratio > 1 + FLOOR:
        return "gain"
    if found.high < 1 / (1 + MARGIN) and found.ratio < 1 / (1 + FLOOR):
        return "loss"
    # Either a significant gain is ruled out, or the effect is within the difference of two identical processes.
    near = 1 / (1 + FLOOR) <= found.ratio <= 1 + FLOOR
    if found.high < 1 + FLOOR or (near and not found.low <= 1 <= found.high):
        return "no gain"
    return "inconclusive"


# Student's distribution.

SIMPSON = 256  # even number of intervals


@cache
def student_quantile(p: float, freedom: float) -> float:
    """The p-quantile (0 < p < 1) of Student's t distribution with `freedom` degrees of freedom."""
    if p < 0.5:
        return -student_quantile(1 - p, freedom)
    low, high = 0.0, 1.0
    while student_cdf(high, freedom) < p:
        low, high = high, high * 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if student_cdf(middle, freedom) < p else (low, middle)
    return (low + high) / 2


def student_cdf(t: float, freedom: float) -> float:
    """The cumulative distribution function: Simpson's rule over the angle x = atan(t / sqrt(freedom))."""
    step = math.atan(t / math.sqrt(freedom)) / SIMPSON
    values: list[float] = [math.cos(index * step) ** (freedom - 1) for index in range(SIMPSON + 1)]
    area = step / 3 * (values[0] + 4 * sum(values[1::2]) + 2 * sum(values[2:-1:2]) + values[-1])
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
    return 0.5 + scale * area
