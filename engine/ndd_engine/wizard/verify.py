"""Verifies proposals by training each of them for a few seconds in a subprocess. Does not import torch.

Uses successive halving: all proposals for a few steps, the better half for three times as many, and the two best for
longer rounds in alternating order, so that a machine that slows down favours neither. The present configuration takes
part in every round. Where the rounds disagree too much for a recommendation, further ones follow within the budget.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from ndd_engine.child import ChildError, spec_of, ticker
from ndd_engine.trial.blocks import switched_off
from ndd_engine.trial.sides import SideProcess

from .answers import Answers
from .choice import choose
from .planner import Situation, WizardStoppedError
from .proposals import NOT_MEASURED, Measured, Proposal

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
