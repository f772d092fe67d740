"""Results of several trials: joined, and whether a second measurement confirms a kept setting."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ndd_engine.record.events import TrialEvent

from .outcome import times, with_interval
from .paired import Estimate, interval
from .replicates import joined, standard_error
from .verdict import judged


def estimate_of(trial: TrialEvent) -> Estimate | None:
    """The ratio of a trial with its interval; None without one."""
    if trial.ratio is None or trial.low is None or trial.high is None or trial.df is None:
        return None
    pairs = trial.pairs or max(trial.abba_blocks, 1)
    return Estimate(
        trial.ratio, trial.low, trial.high, trial.abba_blocks, pairs, trial.df, trial.method, trial.between
    )


def joined_trials(trials: Sequence[TrialEvent]) -> TrialEvent:
    """Trials of the same change as one: their log-ratios weighted by their pairs of processes."""
    first, *others = trials
    estimates = [found for trial in trials if (found := estimate_of(trial)) is not None]
    if not others or len(estimates) < len(trials):
        return first
    found = joined(estimates)
    return replace(
        first,
        ratio=found.ratio,
        low=found.low,
        high=found.high,
        abba_blocks=found.blocks,
        pairs=sum(trial.pairs for trial in trials),
        df=found.df,
        seconds=sum(trial.seconds for trial in trials),
    )


def over(total: Estimate, before: Estimate) -> Estimate:
    """What the last setting contributes: the ratio of two independent ratios to the same baseline."""
    parts = [(standard_error(one) ** 2, one.df) for one in (total, before)]
    spread = sum(part for part, _ in parts)
    df = spread**2 / sum(part**2 / df for part, df in parts) if spread else 1.0
    ratio = total.ratio / before.ratio
    low, high = interval(ratio, math.sqrt(spread), df)
    return Estimate(ratio, low, high, total.blocks, min(total.pairs, before.pairs), df, total.method)


def unconfirmed(total: TrialEvent, before: TrialEvent | None) -> str:
    """Why the final comparison does not confirm the last kept setting; "" if it does, or if it was stopped.

    total: all kept settings vs. the baseline. before: the same without the last one; None if there were none.
    """
    if total.verdict == "stopped":
        return ""
    found = estimate_of(total)
    if found is None:
        return f"faster, but not confirmed vs. the baseline: {total.text}"
    earlier = estimate_of(before) if before is not None else None
    if earlier is not None:
        found = over(found, earlier)
    if judged(found.ratio, found.low, found.high) == "faster":
        return ""
    shown = with_interval(f"{times(found.ratio)}x", total.confidence, found.low, found.high, times)
    return f"faster, but not confirmed vs. the baseline: {shown}"
