"""Finds the period of step times, such as of a script that plays before each 16 updates: runs are whole periods.

A run with one such long step more than another one would differ from it by more than any setting.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, median

# Periods up to this are tried; longer ones only where long steps are so far apart.
USUAL_PERIODS = 64
# A period has to be seen so many times.
SEEN = 3
# The share of the variance that is left within the places of a period.
LEFT = 0.3
# Steps to look at before there is no period, and the least number that is enough to find one.
ENOUGH, LEAST = 48, 12
# A long step takes so many times the median; those that matter take this share of the time.
LONG, SHARE = 3.0, 0.1


def period_of(lengths: Sequence[float]) -> int:
    """The period of step times, in steps; 1 without one. lengths: of successive steps."""
    count = len(lengths)
    if count < LEAST:
        return 1
    # Of logarithms, a single disturbed step does not decide.
    logs = [math.log(max(one, 1e-9)) for one in lengths]
    mean = fmean(logs)
    total = sum((one - mean) ** 2 for one in logs) / (count - 1)
    gaps: set[int] = {later - earlier for earlier, later in pairwise(_long(lengths))}
    most = count // SEEN
    tried: list[int] = sorted(gaps.union(range(2, USUAL_PERIODS + 1)))
    for period in tried:
        if 1 < period <= most and _within(logs, period) <= LEFT * total:
            return period
    return 1


def undecided(lengths: Sequence[float]) -> bool:
    """Whether more steps are needed to tell the period."""
    return len(lengths) < ENOUGH or (period_of(lengths) == 1 and recurs(lengths))


def recurs(lengths: Sequence[float]) -> bool:
    """Whether there are long steps that matter."""
    return bool(lengths) and sum(lengths[place] for place in _long(lengths)) > SHARE * sum(lengths)


def _long(lengths: Sequence[float]) -> list[int]:
    """The places of the long steps."""
    limit = LONG * median(lengths)
    return [place for place, one in enumerate(lengths) if one > limit]


def _within(logs: Sequence[float], period: int) -> float:
    """The variance that is left within the places of a period."""
    left = 0.0
    for place in range(period):
        part = logs[place::period]
        mean = fmean(part)
        left += sum((one - mean) ** 2 for one in part)
    return left / (len(logs) - period)
