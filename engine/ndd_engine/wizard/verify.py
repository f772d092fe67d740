"""Verifies proposals by training each for a few seconds, and says which to recommend. Does not import torch.

The present configuration stays unless another is shown to be better.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from ndd_engine.child import ChildError, spec_of, ticker
from ndd_engine.text import duration, printable
from ndd_engine.trial.blocks import switched_off
from ndd_engine.trial.estimates import CONFIDENCE, Estimate, Replicates, judged
from ndd_engine.trial.outcome import times, with_interval
from ndd_engine.trial.sides import SideProcess

from .planner import Situation, WizardStoppedError
from .proposals import FAST_ENOUGH, NOT_MEASURED, SHORT_ROUNDS, Answers, Measured, Proposal
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


# Maximum (steps, seconds) of one proposal in each round; always at least two steps.
# The long ones alternate in order and are even in number, so that a linear drift cancels.
ROUNDS = ((5, 2.0), (15, 4.0), *((45, 3.0),) * 4)
WARM_UP, WARM_UP_S = 5, 2.0
# Number of proposals in the last rounds.
FINALISTS = 2
# Share of the budget after which only the finalists are left.
SORTED = 0.5
# A proposal that is slower than the fastest by this factor takes no further part.
HOPELESS = 3.0
# Maximum number of rounds, and the confidence required to end before the budget is spent.
MOST_ROUNDS = 40
EARLY = 0.995
PATIENCE_S = 120.0

Tell = Callable[[str, float], None]


@dataclass
class _Candidate:
    """A proposal being measured. rounds: (steps, seconds) of each round."""

    proposal: Proposal
    side: SideProcess | None = None
    rounds: list[tuple[int, float]] = field(default_factory=list)
    memory_bytes: int | None = None
    verdict: str = ""

    @property
    def step_s(self) -> float | None:
        """Seconds per step: the geometric mean of the rounds that count, so that ratios follow from its figures."""
        counted = Measured(None, None, rounds_s=self.rounds_s).counted
        return math.exp(fmean(map(math.log, counted))) if counted else None

    @property
    def rounds_s(self) -> tuple[float, ...]:
        """Seconds per step of each round."""
        return tuple(max(seconds, 1e-9) / steps for steps, seconds in self.rounds)

    @property
    def rate(self) -> float:
        """Items per second; 0 if nothing was measured."""
        return self.proposal.batch.items / self.step_s if self.step_s else 0.0


def verify(
    situation: Situation,
    answers: Answers,
    chosen: Sequence[Proposal],
    budget_s: float,
    tell: Tell,
    stop: threading.Event,
    clock: Callable[[], float] = time.monotonic,
) -> list[Proposal]:
    """Measure proposals. Returns all of them in the same order with `measured` set; failures carry their reason.

    chosen: the present configuration among them, see session.with_present. budget_s: seconds after which no new round
    starts. stop: set it to stop early and keep the results so far. clock: seconds.
    """
    candidates = [_Candidate(proposal) for proposal in chosen]
    race = _Race(situation, answers, budget_s, tell, stop, clock)
    try:
        alive = sorted(candidates, key=lambda one: not one.proposal.present)
        for number in range(MOST_ROUNDS):
            alive = race.round(alive[::-1] if number % 2 else alive, number)
            alive = _survivors(alive, FINALISTS if race.share > SORTED else (len(alive) + 1) // 2)
            race.close([one for one in candidates if one not in alive])
            extra = number + 1 - len(ROUNDS)
            even = extra >= 0 and not extra % 2
            if not alive or race.share > 1 or (even and _settled(candidates, answers)):
                break
    except WizardStoppedError:
        pass  # keep the results so far
    finally:
        race.close(candidates)
    return [replace(one.proposal, measured=_measured(one)) for one in candidates]


def _survivors(alive: Sequence[_Candidate], count: int) -> list[_Candidate]:
    """The present configuration, and the fastest others."""
    present = [one for one in alive if one.proposal.present]
    others = sorted((one for one in alive if not one.proposal.present), key=lambda one: -one.rate)
    fastest = max((one.rate for one in alive), default=0.0)
    return [*present, *(one for one in others[: max(count, FINALISTS)] if one.rate * HOPELESS >= fastest)]


def _settled(candidates: Sequence[_Candidate], answers: Answers) -> bool:
    """Whether further rounds are not needed for a recommendation."""
    verified = [replace(one.proposal, measured=_measured(one)) for one in candidates]
    return choose(verified, answers, EARLY).best is not None or not any(one.present for one in verified)


def _measured(candidate: _Candidate) -> Measured:
    # A failure in a later round would also end the run.
    if not candidate.rounds or candidate.verdict:
        return Measured(None, candidate.memory_bytes, candidate.verdict or NOT_MEASURED)
    return Measured(candidate.step_s, candidate.memory_bytes, rounds_s=candidate.rounds_s)


def _held(candidates: Sequence[_Candidate]) -> int:
    return sum(max(one.proposal.memory_bytes or 0, one.memory_bytes or 0) for one in candidates)


class _Race:
    """Runs the candidates of each round one at a time, since they would compete for cores."""

    def __init__(
        self,
        situation: Situation,
        answers: Answers,
        budget_s: float,
        tell: Tell,
        stop: threading.Event,
        clock: Callable[[], float],
    ) -> None:
        self._situation, self._answers = situation, answers
        self._budget_s, self._tell, self._stop = budget_s, tell, stop
        self._clock, self._begin = clock, clock()
        # Candidates whose processes stay alive between rounds, oldest first.
        self._holding: list[_Candidate] = []

    def round(self, candidates: Sequence[_Candidate], number: int) -> list[_Candidate]:
        """Measure one round. Returns the candidates that succeeded."""
        done: list[_Candidate] = []
        for place, one in enumerate(candidates):
            # The first round leaves time for the others, which compare; the present configuration comes first in it.
            if (self.share > 1 and (number or done)) or (
                not number and self.share > SORTED and len(done) > 1
            ):
                break
            words = f"measuring {place + 1} of {len(candidates)}, round {number + 1}"
            if number >= len(ROUNDS):
                words += " (the rounds so far disagree)"
            try:
                self._measure(one, *ROUNDS[min(number, len(ROUNDS) - 1)], words)
            except ChildError as error:
                one.verdict = f"out of memory: {error}" if error.kind == "oom" else str(error)
                self.close([one])
                continue
            done.append(one)
        return done

    def close(self, candidates: Sequence[_Candidate]) -> None:
        """Close their processes; idempotent."""
        for one in candidates:
            if one.side is not None:
                one.side.close()
                one.side = None
        self._holding = [one for one in self._holding if one.side is not None]

    def _make_room(self, proposal: Proposal) -> None:
        """Close waiting processes, oldest first, until the next proposal fits into memory."""
        if proposal.memory_bytes is None:
            self.close(list(self._holding))  # its memory is unknown
        while self._holding and _held(self._holding) + (proposal.memory_bytes or 0) > proposal.free_bytes:
            self.close(self._holding[:1])

    @property
    def share(self) -> float:
        """The share of the budget that is spent; may exceed 1."""
        return (self._clock() - self._begin) / self._budget_s

    def _measure(self, one: _Candidate, steps: int, limit_s: float, words: str) -> None:
        def tell(text: str) -> None:
            self._tell(text, min(self.share, 1.0))

        tick = ticker(words, tell, self._stop)
        if one.side is None:
            self._make_room(one.proposal)
            one.side = side_of(self._answers, one.proposal)
            self._holding.append(one)
            one.side.prepare(PATIENCE_S, tick)
            one.side.train(WARM_UP, PATIENCE_S, tick, lead=0, until_s=WARM_UP_S, least=2)
        seconds, done = one.side.train(steps, PATIENCE_S, tick, until_s=limit_s, least=2)
        one.rounds.append((done, seconds))
        one.side.learn(tick)
        facts = one.side.facts
        one.memory_bytes = (
            # nvidia-smi includes the CUDA context.
            facts.reserved_bytes + self._situation.opened.context_bytes
            if facts.reserved_bytes is not None
            else facts.peak_bytes
        )


def side_of(answers: Answers, proposal: Proposal) -> SideProcess:
    """A process that trains the proposal, as it will be trained. Raises ChildError."""
    sets = [*answers.all_sets, *proposal.sets()]
    return SideProcess(spec_of(answers.config, answers.workload, sets, switched_off([])), environment={})
