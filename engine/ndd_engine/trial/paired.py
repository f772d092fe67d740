"""The log-ratio of an ABBA block, and Student's t interval of a mean. No input, no output.

An ABBA block has four segments: baseline, candidate, candidate, baseline, or the reverse (BAAB). Its value is the mean
of the log-ratios of its two pairs of neighbours, in which a drift that is linear over the block cancels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean, stdev

from .verdict import CONFIDENCE


@dataclass(frozen=True)
class Estimate:
    """A ratio with its interval, from `blocks` ABBA blocks of `pairs` pairs of processes (0: of one process).

    df: degrees of freedom of the interval. method: "pairs", "usual difference", "one process" or "" (blocks of a single
    pair, taken as independent). between: the difference between processes that the interval assumes, as a share.
    """

    ratio: float
    low: float
    high: float
    blocks: int
    pairs: int = 1
    df: float = 1.0
    method: str = ""
    between: float | None = None


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
    return Estimate(ratio, low, high, count, df=count - 1)


def interval(ratio: float, error: float, df: float, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """(low, high) of a ratio. error, df: standard error of its logarithm, and the degrees of freedom of that error."""
    # exp(100) is as good as unbounded and does not overflow; the rounding makes quantiles reusable.
    reach = math.exp(min(student_quantile((1 + confidence) / 2, round(df, 1)) * error, 100.0))
    return ratio / reach, ratio * reach


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
