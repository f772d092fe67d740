"""Which proposals are shown, and in which order: by goal, and a handful that differ in what matters."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import replace

from ndd_engine.config import Config
from ndd_engine.text import duration, number, plural

from .proposals import SINGLE, Answers, Batch, Layout, Model, Proposal

# Goal "low-memory": minimum throughput relative to the fastest proposal that fits.
FAST_ENOUGH = 0.8


def pareto(proposals: Iterable[Proposal]) -> list[Proposal]:
    """The Pareto front of those that fit, by memory, speed, sequence and model size."""
    rows = [(_merits(one), place, one) for place, one in enumerate(proposals) if one.fits and one.allowed]
    kept: list[tuple[tuple[float, ...], int, Proposal]] = []
    # In descending order none is dominated by a later one.
    for row in sorted(rows, key=lambda row: row[0], reverse=True):
        better = (all(map(operator.ge, other, row[0])) for other, *_ in kept if other != row[0])
        if not any(better):
            kept.append(row)
    return [one for _, _, one in sorted(kept, key=lambda row: row[1])]


def _merits(proposal: Proposal) -> tuple[float, ...]:
    """Criteria; higher is better."""
    return (
        -(proposal.memory_bytes or 0),
        _rate(proposal),
        proposal.model.sequence,
        proposal.parameters,
        -bool(proposal.retries),
    )


def _rate(proposal: Proposal) -> float:
    """Items per second; 0 if they are unknown."""
    return proposal.items_per_s or 0.0


def _slow_rate(proposal: Proposal) -> float:
    """Items per second on a slow host, if the time is an estimate."""
    if proposal.step_range_s is None:
        return _rate(proposal)
    return proposal.batch.items * proposal.layout.ranks / proposal.step_range_s[1]


def ranked(proposals: Sequence[Proposal], answers: Answers) -> list[Proposal]:
    """Those that fit, are allowed and are no alternatives, best for the goal first.

    For throughput: of those within PAYS of the fastest, one that keeps the effective batch, then the smallest batch.
    Those with too few steps an epoch count only if all have.
    """
    fitting = [one for one in proposals if one.fits and one.allowed and not one.alternative]
    fitting = [one for one in fitting if one.enough_steps] or fitting
    known = [proposal for proposal in fitting if proposal.items_per_s is not None]
    lean: list[Proposal] = []
    if answers.goal == "low-memory" and known:
        enough = FAST_ENOUGH * max(_rate(proposal) for proposal in known)
        lean = [proposal for proposal in known if _rate(proposal) >= enough]
        lean.sort(key=lambda one: (bool(one.retries), one.memory_bytes or 0))
    elif answers.goal == "time":
        return sorted(fitting, key=lambda one: (bool(one.retries), one.total_s is None, one.total_s or 0.0))
    elif known:
        lean = paying(known)
    taken = set(map(id, lean))
    return [*lean, *by_speed(one for one in fitting if id(one) not in taken)]


def paying(proposals: Sequence[Proposal]) -> list[Proposal]:
    """Those within PAYS of the fastest, also on a slow host: such that keep the effective batch first, then by batch.

    Those that need retries of the allocator come in only if all do.
    """
    sure = [one for one in proposals if not one.retries] or list(proposals)
    near = sure
    for rate in (_rate, _slow_rate):
        enough = (1 - PAYS) * max(map(rate, near))
        near = [one for one in near if rate(one) >= enough]
    return sorted(
        near, key=lambda one: (one.batch_times != 1, one.batch.items, one.memory_bytes or 0, -_rate(one))
    )


# A larger batch is proposed only where it is faster by more than this share.
PAYS = 0.05


def handful(proposals: Sequence[Proposal], answers: Answers) -> list[Proposal]:
    """The proposals that differ in what matters: the best first, alternatives after those, what does not fit last.

    Of the configured model: the best of each precision; what keeps the effective batch; what needs the least memory at
    FAST_ENOUGH of the speed; the present configuration and everything measured. Of each other model: the best; of one
    whose blocks compute again, the largest micro-batch. What does not fit: the one with the least over the limit, and
    the smallest batch of each model that does not fit at all.
    """
    order = ranked(proposals, answers)
    chosen: list[Proposal] = []

    def add(rows: Sequence[Proposal]) -> None:
        if rows and rows[0].key not in {one.key for one in chosen}:
            chosen.append(rows[0])

    add(order)
    by_model: dict[tuple[Model, Layout], list[Proposal]] = {}
    for one in proposals:
        by_model.setdefault((one.model, one.layout), []).append(one)
    for rows in by_model.values():
        fitting = [one for one in rows if one.fits and one.allowed and one.items_per_s is not None]
        if rows[0].model.recomputes:  # for a larger micro-batch
            add(sorted(fitting, key=lambda one: -one.batch.micro))
        else:
            add(ranked([replace(one, alternative=False) for one in fitting], answers))
        if not fitting:
            add(sorted(rows, key=lambda one: (one.missing_bytes, one.batch.items)))
    same = [one for one in order if one.batch_times == 1]
    add(by_speed(same))
    if order and all(one.items_per_s is not None for one in order):
        enough = FAST_ENOUGH * max(map(_rate, order))
        fast = [one for one in order if _rate(one) >= enough]
        add(sorted(fast, key=lambda one: (bool(one.retries), one.memory_bytes or 0)))
    for one in proposals:
        if one.present or one.measured is not None:
            add([one])
    large = [one for one in proposals if not one.fits and not one.alternative]
    add(sorted(large, key=lambda one: one.missing_bytes))
    known = {one.key: one for one in proposals}
    found = [known[one.key] for one in chosen]
    return sorted(
        found, key=lambda one: (not one.fits, one.alternative, one.key != found[0].key, slowness(one))
    )


def by_speed(proposals: Iterable[Proposal]) -> list[Proposal]:
    """Fastest first; ties by least memory.

    Those that need retries of the allocator come last: what these cost is not known before a measurement.
    """
    return sorted(proposals, key=slowness)


def slowness(proposal: Proposal) -> tuple[bool, bool, float, int]:
    """The sort key of `by_speed`."""
    retried = bool(proposal.retries) and (proposal.measured is None or proposal.measured.step_s is None)
    return proposal.items_per_s is None, retried, -_rate(proposal), proposal.memory_bytes or 0


def cost_in_words(
    config: Config,
    token: str | None,
    now: tuple[str | None, int],
    model: Model,
    batch: Batch,
    parameters: tuple[int, int],
    layout: Layout = SINGLE,
) -> str:
    """What a combination gives up other than memory and time, or "".

    now: the configured size and sequence. parameters: of the configured model, and of this one.
    """
    words = []
    if model.sequence < now[1]:
        unit = plural(token) if token else "steps"
        words.append(f"context of {model.sequence} instead of {now[1]} {unit}")
    if model.size != now[0] and parameters[1] != parameters[0]:
        words.append(f"{number(parameters[1])} instead of {number(parameters[0])} parameters")
    items = batch.items * layout.ranks
    if items != config.items_per_step:
        words.append(f"effective batch {items:,} instead of {config.items_per_step:,}: retune optimizer.lr")
    if model.amp == "fp16":
        words.append("fp16 has 11 bits of precision and a narrow range, so the loss is scaled")
    if model.amp == "bf16":
        words.append("bf16 has 8 bits of precision")
    return "; ".join(words)


def range_in_words(proposal: Proposal) -> str:
    """The range of a predicted step and what limits it; "" of a measured one."""
    if proposal.step_range_s is None:
        return ""
    low, high = map(duration, proposal.step_range_s)
    return f"predicted, {low} to {high} a step, limited by the {proposal.decides}"
