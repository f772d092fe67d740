"""The wizard: from the answers to the configuration as commented TOML, verified by training. Does not import torch.

Each proposal trains for a few seconds. The present configuration stays unless another is shown to be better.
"""

from __future__ import annotations

import difflib
import math
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import tomlkit
from tomlkit.exceptions import TOMLKitError

from ndd_engine.child import ChildError, spec_of, ticker
from ndd_engine.config import Config, changed_toml, read
from ndd_engine.config.loading import text_of
from ndd_engine.errors import UsageError
from ndd_engine.text import counted, duration, factor, number, plural, printable, size, times
from ndd_engine.trial.blocks import switched_off
from ndd_engine.trial.campaign import Campaign, CampaignState
from ndd_engine.trial.estimates import CONFIDENCE, Estimate, Replicates, judged
from ndd_engine.trial.outcome import differences, with_interval
from ndd_engine.trial.sides import SideProcess

from .planner import (
    Planner,
    ProbedModel,
    Situation,
    Tell,
    WizardStoppedError,
    on_gpu,
    proposals,
    unprobed_present,
)
from .proposals import GOALS, NOT_MEASURED, SHORT_ROUNDS, Answers, Measured, Proposal
from .ranking import FAST_ENOUGH, pareto, range_in_words, ranked


def into(text: str, values: Mapping[str, Any], reasons: Mapping[str, str]) -> str:
    """Change values in the text of a TOML file; everything else, including comments, is preserved.

    values: by dotted key, None to remove a key. reasons: by dotted key, a comment to append to a changed value, after
    the user's own. Raises UsageError if the text is not valid TOML.
    """
    try:
        document = tomlkit.parse(text)
    except TOMLKitError as error:
        raise UsageError(f"the file is not valid TOML: {printable(str(error))}") from None
    for key, value in values.items():
        *sections, name = key.split(".")
        table = _section(document, sections, make=value is not None)
        if table is None:
            continue
        if value is None:
            if name in table:
                table.remove(name)
            continue
        before = table.get(name)
        if before is not None and before == value:
            continue
        item = tomlkit.item(value)
        reason = printable(reasons.get(key, ""))
        theirs = "" if before is None else str(before.trivia.comment or "").lstrip("# ")
        item.comment(" | ".join(part for part in (theirs, reason) if part)) if theirs or reason else None
        table[name] = item
    return tomlkit.dumps(document)


def _section(document: Any, names: Sequence[str], make: bool) -> Any:
    """The nested table, created if `make`, else None if it does not exist. Raises UsageError if it is a value."""
    table = document
    for name in names:
        if name not in table:
            if not make:
                return None
            if table is document and document.body:
                document.add(tomlkit.nl())
            table.add(name, tomlkit.table())
        table = table[name]
        if not isinstance(table, MutableMapping):
            raise UsageError(f"[{'.'.join(names)}] must be a section, but the file has a value there")
    return table


def difference(before: str, after: str, name: str) -> list[str]:
    """Lines of the unified diff between the current and the new text; [] if nothing changes."""
    lines = difflib.unified_diff(
        before.splitlines(), after.splitlines(), f"{name} (current)", f"{name} (new)", lineterm="", n=2
    )
    return [printable(line) for line in lines]


# Number of proposals to verify, with the present configuration.
VERIFIED = 6
# Changing the model size changes other defaults, which the file may then have to override.
_PASSES = 4


@dataclass(frozen=True)
class ProposalSet:
    """All proposals so far. found: probed models, in order; rows: the proposals of all of them."""

    situation: Situation
    found: tuple[ProbedModel, ...] = ()
    rows: tuple[Proposal, ...] = ()

    @cached_property
    def best(self) -> tuple[Proposal, ...]:
        """The Pareto front."""
        return tuple(pareto(self.rows))

    @property
    def present(self) -> Proposal | None:
        """The configuration that the wizard started from; None if it cannot be measured, as with several ranks."""
        return next((one for one in self.rows if one.present and one.fits and one.layout.ranks == 1), None)

    def ranked(self, answers: Answers) -> list[Proposal]:
        """Those that fit, best for the goal first."""
        return ranked(self.rows, answers)

    def verified(self, measured: Sequence[Proposal]) -> ProposalSet:
        """With the measured proposals replacing their rows."""
        known = {one.key: one for one in measured}
        rows = tuple(known.get(one.key, one) for one in self.rows)
        return replace(self, rows=rows)


def propose(
    answers: Answers,
    tell: Tell,
    stop: threading.Event,
    look: Callable[[ProposalSet], None] = lambda _: None,
) -> ProposalSet:
    """Probe every allowed model. look: called after each with all proposals so far.

    If stopped after the first model, returns the proposals so far. Raises WizardStoppedError if stopped earlier, and
    NddError.
    """
    with Planner(answers, tell, stop) as planner:
        proposed = ProposalSet(planner.open())
        look(proposed)
        try:
            for found in planner.probe(proposed.situation):
                rows = proposals(proposed.situation, answers, found)
                proposed = replace(proposed, found=(*proposed.found, found), rows=(*proposed.rows, *rows))
                look(proposed)
        except WizardStoppedError:
            if not proposed.rows:
                raise
    if proposed.rows and not any(one.present for one in proposed.rows):
        one = unprobed_present(proposed.situation, answers, proposed.rows)
        proposed = replace(proposed, rows=(*proposed.rows, *((one,) if one is not None else ())))
        look(proposed)
    return proposed


def to_verify(proposed: ProposalSet, answers: Answers, count: int = VERIFIED) -> list[Proposal]:
    """The present configuration and the best proposals for the goal, without near-duplicates.

    Similar micro-batches measure alike. None if several ranks are proposed: a measurement has one.
    """
    if proposed.situation.ranks > 1:
        return []
    chosen: list[Proposal] = []
    for one in proposed.ranked(answers):
        micro = one.batch.micro
        alike = (other.batch.micro for other in chosen if other.model == one.model)
        if one.present or not any(max(micro, other) < 2 * min(micro, other) for other in alike):
            chosen.append(one)
    present = proposed.present
    if present is None:
        return chosen[:count]
    return with_present([one for one in chosen if not one.present][: max(count - 1, 1)], proposed)


def with_present(chosen: Sequence[Proposal], proposed: ProposalSet) -> list[Proposal]:
    """Proposals to measure, the present configuration first; it is what the others are compared with."""
    present = proposed.present
    return [*((present,) if present is not None else ()), *(one for one in chosen if not one.present)]


def best_measured(verified: Sequence[Proposal], answers: Answers) -> Proposal | None:
    """The best for the goal by measurement, preferably within the memory limit; None if nothing was measured."""
    first = by_measured(verified, answers)[:1]
    return next((one for one in first if one.measured is not None and one.measured.step_s is not None), None)


def by_measured(verified: Sequence[Proposal], answers: Answers) -> list[Proposal]:
    """Best for the goal by measurement first, then those over the memory limit, then those without a measurement."""
    known = [one for one in verified if one.measured is not None and one.measured.step_s is not None]
    within = [one for one in known if not one.over_bytes]
    over = [one for one in known if one.over_bytes]
    keys = [
        one.key for group in (within, over) for one in ranked([_as_measured(one) for one in group], answers)
    ]
    rows = {one.key: one for one in verified}
    return [*(rows[key] for key in keys), *(one for one in verified if one.key not in keys)]


def _as_measured(one: Proposal) -> Proposal:
    """With measured instead of predicted values; it fits, because it ran."""
    assert one.measured is not None
    memory = one.measured.memory_bytes or one.memory_bytes
    return replace(
        one, step_s=one.measured.step_s, memory_bytes=memory, free_bytes=max(one.free_bytes, memory or 0)
    )


def configuration(answers: Answers, proposal: Proposal) -> Config:
    """The proposal's configuration. Raises ConfigError."""
    return read(answers.config, (*answers.all_sets, *proposal.sets()), answers.workload).resolve()


def written(answers: Answers, situation: Situation, proposal: Proposal, compared: str = "") -> str:
    """The TOML of a proposal; every chosen value is commented with its reason.

    compared: how it compares with the present configuration, see choice.comparison.
    """
    about = heading(answers, situation, proposal, compared)
    why = reasons(situation, proposal)
    if answers.assumes_length:
        why["run.epochs"] = "assumed, because the length of the run was not set"
    return changed_toml(configuration(answers, proposal), about, why)


def written_into(answers: Answers, situation: Situation, proposal: Proposal, path: Path) -> str:
    """The text of a file, changed to the proposal; comments are preserved. Raises NddError."""
    wanted = configuration(answers, proposal)
    why = reasons(situation, proposal)
    text = text_of(path)
    size_ = proposal.model.size
    # With size "auto" the run might choose another size.
    values: dict[str, Any] = {} if size_ is None or read(path).size == size_ else {"workload.size": size_}
    for _ in range(_PASSES):
        text = into(text, values, why)
        left = differences(read(path, text=text).resolve(), wanted)
        values = {key: new for key, (_, new) in left.items() if key != "workload.path"}
        if "batch.effective" in values and values["batch.effective"] is None:
            # A file that this one extends may set it: the accumulation here replaces it.
            values["batch.accumulation"] = wanted.batch.accumulation
        if not values:
            return text
    raise UsageError(f"{printable(str(path))}: cannot set {', '.join(values)}; write a new file")


def heading(answers: Answers, situation: Situation, proposal: Proposal, compared: str = "") -> str:
    """The comment at the top of the file."""
    lines = [f"Proposed for {situation.device_name}: {GOALS[answers.goal]}."]
    memory, step = proposal.memory_bytes, proposal.step_s
    figures = []
    if memory is not None:
        each = f" on each of {proposal.layout.ranks} ranks" if proposal.layout.ranks > 1 else ""
        figures.append(f"peak memory {size(memory)} of {size(proposal.free_bytes)} usable{each}")
    if step is not None:
        bound = "at least " if proposal.layout.ranks > 1 else ""
        figures.append(f"{bound}{duration(step)} per step")
    if words := range_in_words(proposal):
        figures.append(words)
    if figures:
        lines.append(f"Predicted: {', '.join(figures)}.")
    measured = proposal.measured
    if measured is not None and measured.step_s is not None:
        peak = "" if measured.memory_bytes is None else f"peak memory {size(measured.memory_bytes)}, "
        lines.append(f"Measured: {peak}{duration(measured.step_s)} per step.")
        if compared:
            lines.append(f"{compared[:1].upper()}{compared[1:]}.")
        if proposal.over_bytes:
            lines.append(f"Memory is over the limit by {size(proposal.over_bytes)}.")
    else:
        lines.append("Not verified by a measurement.")
    if proposal.cost:
        lines.append(f"Disadvantages: {proposal.cost}.")
    return "\n".join(lines)


def reasons(situation: Situation, proposal: Proposal) -> dict[str, str]:
    """By dotted key, the reason for a value."""
    opened, batch, measured = situation.opened, proposal.batch, proposal.measured
    ranks = proposal.layout.ranks
    times = f"{batch.micro} x {batch.accumulation}" + (f" x {ranks} ranks" if ranks > 1 else "")
    found = {
        "batch.accumulation": f"{times} = {counted(batch.items * ranks, opened.item)} per step",
    }
    if ranks > 1:
        found["parallel.ranks"] = situation.ranks_why or "as configured"
        found["parallel.strategy"] = _why_strategy(situation, proposal)
    if proposal.model.size is not None:
        found["workload.size"] = f"{number(proposal.parameters)} parameters"
    if proposal.model.sequence != situation.config.batch.sequence:
        found["batch.sequence"] = f"instead of {situation.config.batch.sequence}"
    if proposal.memory_bytes is not None:
        text = f"predicted peak {size(proposal.memory_bytes)} of {size(proposal.free_bytes)}"
        if measured is not None and measured.memory_bytes is not None:
            text += f", measured {size(measured.memory_bytes)}"
        if proposal.doubt:
            text += f" (low confidence: {proposal.doubt})"
        found["batch.micro"] = text
    if (rate := proposal.items_per_s) is not None:
        most = "at most " if ranks > 1 else ""
        text = f"predicted {most}{number(rate)} {plural(opened.item)}/s"
        if measured is not None and measured.step_s:
            text += f", measured {number(batch.items / measured.step_s)}"
        found["batch.accumulation"] += f", {text}"
    if proposal.model.recomputes:
        found["memory.budget"] = "blocks compute again in backward, so that it fits"
    if proposal.threads is not None:
        found["run.threads"] = (
            ", ".join(
                f"{duration(s)} a micro-batch with {counted(n, 'thread')}" for n, s in opened.by_threads
            )
            or "fewer than the cores, because other processes used them during the measurement"
        )
    if on_gpu(situation):
        found["loader.placement"] = (
            f"the whole dataset takes {size(opened.items.kept_bytes)}"
            if opened.items.places
            else "this dataset must stay on the host"
        )
    if opened.device_name and situation.gpu is None:
        found["precision.amp"] = f"{proposal.model.precision} on {opened.device_name}"
    return found


def _why_strategy(situation: Situation, proposal: Proposal) -> str:
    if proposal.memory_bytes is None:
        return "its memory is unknown"
    room = f"of {size(proposal.free_bytes)}"
    if proposal.layout.strategy == "ddp":
        return f"a rank fits with the whole model: predicted {size(proposal.memory_bytes)} {room}"
    whole = (
        "it does"
        if proposal.whole_bytes is None
        else f"predicted {size(proposal.whole_bytes)} {room} it does"
    )
    return f"with the whole model on each rank {whole} not fit, sharded {size(proposal.memory_bytes)}"


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
    return f"measured at {with_interval(times(found.ratio), confidence, found.low, found.high, factor)} the speed"


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

TellShare = Callable[[str, float], None]


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
    tell: TellShare,
    stop: threading.Event,
    clock: Callable[[], float] = time.monotonic,
) -> list[Proposal]:
    """Measure proposals. Returns all of them in the same order with `measured` set; failures carry their reason.

    chosen: the present configuration among them, see session.with_present. budget_s: seconds after which no new round
    starts. stop: set it to stop early and keep the results so far. clock: seconds.
    """
    candidates = [_Candidate(proposal) for proposal in chosen]

    def told(state: CampaignState[Proposal]) -> None:
        tell(state.stage, min(campaign.share, 1.0))

    campaign: Campaign[CampaignState[Proposal]]
    campaign = Campaign(CampaignState(), told, stop, budget_s, clock=clock)
    race = _Race(situation, answers, campaign)
    try:
        alive = sorted(candidates, key=lambda one: not one.proposal.present)
        for number in range(MOST_ROUNDS):
            alive = race.round(alive[::-1] if number % 2 else alive, number)
            alive = _survivors(alive, FINALISTS if campaign.share > SORTED else (len(alive) + 1) // 2)
            race.close([one for one in candidates if one not in alive])
            extra = number + 1 - len(ROUNDS)
            even = extra >= 0 and not extra % 2
            if not alive or campaign.share > 1 or stop.is_set() or (even and _settled(candidates, answers)):
                break
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

    def __init__(self, situation: Situation, answers: Answers, campaign: Campaign[Any]) -> None:
        self._situation, self._answers, self._campaign = situation, answers, campaign
        # Candidates whose processes stay alive between rounds, oldest first.
        self._holding: list[_Candidate] = []

    def round(self, candidates: Sequence[_Candidate], number: int) -> list[_Candidate]:
        """Measure one round. Returns the candidates that succeeded."""
        done: list[_Candidate] = []

        def measure(place: int, one: _Candidate) -> None:
            # The first round leaves time for the others, which compare; the present configuration comes first in it.
            share = self._campaign.share
            if (share > 1 and (number or done)) or (not number and share > SORTED and len(done) > 1):
                return
            of = f"the {len(candidates)} still compared" if number else f"{len(candidates)}"
            words = f"measuring {place + 1} of {of}, round {number + 1}"
            if number >= len(ROUNDS):
                words += " (the rounds so far disagree)"
            try:
                self._measure(one, *ROUNDS[min(number, len(ROUNDS) - 1)], words)
            except ChildError as error:
                one.verdict = f"out of memory: {error}" if error.kind == "oom" else str(error)
                self.close([one])
            else:
                done.append(one)

        self._campaign.each(candidates, measure)
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

    def _measure(self, one: _Candidate, steps: int, limit_s: float, words: str) -> None:
        tick = ticker(words, self._campaign.say, self._campaign.stop)
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
