"""Which changes one process can switch between its runs, and the estimate from them. No input, no output.

A setting can be switched if that needs no new model, optimizer, compiled code or encoded data. Both sides then share a
process, so what processes differ by cancels, and the unit of replication is the ABBA block.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import fmean, variance

from ndd_engine.config import Config

from .paired import Estimate, interval
from .replicates import EARLY, Replicates
from .verdict import CONFIDENCE, DIFFERENT, FLOOR, Call, judged

# Batches come from another loader; both of them are open.
LOADER = frozenset({
    "loader.workers", "loader.prefetch", "loader.persistent", "loader.pin_memory", "loader.fetch",
})  # fmt: skip
# What the model computes with.
MODEL = frozenset({"precision.amp", "precision.tf32", "speed.attention", "run.threads"})
# What happens around it, or not at all in a trial.
AROUND = frozenset({
    "loader.non_blocking", "loader.timeout_s", "run.gc_every_steps", "log.every_steps", "log.window_s",
    "log.profile_every_s", "log.headless_s", "console.refresh_hz", "console.on_hangup",
})  # fmt: skip
# A trial looks at its result after so many blocks, and again whenever they have grown by GROWTH.
FIRST_LOOK, GROWTH = 32, 1.5
# Share of the blocks that is replaced at either end before the variance is taken, and left out of the mean.
TRIMMED = 0.1
METHOD = "one process"


def can_switch(configs: tuple[Config, Config], changed: Iterable[str]) -> bool:
    """Whether one process can switch between the two configurations, which differ in the changed keys."""
    keys = set(changed)
    if keys - LOADER - MODEL - AROUND or any(config.parallel.ranks > 1 for config in configs):
        return False
    fixed = any(config.speed.compile != "off" or config.speed.cuda_graph for config in configs)
    encoded = any(config.loader.cache or config.loader.placement == "device" for config in configs)
    return not (keys & MODEL and fixed) and not (keys & LOADER and encoded)


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
