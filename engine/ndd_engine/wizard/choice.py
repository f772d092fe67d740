"""Which measured proposal to recommend, if any. The present configuration stays unless another is shown to be better.

A proposal and the present configuration ran in the same rounds. The log-ratios of their rates are the blocks of one
pair of processes, so the interval comes from trial.replicates, as that of a trial does. Does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ndd_engine.text import duration, printable
from ndd_engine.trial.estimates import CONFIDENCE, Estimate, Replicates, judged
from ndd_engine.trial.outcome import times, with_interval

from .answers import Answers
from .proposals import FAST_ENOUGH, SHORT_ROUNDS, Proposal
from .session import by_measured

# A speedup below this share is not worth a longer measurement: the present configuration stays.
WORTH = 0.10
# Rounds in common that a recommendation needs.
FEWEST = 3
# Rounds of one configuration that differ by more than this share are not those of a usable machine: a recommendation
# then needs more rounds in common and a higher confidence.
WILD, WILD_ROUNDS, WILD_CONFIDENCE = 0.5, 8, 0.999


@dataclass(frozen=True)
class Choice:
    """best: the recommended proposal, None without a recommendation. text: why, in a sentence.

    found: its ratio of items per second to the present configuration, or that of the proposal that is not recommended;
    None without a comparison.
    """

    best: Proposal | None
    text: str
    found: Estimate | None = None


def choose(verified: Sequence[Proposal], answers: Answers, confidence: float = CONFIDENCE) -> Choice:
    """The recommendation from measured proposals, of which one is the present configuration."""
    order = [
        one for one in by_measured(verified, answers) if one.measured is not None and one.measured.step_s
    ]
    others = [one for one in order if not one.present and one.allowed]
    present = next((one for one in verified if one.present), None)
    if not order:
        return Choice(None, "no recommendation: nothing was measured")
    if present is None or present.failed:
        why = "does not fit" if present is None else f"failed: {printable(present.failed)}"
        text = f"the present configuration {why}; the best of the others is recommended"
        return (
            Choice(others[0], text)
            if others
            else Choice(None, f"no recommendation: the present configuration {why}")
        )
    if present not in order:
        return Choice(None, "no recommendation: the present configuration was not measured; raise --budget")
    if not present.allowed:
        return _outside(others, present, confidence)
    # What the goal asks of a proposal: more items per second, or little memory at nearly the same speed.
    floor = FAST_ENOUGH if answers.goal == "low-memory" else 1.0
    unclear: list[tuple[Proposal, Estimate | None]] = []
    for one in order:
        if one is present:
            break
        if not one.allowed:
            continue
        found = against(one, present, confidence)
        verdict = _verdict(one, present, floor, confidence)
        if verdict == "faster":
            assert found is not None
            return Choice(one, f"{_speed(found, confidence)} of the present configuration", found)
        if verdict == "inconclusive" and (found is None or found.high >= floor * (1 + WORTH)):
            unclear.append((one, found))
    if unclear:
        one, found = unclear[0]
        return Choice(None, _refusal(one, present, found, confidence), found)
    if order[0] is present:
        return Choice(present, "the present configuration is the best of those measured; nothing changes")
    found = against(order[0], present, confidence)
    shown = "" if found is None else f": {_speed(found, confidence)}"
    return Choice(present, f"no proposal is worth a change{shown}; the present configuration stays", found)


def listed(verified: Sequence[Proposal], answers: Answers, choice: Choice) -> list[Proposal]:
    """The recommended proposal first, without a recommendation the present configuration; then by measurement."""
    first = choice.best or next((one for one in verified if one.present), None)
    return sorted(by_measured(verified, answers), key=lambda one: first is None or one.key != first.key)


def comparison(one: Proposal, verified: Sequence[Proposal]) -> str:
    """How a measured proposal compares with the present configuration, for its file; "" if that is unknown."""
    present = next((other for other in verified if other.present), None)
    found = None if present is None or one.present else against(one, present)
    if found is None:
        return ""
    text = f"{_speed(found, CONFIDENCE)} of the configuration before"
    return (
        text if judged(found.ratio, found.low, found.high) == "faster" else f"not shown to be faster: {text}"
    )


def _outside(others: Sequence[Proposal], present: Proposal, confidence: float) -> Choice:
    """The choice if the limits of the answers exclude the present configuration, so that something has to change."""
    if not others:
        return Choice(None, "no recommendation: no proposal within the limits was measured")
    found = against(others[0], present, confidence)
    if found is None or found.high > found.low * (1 + WORTH) ** 2:
        return Choice(None, _refusal(others[0], present, found, confidence), found)
    text = f"{_speed(found, confidence)} of the present configuration, which is outside the limits"
    return Choice(others[0], text, found)


def against(one: Proposal, present: Proposal, confidence: float = CONFIDENCE) -> Estimate | None:
    """The ratio of items per second to the present configuration; None with fewer than FEWEST common rounds."""
    if one.measured is None or present.measured is None:
        return None
    pairs = list(
        zip(one.measured.rounds_s[SHORT_ROUNDS:], present.measured.rounds_s[SHORT_ROUNDS:], strict=False)
    )
    if len(pairs) < FEWEST:
        return None
    blocks = Replicates(few_pairs=True)
    blocks.begin()
    for mine, theirs in pairs:
        blocks.add(math.log(one.batch.items / mine) - math.log(present.batch.items / theirs))
    return blocks.estimate(confidence)


def _verdict(one: Proposal, present: Proposal, floor: float, confidence: float) -> str:
    """The verdict on the ratio over `floor`; inconclusive with too few rounds for their spread."""
    rounds = min(len(each.measured.counted) for each in (one, present) if each.measured is not None)
    wild = _spread(one, present) > WILD
    if wild and rounds < WILD_ROUNDS:
        return "inconclusive"
    found = against(one, present, max(confidence, WILD_CONFIDENCE) if wild else confidence)
    if found is None:
        return "inconclusive"
    return judged(found.ratio / floor, found.low / floor, found.high / floor)


def _spread(*proposals: Proposal) -> float:
    """How much the rounds of one of them differ at most."""
    return max(one.measured.spread or 0.0 for one in proposals if one.measured is not None)


def _speed(found: Estimate, confidence: float) -> str:
    return f"measured at {with_interval(f'{times(found.ratio)}x', confidence, found.low, found.high, times)} the speed"


def _refusal(one: Proposal, present: Proposal, found: Estimate | None, confidence: float) -> str:
    """Why the fastest proposal is not recommended, and what to do."""
    assert present.measured is not None and one.measured is not None
    if found is None:
        rounds = min(len(each.measured.counted) for each in (one, present) if each.measured is not None)
        if len(one.measured.rounds_s) <= SHORT_ROUNDS:
            rounds = 0
        return (
            f"no recommendation: {rounds} of {FEWEST} rounds of the best proposal and the present configuration were "
            "measured; raise --budget"
        )
    slowest = max(max(each.measured.counted) for each in (one, present) if each.measured is not None)
    return (
        f"no recommendation: rounds differ by up to {_spread(one, present):.0%} (slowest {duration(slowest)} per "
        f"step), so the best proposal was {_speed(found, confidence)} of the present configuration; repeat it on an "
        "idle machine, or raise --budget"
    )
