"""The estimate of a trial: ABBA blocks grouped by the pair of processes that measured them. No input, no output.

Two processes with the same configuration differ by about 1 % for as long as they live, so the blocks of one pair are
not independent: the unit of replication is the pair. From ENOUGH pairs on, the interval is Student's t interval of
the means of the pairs. With fewer pairs, when start-up is expensive, their variance is combined with the usual
difference between processes on this machine (`Usual`) and with the variance between blocks of a pair. Where one process
switches between both sides, what processes differ by cancels, and the unit of replication is the block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, variance

from .paired import Estimate, interval, student_quantile
from .verdict import CONFIDENCE, DIFFERENT, FLOOR, Call, judged

# Pairs from which their own variance suffices, and before which no trial ends early.
ENOUGH = 4
# Blocks from which a trial with fewer pairs can end early.
FEWEST_EARLY = 3
# Level required to call a change faster or slower before the budget is spent.
EARLY = 0.995
# Usual standard deviation of the log-ratio of an ABBA block of BLOCK_S seconds, and its degrees of freedom.
BLOCK_SD, BLOCK_DF, BLOCK_S = 0.015, 4.0, 2.2
# A trial in one process looks at its result after so many blocks, and again whenever they have grown by GROWTH.
FIRST_LOOK, GROWTH = 32, 1.5
# Share of the blocks that is replaced at either end before the variance is taken, and left out of the mean.
TRIMMED = 0.1
METHOD = "one process"


@dataclass(frozen=True, slots=True)
class Usual:
    """How much pairs of processes with the same configuration differ: variance of the log-ratio, and its df."""

    variance: float = 0.01**2
    df: float = 6.0

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

    def begin(self) -> None:
        """Start a pair."""
        self._pairs.append([])

    def add(self, value: float) -> None:
        """The log-ratio of a block of the current pair."""
        self._pairs[-1].append(value)

    def abandon(self) -> None:
        """Leave out the current pair."""
        self._pairs.pop()

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
        if count >= ENOUGH:
            spread, df, method = variance(means), count - 1.0, "pairs"
        else:
            spread, df = self._combined(means)
            method = "usual difference"
        ratio = math.exp(fmean(means))
        low, high = interval(ratio, math.sqrt(spread / count), df, confidence)
        return Estimate(
            ratio, low, high, blocks, count, df, method, self.usual.sd if count < ENOUGH else None
        )

    def _combined(self, means: Sequence[float]) -> tuple[float, float]:
        """(variance of the mean of a pair, its degrees of freedom) of a few pairs, with the usual difference."""
        pairs, count = self.pairs, len(means)
        inside, inside_df = within(pairs) or (BLOCK_SD**2, BLOCK_DF)
        part = inside * fmean(1 / len(pair) for pair in pairs)
        usual = self.usual
        prior = usual.variance + part
        prior_df = prior**2 / (usual.variance**2 / usual.df + part**2 / inside_df)
        own = variance(means) if count > 1 else 0.0
        df = count - 1 + prior_df
        return ((count - 1) * own + prior_df * prior) / df, df

    def early(self) -> Call | None:
        """The verdict if it is already clear, else None. Call it at the end of a pair."""
        strict, usual = self.estimate(EARLY), self.estimate()
        if strict is None or usual is None:
            return None
        many = len(self.pairs) >= ENOUGH
        if not many and not (self.few_pairs and self.blocks >= FEWEST_EARLY):
            return None
        if (call := judged(strict.ratio, strict.low, strict.high)) in DIFFERENT:
            return call
        return "no difference" if many and usual.low > 1 / (1 + FLOOR) and usual.high < 1 + FLOOR else None

    def last(self) -> Call:
        """The verdict once the budget is spent."""
        found = self.estimate()
        return "inconclusive" if found is None else judged(found.ratio, found.low, found.high)

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
        wanted = max(value if value > floor else floor - value, floor / 4)
        return max((reach / wanted) ** 2, 1.2)


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
    ordered, count = sorted(values), len(values)
    cut = int(TRIMMED * count)
    kept = ordered[cut : count - cut]
    ends = [kept[0]] * cut + kept + [kept[-1]] * cut
    df = len(kept) - 1.0
    error = math.sqrt(variance(ends) / count) / (1 - 2 * cut / count)
    ratio = math.exp(fmean(kept))
    low, high = interval(ratio, error, df, confidence)
    return Estimate(ratio, low, high, count, pairs=0, df=df, method=METHOD)


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


def joined(estimates: Sequence[Estimate]) -> Estimate:
    """Estimates of independent trials of the same change as one, weighted by their pairs. Raises ValueError."""
    if not estimates:
        raise ValueError("nothing was measured")
    if len(estimates) == 1:
        return estimates[0]
    total = sum(one.pairs for one in estimates)
    parts = [
        ((one.pairs / total) ** 2 * error**2, one.df)
        for one in estimates
        if (error := standard_error(one)) is not None
    ]
    mean = sum(one.pairs / total * math.log(one.ratio) for one in estimates)
    spread = sum(part for part, _ in parts)
    df = spread**2 / sum(part**2 / df for part, df in parts) if spread else 1.0
    low, high = interval(math.exp(mean), math.sqrt(spread), df)
    first = replace(estimates[0], ratio=math.exp(mean), low=low, high=high, pairs=total, df=df)
    return replace(first, blocks=sum(one.blocks for one in estimates))


def standard_error(found: Estimate, confidence: float = CONFIDENCE) -> float:
    """The standard error of the logarithm of a ratio."""
    return math.log(found.high / found.low) / 2 / student_quantile((1 + confidence) / 2, found.df)
