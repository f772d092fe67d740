"""Verifies proposals by training each of them for a few seconds in a subprocess. Does not import torch.

Uses successive halving: all proposals for a few steps, the better half for three times as many, and the two best for
two longer rounds in opposite order, so that a machine that slows down favours neither.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from ndd_engine.child import ChildError, spec_of, ticker
from ndd_engine.trial.blocks import switched_off
from ndd_engine.trial.process import SideProcess

from .answers import Answers
from .planner import Situation, WizardStoppedError
from .proposals import NOT_MEASURED, Measured, Proposal

# Maximum (steps, seconds) of one proposal in each round; always at least two steps.
ROUNDS = ((5, 2.0), (15, 4.0), (45, 4.0), (45, 4.0))
WARM_UP, WARM_UP_S = 5, 2.0
# Number of proposals in the last rounds.
FINALISTS = 2
# Number of final rounds that count.
COUNTED = 2
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
        """Seconds per step in the rounds that count; the first rounds are short."""
        counted = self.rounds[-COUNTED:]
        steps = sum(steps for steps, _ in counted)
        return sum(seconds for _, seconds in counted) / steps if steps else None

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
) -> list[Proposal]:
    """Measure proposals. Returns all of them in the same order with `measured` set; failures carry their reason.

    budget_s: seconds after which no new round starts. stop: set it to stop early and keep the results so far.
    """
    candidates = [_Candidate(proposal) for proposal in chosen]
    race = _Race(situation, answers, budget_s, tell, stop)
    try:
        alive = candidates
        for number in range(len(ROUNDS)):
            alive = race.round(alive[::-1] if number % 2 else alive, number)
            alive = sorted(alive, key=lambda one: -one.rate)[: max((len(alive) + 1) // 2, FINALISTS)]
            race.close([one for one in candidates if one not in alive])
    except WizardStoppedError:
        pass  # keep the results so far
    finally:
        race.close(candidates)
    return [replace(one.proposal, measured=_measured(one)) for one in candidates]


def _measured(candidate: _Candidate) -> Measured:
    # A failure in a later round would also end the run.
    if not candidate.rounds or candidate.verdict:
        return Measured(None, candidate.memory_bytes, candidate.verdict or NOT_MEASURED)
    rounds_s = tuple(seconds / steps for steps, seconds in candidate.rounds)
    return Measured(candidate.step_s, candidate.memory_bytes, rounds_s=rounds_s)


def _held(candidates: Sequence[_Candidate]) -> int:
    return sum(max(one.proposal.memory_bytes or 0, one.memory_bytes or 0) for one in candidates)


class _Race:
    """Runs the candidates of each round one at a time, since they would compete for cores."""

    def __init__(
        self, situation: Situation, answers: Answers, budget_s: float, tell: Tell, stop: threading.Event
    ) -> None:
        self._situation, self._answers = situation, answers
        self._budget_s, self._tell, self._stop = budget_s, tell, stop
        self._begin = time.monotonic()
        # Candidates whose processes stay alive between rounds, oldest first.
        self._holding: list[_Candidate] = []

    def round(self, candidates: Sequence[_Candidate], number: int) -> list[_Candidate]:
        """Measure one round. Returns the candidates that succeeded."""
        done: list[_Candidate] = []
        for place, one in enumerate(candidates):
            if self._elapsed_s > self._budget_s and (number or done):
                break
            words = f"measuring {place + 1} of {len(candidates)}, round {number + 1}"
            try:
                self._measure(one, *ROUNDS[number], words)
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
    def _elapsed_s(self) -> float:
        return time.monotonic() - self._begin

    def _measure(self, one: _Candidate, steps: int, limit_s: float, words: str) -> None:
        def tell(text: str) -> None:
            self._tell(text, min(self._elapsed_s / self._budget_s, 1.0))

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
