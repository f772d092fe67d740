"""The wizard from the answers to the configuration as commented TOML. Does not import torch."""

from __future__ import annotations

import difflib
import threading
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.exceptions import TOMLKitError

from ndd_engine.config import Config, changed_toml, read
from ndd_engine.config.loading import text_of
from ndd_engine.errors import UsageError
from ndd_engine.text import counted, duration, number, plural, printable, size
from ndd_engine.trial.outcome import differences

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
from .proposals import GOALS, Answers, Proposal, pareto, ranked


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
        bound = "at least " if proposal.lower_bound or proposal.layout.ranks > 1 else ""
        figures.append(f"{bound}{duration(step)} per step")
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
    if proposal.model.sequence != opened.sequence:
        found["batch.sequence"] = f"instead of {opened.sequence}"
    if proposal.memory_bytes is not None:
        text = f"predicted peak {size(proposal.memory_bytes)} of {size(proposal.free_bytes)}"
        if measured is not None and measured.memory_bytes is not None:
            text += f", measured {size(measured.memory_bytes)}"
        if proposal.doubt:
            text += f" (low confidence: {proposal.doubt})"
        found["batch.micro"] = text
    if (rate := proposal.items_per_s) is not None:
        most = "at most " if proposal.lower_bound or ranks > 1 else ""
        text = f"predicted {most}{number(rate)} {plural(opened.item)}/s"
        if measured is not None and measured.step_s:
            text += f", measured {number(batch.items / measured.step_s)}"
        found["batch.accumulation"] += f", {text}"
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
