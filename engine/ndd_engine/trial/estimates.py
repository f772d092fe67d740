"""The verdict on ABBA blocks: the log-ratio with its interval, from pairs of processes or from one process.

An ABBA block has four segments: baseline, candidate, candidate, baseline, or the reverse (BAAB). Its value is the mean
of the log-ratios of its two pairs of neighbours, in which a drift that is linear over the block cancels.

Two processes with the same configuration differ by about 1 % for as long as they live, so the blocks of one pair are
not independent: the unit of replication is the pair. From ENOUGH pairs on, the interval is Student's t interval of
the means of the pairs. With fewer pairs, when start-up is expensive, their variance is combined with the usual
difference between processes on this machine (`Usual`) and with the variance between blocks of a pair. Where one process
switches between both sides, what processes differ by cancels, and the unit of replication is the block.

"faster" has an interval above 1 and a ratio above 1 + FLOOR, "slower" the reverse. "no difference" means that a speedup
of FLOOR or more is excluded. Everything else is "inconclusive".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from statistics import fmean, stdev, variance
from typing import Literal, TypeVar

from ndd_engine.record.events import TrialEvent

T = TypeVar("T")

# Smaller differences do not count.
FLOOR = 0.02
# Level of the reported interval.
CONFIDENCE = 0.95

Call = Literal["faster", "no difference", "slower", "inconclusive"]
# Verdicts of a trial that found a difference.
DIFFERENT = frozenset({"faster", "slower"})


def judged(ratio: float, low: float, high: float) -> Call:
    """The verdict on a ratio with the interval low..high."""
    if low > 1 and ratio > 1 + FLOOR:
        return "faster"
    if high < 1 and ratio < 1 / (1 + FLOOR):
        return "slower"
    return "no difference" if high < 1 + FLOOR and ratio >= 1 / (1 + FLOOR) else "inconclusive"


def judged_estimate(found: Estimate) -> Call:
    """The verdict on an estimate: as `judged`, but inconclusive for a single pair near 1, see ALONE."""
    call = judged(found.ratio, found.low, found.high)
    if found.pairs == 1 and call in DIFFERENT and found.low < ALONE and found.high > 1 / ALONE:
        return "inconclusive"
    return call


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


# Pairs from which their own variance suffices, and before which no trial ends early.
ENOUGH = 4
# Blocks from which a trial with fewer pairs can end early.
FEWEST_EARLY = 3
# How far the interval of a single pair has to be from 1 for "faster" or "slower": no two processes with the same
# configuration were seen to differ by so much.
ALONE = 1.25
# Level required to call a change faster or slower before the budget is spent.
EARLY = 0.995
# Usual standard deviation of the log-ratio of an ABBA block of BLOCK_S seconds, and its degrees of freedom.
BLOCK_SD, BLOCK_DF, BLOCK_S = 0.015, 4.0, 2.2
# A trial in one process looks at its result after so many blocks, and again whenever they have grown by GROWTH.
FIRST_LOOK, GROWTH = 32, 1.5
# Share of the blocks that is replaced at either end before the variance is taken, and left out of the mean.
TRIMMED = 0.1
METHOD = "one process"
# Processes differ by at least this part of what the blocks of a pair differ by: what disturbs blocks lasts for longer.
OF_BLOCKS = 0.5


@dataclass(frozen=True, slots=True)
class Usual:
    """How much pairs of processes with the same configuration differ: variance of the log-ratio, and its df.

    The default has few degrees of freedom, since machines differ by more than a factor of two in it: with six,
    intervals of one or two pairs on a machine with 1.5 % contained the truth in 89 % of simulated trials.
    """

    variance: float = 0.01**2
    df: float = 2.0

    @property
    def sd(self) -> float:
        """The standard deviation, as a share."""
        return math.sqrt(self.variance)


class Replicates:
    """The blocks of a trial, pair by pair. few_pairs: whether it has to do with fewer than ENOUGH pairs."""

    def __init__(self, usual: Usual | None = None, few_pairs: bool = False) -> None:
        self.usual = usual or Usual()
        self.few_pairs = few_pairs
        self._pairs: list[list[float]] = []
        # The mean logarithm of the four rates of each block.
        self._levels: list[list[float]] = []

    def begin(self) -> None:
        """Start a pair."""
        self._pairs.append([])
        self._levels.append([])

    def add(self, value: float, level: float = 0.0) -> None:
        """The log-ratio of a block of the current pair. level: the mean logarithm of its rates, for `rates`."""
        self._pairs[-1].append(value)
        self._levels[-1].append(level)

    def add_abba(self, a1: float, b1: float, b2: float, a2: float) -> None:
        """The four rates of a block of the current pair, in the order in which they were measured."""
        self.add(abba_log_ratio(a1, b1, b2, a2), fmean(map(math.log, (a1, b1, b2, a2))))

    def abandon(self) -> None:
        """Leave out the current pair."""
        self._pairs.pop()
        self._levels.pop()

    def rates(self) -> tuple[float, float] | None:
        """The geometric mean rates of both sides over the blocks of the estimate; None without a block.

        Their ratio is that of the estimate, so that a table of both never contradicts a verdict.
        """
        if not self.blocks:
            return None
        value, level = self._means()
        return math.exp(level - value / 2), math.exp(level + value / 2)

    def _means(self) -> tuple[float, float]:
        levels = filter(None, self._levels)
        return fmean(map(fmean, self.pairs)), fmean(map(fmean, levels))

    @property
    def current(self) -> int:
        """Number of blocks of the current pair."""
        return len(self._pairs[-1])

    @property
    def pairs(self) -> list[list[float]]:
        """The pairs with blocks."""
        return [pair for pair in self._pairs if pair]

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return sum(map(len, self._pairs))

    @property
    def processes(self) -> int:
        """Number of pairs of processes; 0 if one process measures both sides."""
        return len(self.pairs)

    def estimate(self, confidence: float = CONFIDENCE) -> Estimate | None:
        """The ratio with its interval; None below 2 blocks."""
        pairs, blocks = self.pairs, self.blocks
        if blocks < 2:
            return None
        means = [fmean(pair) for pair in pairs]
        count = len(means)
        between = None
        if count >= ENOUGH:
            spread, df, method = variance(means), count - 1.0, "pairs"
        else:
            spread, df, between = self._combined(means)
            method = "usual difference"
        ratio = math.exp(fmean(means))
        low, high = interval(ratio, math.sqrt(spread / count), df, confidence)
        return Estimate(ratio, low, high, blocks, count, df, method, between)

    def _combined(self, means: Sequence[float]) -> tuple[float, float, float]:
        """(variance of the mean of a pair, its degrees of freedom, the usual difference with it) of a few pairs."""
        pairs, count = self.pairs, len(means)
        inside, inside_df = within(pairs) or (BLOCK_SD**2, BLOCK_DF)
        part = inside * fmean(1 / len(pair) for pair in pairs)
        usual = replace(self.usual, variance=max(self.usual.variance, OF_BLOCKS**2 * inside))
        prior = usual.variance + part
        prior_df = prior**2 / (usual.variance**2 / usual.df + part**2 / inside_df)
        own = variance(means) if count > 1 else 0.0
        df = count - 1 + prior_df
        return ((count - 1) * own + prior_df * prior) / df, df, usual.sd

    def early(self) -> Call | None:
        """The verdict if it is already clear, else None. Call it at the end of a pair."""
        strict, usual = self.estimate(EARLY), self.estimate()
        if strict is None or usual is None:
            return None
        many = len(self.pairs) >= ENOUGH
        if not many and not (self.few_pairs and self.blocks >= FEWEST_EARLY):
            return None
        if (call := judged_estimate(strict)) in DIFFERENT:
            return call
        return "no difference" if many and usual.low > 1 / (1 + FLOOR) and usual.high < 1 + FLOOR else None

    def last(self) -> Call:
        """The verdict once the budget is spent."""
        found = self.estimate()
        return "inconclusive" if found is None else judged_estimate(found)

    def between(self) -> Usual | None:
        """The variance between the pairs of this trial, without that of their blocks; None if it is unknown.

        Only of the first pairs, since trials end early if their pairs happen to agree. It may be negative: clip it
        after pooling only, which would otherwise be biased. Noisy blocks lower the df: they hide the difference.
        """
        pairs = self.pairs[:ENOUGH]
        if len(pairs) < 2 or (inside := within(pairs)) is None:
            return None
        means = [fmean(pair) for pair in pairs]
        part = inside[0] * fmean(1 / len(pair) for pair in pairs)
        default = Usual().variance
        return Usual(variance(means) - part, (len(pairs) - 1) * (default / (default + part)) ** 2)

    def needed(self) -> float | None:
        """How many times the pairs of this trial would give a verdict; None if it has one, or no interval."""
        found = self.estimate()
        if found is None or self.last() != "inconclusive":
            return None
        reach = math.log(found.high / found.ratio)
        floor, value = math.log(1 + FLOOR), math.log(found.ratio)
        # Either the interval has to leave 1, or it has to stay below the floor.
        wanted = max(abs(value) if abs(value) > floor else floor - value, floor / 4)
        return max((reach / wanted) ** 2, 2.0 if self.processes == 1 else 1.2)


class OneProcess(Replicates):
    """The blocks of a trial in one process."""

    def __init__(self) -> None:
        super().__init__()
        self.begin()
        self._look = FIRST_LOOK

    @property
    def processes(self) -> int:
        """0: one process measures both sides."""
        return 0

    def estimate(self, confidence: float = CONFIDENCE) -> Estimate | None:
        """The ratio with its interval; None below 2 blocks."""
        values = [value for pair in self.pairs for value in pair]
        return trimmed(values, confidence) if len(values) > 1 else None

    def _means(self) -> tuple[float, float]:
        blocks = zip(chain(*self._pairs), chain(*self._levels), strict=True)
        kept = untrimmed(sorted(blocks))
        return fmean(value for value, _ in kept), fmean(level for _, level in kept)

    def early(self) -> Call | None:
        """The verdict if this is a time to look and it is already clear, else None."""
        if self.blocks < self._look:
            return None
        self._look = math.ceil(self.blocks * GROWTH)
        strict, usual = self.estimate(EARLY), self.estimate()
        assert strict is not None and usual is not None
        if (call := judged(strict.ratio, strict.low, strict.high)) in DIFFERENT:
            return call
        return "no difference" if usual.low > 1 / (1 + FLOOR) and usual.high < 1 + FLOOR else None


def trimmed(values: list[float], confidence: float = CONFIDENCE) -> Estimate:
    """The trimmed mean of log-ratios with its interval, as ratios. values: at least two.

    Other work on the machine disturbs some blocks far more than the rest. The interval is that of Tukey and McLaughlin
    (1963): Student's t with the variance of the winsorized values.
    """
    count, kept = len(values), untrimmed(sorted(values))
    cut = (count - len(kept)) // 2
    ends = [kept[0]] * cut + kept + [kept[-1]] * cut
    df = len(kept) - 1.0
    error = math.sqrt(variance(ends) / count) / (1 - 2 * cut / count)
    ratio = math.exp(fmean(kept))
    low, high = interval(ratio, error, df, confidence)
    return Estimate(ratio, low, high, count, pairs=0, df=df, method=METHOD)


def untrimmed(ordered: list[T]) -> list[T]:
    """What is left of sorted blocks without those at either end."""
    cut = int(TRIMMED * len(ordered))
    return ordered[cut : len(ordered) - cut]


def within(pairs: Sequence[Sequence[float]]) -> tuple[float, float] | None:
    """(variance between the blocks of a pair, its degrees of freedom); None without two blocks in a pair."""
    known = [pair for pair in pairs if len(pair) > 1]
    df = sum(len(pair) - 1 for pair in known)
    if not df:
        return None
    return sum(variance(pair) * (len(pair) - 1) for pair in known) / df, float(df)


def pooled(variances: Sequence[Usual], default: Usual | None = None, most_df: float = 100.0) -> Usual:
    """The usual difference from what trials measured and from the default, each weighted by its df."""
    all_of = [default or Usual(), *variances]
    df = sum(one.df for one in all_of)
    mean = sum(one.df * one.variance for one in all_of) / df
    # Less than a tenth of the default is not plausible.
    return Usual(max(mean, all_of[0].variance / 100), min(df, most_df))


def reach(usual: Usual, pairs: int, blocks: int, block_s: float) -> float:
    """The expected half-width of the log-interval of so many pairs of blocks of block_s seconds."""
    inside = BLOCK_SD**2 * BLOCK_S / max(block_s, 1e-3) / blocks
    df = pairs - 1 + (0.0 if pairs >= ENOUGH else usual.df)
    return student_quantile((1 + CONFIDENCE) / 2, df) * math.sqrt((usual.variance + inside) / pairs)


def estimate_of(trial: TrialEvent) -> Estimate | None:
    """The ratio of a trial with its interval; None without one."""
    if trial.ratio is None or trial.low is None or trial.high is None or trial.df is None:
        return None
    blocks = trial.abba_blocks
    return Estimate(
        trial.ratio, trial.low, trial.high, blocks, trial.pairs, trial.df, trial.method, trial.between
    )


def joined(trials: Sequence[TrialEvent]) -> TrialEvent:
    """Trials of the same change as one: their log-ratios weighted by their pairs of processes, or their blocks."""
    first, *others = trials
    estimates = [found for trial in trials if (found := estimate_of(trial)) is not None]
    if not others or len(estimates) < len(trials):
        return first
    weights = [one.pairs or one.blocks for one in estimates]  # one process has no pairs
    shares = [weight / sum(weights) for weight in weights]
    parts = [
        ((share * standard_error(one)) ** 2, one.df) for share, one in zip(shares, estimates, strict=True)
    ]
    mean = sum(share * math.log(one.ratio) for share, one in zip(shares, estimates, strict=True))
    spread = sum(part for part, _ in parts)
    df = spread**2 / sum(part**2 / df for part, df in parts) if spread else 1.0
    low, high = interval(math.exp(mean), math.sqrt(spread), df)
    return replace(
        first,
        ratio=math.exp(mean),
        low=low,
        high=high,
        abba_blocks=sum(one.blocks for one in estimates),
        pairs=sum(one.pairs for one in estimates),
        df=df,
        seconds=sum(trial.seconds for trial in trials),
    )


def over(total: Estimate, before: Estimate) -> Estimate:
    """What the last setting contributes: the ratio of two independent ratios to the same baseline."""
    parts = [(standard_error(one) ** 2, one.df) for one in (total, before)]
    spread = sum(part for part, _ in parts)
    df = spread**2 / sum(part**2 / df for part, df in parts) if spread else 1.0
    ratio = total.ratio / before.ratio
    low, high = interval(ratio, math.sqrt(spread), df)
    pairs = min(total.pairs or before.pairs, before.pairs or total.pairs)  # one process has no pairs
    return Estimate(ratio, low, high, total.blocks, pairs, df, total.method)


def standard_error(found: Estimate, confidence: float = CONFIDENCE) -> float:
    """The standard error of the logarithm of a ratio."""
    return math.log(found.high / found.low) / 2 / student_quantile((1 + confidence) / 2, found.df)
