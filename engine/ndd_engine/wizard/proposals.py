"""Proposals: combinations with predicted memory, time and cost, their Pareto front and their order by goal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ndd_engine.config import Config
from ndd_engine.text import number, plural

from .space import SINGLE, Answers, Batch, Layout, Model

Json = dict[str, Any]
NOT_MEASURED = "not measured"
# Rounds of a verification that only sort out the slow ones.
SHORT_ROUNDS = 2
# Goal "low-memory": minimum throughput relative to the fastest proposal that fits.
FAST_ENOUGH = 0.8
# Goal "low-memory" on a GPU that is known only by its peak FLOP/s: maximum share of the free memory.
LOW_MEMORY_SHARE = 0.5


@dataclass(frozen=True)
class Measured:
    """Result of a verification. verdict: "measured", or why there is no value.

    rounds_s: seconds per step in each round, see `counted`.
    """

    step_s: float | None
    memory_bytes: int | None
    verdict: str = "measured"
    rounds_s: tuple[float, ...] = ()

    @property
    def counted(self) -> tuple[float, ...]:
        """Seconds per step in the long rounds; of all rounds before the first long one."""
        return self.rounds_s[SHORT_ROUNDS:] or self.rounds_s

    @property
    def spread(self) -> float | None:
        """Slowest over fastest round that counts, minus 1; None with fewer than two."""
        counted = self.counted
        return max(counted) / min(counted) - 1 if len(counted) > 1 else None


@dataclass(frozen=True)
class Proposal:
    """One row of the trade-off table.

    memory_bytes: predicted peak, None if unknown. free_bytes: usable memory. step_s: predicted, None if unknown.
    total_s: time for `items` items (of the run or the goal), including data preparation. doubt: why the memory has low
    confidence, or "". retries: if it fits only with retries of the allocator, how many; they cost time that step_s does
    not include. lower_bound: the time is a lower bound from published peak FLOP/s. cost: disadvantages other
    than time and memory, or "". threads: intra-op threads, None for the default. given: the overrides that select the
    present configuration as it is, None for every other row. allowed: whether it is within the limits of the answers;
    only the present configuration may not be. layout: the ranks, on each of which `batch` and the memory are;
    select_ranks: whether it differs from the initial configuration. whole_bytes: for a sharded model, the predicted
    peak with the whole model on each rank, which does not fit; None if unknown.
    """

    model: Model
    batch: Batch
    placement: str
    workers: int
    parameters: int
    memory_bytes: int | None
    free_bytes: int
    step_s: float | None
    items: int
    tokens_per_item: float
    setup_s: float = 0.0
    doubt: str = ""
    lower_bound: bool = False
    cost: str = ""
    measured: Measured | None = None
    threads: int | None = None
    retries: int = 0
    given: tuple[str, ...] | None = None
    allowed: bool = True
    layout: Layout = SINGLE
    select_ranks: bool = False
    whole_bytes: int | None = None

    @property
    def present(self) -> bool:
        """Whether it is the configuration that the wizard started from."""
        return self.given is not None

    @property
    def key(self) -> tuple[Model, Batch, str, int, Layout]:
        """Identifies the row, independent of predictions and measurements."""
        return self.model, self.batch, self.placement, self.workers, self.layout

    @property
    def missing_bytes(self) -> int:
        """Bytes over the limit; 0 if it fits or the memory is unknown."""
        return max((self.memory_bytes or 0) - self.free_bytes, 0)

    @property
    def fits(self) -> bool:
        return self.missing_bytes == 0

    @property
    def failed(self) -> str:
        """Why training failed during verification; "" if it succeeded or was not tried."""
        known = self.measured
        return known.verdict if known and known.step_s is None and known.verdict != NOT_MEASURED else ""

    @property
    def over_bytes(self) -> int:
        """Measured bytes over the limit; 0 if within it."""
        known = self.measured
        return max((known.memory_bytes or 0) - self.free_bytes, 0) if known else 0

    @property
    def items_per_s(self) -> float | None:
        """Of all ranks; of several, without the time to exchange gradients."""
        return None if not self.step_s else self.batch.items * self.layout.ranks / self.step_s

    @property
    def tokens_per_s(self) -> float | None:
        rate = self.items_per_s
        return None if rate is None or not self.tokens_per_item else rate * self.tokens_per_item

    @property
    def total_s(self) -> float | None:
        rate = self.items_per_s
        return None if rate is None else self.setup_s + self.items / rate

    def sets(self) -> tuple[str, ...]:
        """The overrides of the initial configuration that select it."""
        if self.given is not None:
            return self.given
        threads = () if self.threads is None else (f"run.threads={self.threads}",)
        ranks: tuple[str, ...] = ()
        if self.select_ranks:
            ranks = f"parallel.ranks={self.layout.ranks}", f"parallel.strategy={self.layout.strategy}"
        return (
            *self.model.sets(),
            *threads,
            *ranks,
            f"batch.micro={self.batch.micro}",
            f"batch.accumulation={self.batch.accumulation}",
            f"loader.placement={self.placement}",
            f"loader.workers={self.workers}",
        )

    def to_dict(self) -> Json:
        """JSON-serialisable."""
        measured = self.measured
        return {
            "present": self.present,
            "size": self.model.size,
            "sequence": self.model.sequence,
            "amp": self.model.amp,
            "micro": self.batch.micro,
            "accumulation": self.batch.accumulation,
            "ranks": self.layout.ranks,
            "strategy": self.layout.strategy if self.layout.ranks > 1 else None,
            "placement": self.placement,
            "workers": self.workers,
            "parameters": self.parameters,
            "predicted_memory_bytes": self.memory_bytes,
            "missing_bytes": self.missing_bytes,
            "retries": self.retries,
            "memory_doubt": self.doubt,
            "predicted_step_s": self.step_s,
            "step_is_lower_bound": self.lower_bound,
            "predicted_items_per_s": self.items_per_s,
            "predicted_tokens_per_s": self.tokens_per_s,
            "predicted_total_s": self.total_s,
            "cost": self.cost,
            "measured_step_s": None if measured is None else measured.step_s,
            "measured_memory_bytes": None if measured is None else measured.memory_bytes,
            "measured_spread": None if measured is None else measured.spread,
            "verification": None if measured is None else measured.verdict,
            "set": list(self.sets()),
        }


def pareto(proposals: Iterable[Proposal]) -> list[Proposal]:
    """The Pareto front of those that fit, by memory, speed, sequence and model size."""
    rows = [(_merits(one), place, one) for place, one in enumerate(proposals) if one.fits and one.allowed]
    kept: list[tuple[tuple[float, ...], int, Proposal]] = []
    # In descending order none is dominated by a later one.
    for row in sorted(rows, key=lambda row: row[0], reverse=True):
        if not any(_beats(other[0], row[0]) for other in kept):
            kept.append(row)
    return [one for _, _, one in sorted(kept, key=lambda row: row[1])]


def _beats(mine: tuple[float, ...], theirs: tuple[float, ...]) -> bool:
    return mine != theirs and all(a >= b for a, b in zip(mine, theirs, strict=True))


def _merits(proposal: Proposal) -> tuple[float, ...]:
    """Criteria; higher is better."""
    return (
        -(proposal.memory_bytes or 0),
        _rate(proposal),
        proposal.model.sequence,
        proposal.parameters,
        -bool(proposal.retries),
        # Peak FLOP/s do not depend on the micro-batch, but larger ones get closer to them.
        proposal.batch.micro if proposal.lower_bound else 0,
    )


def _rate(proposal: Proposal) -> float:
    """Items per second; rounded if derived from peak FLOP/s, so that irrelevant differences do not count."""
    rate = proposal.items_per_s or 0.0
    return float(f"{rate:.2g}") if proposal.lower_bound else rate


def ranked(proposals: Sequence[Proposal], answers: Answers) -> list[Proposal]:
    """Those that fit and are allowed, best for the goal first."""
    fitting = [proposal for proposal in proposals if proposal.fits and proposal.allowed]
    known = [proposal for proposal in fitting if proposal.items_per_s is not None]
    if answers.goal == "low-memory" and known:
        if any(proposal.lower_bound for proposal in known):
            lean = [
                one for one in by_speed(known) if (one.memory_bytes or 0) <= LOW_MEMORY_SHARE * one.free_bytes
            ]
        else:
            enough = FAST_ENOUGH * max(_rate(proposal) for proposal in known)
            lean = [proposal for proposal in known if _rate(proposal) >= enough]
            lean.sort(key=lambda one: (bool(one.retries), one.memory_bytes or 0))
        taken = set(map(id, lean))
        return [*lean, *by_speed(one for one in fitting if id(one) not in taken)]
    if answers.goal == "time" and not any(proposal.lower_bound for proposal in known):
        return sorted(fitting, key=lambda one: (bool(one.retries), one.total_s is None, one.total_s or 0.0))
    return by_speed(fitting)


def by_speed(proposals: Iterable[Proposal]) -> list[Proposal]:
    """Fastest first; ties by least memory, or by largest micro-batch if only peak FLOP/s are known.

    Those that need retries of the allocator come last: what these cost is not known before a measurement.
    """
    return sorted(proposals, key=slowness)


def slowness(proposal: Proposal) -> tuple[bool, bool, float, int]:
    """The sort key of `by_speed`."""
    order = -proposal.batch.micro if proposal.lower_bound else proposal.memory_bytes or 0
    retried = bool(proposal.retries) and (proposal.measured is None or proposal.measured.step_s is None)
    return proposal.items_per_s is None, retried, -_rate(proposal), order


def cost_in_words(
    config: Config,
    token: str | None,
    now: tuple[str | None, int],
    model: Model,
    batch: Batch,
    parameters: tuple[int, int],
    layout: Layout = SINGLE,
) -> str:
    """Disadvantages of a combination other than time and memory, or "".

    now: the configured size and sequence. parameters: of the configured model, and of this one.
    """
    words = []
    if model.sequence < now[1]:
        unit = plural(token) if token else "steps"
        words.append(f"context of {model.sequence} instead of {now[1]} {unit}, so items are smaller")
    if model.size != now[0] and parameters[1] != parameters[0]:
        kind = "smaller" if parameters[1] < parameters[0] else "larger"
        words.append(f"{kind} model: {number(parameters[1])} instead of {number(parameters[0])} parameters")
    items = batch.items * layout.ranks
    if items != config.items_per_step:
        words.append(f"effective batch {items:,} instead of {config.items_per_step:,}: retune optimizer.lr")
    if model.amp == "fp16":
        words.append("fp16 has 11 bits of precision and a narrow range, so the loss is scaled")
    if model.amp == "bf16":
        words.append("bf16 has 8 bits of precision")
    return "; ".join(words)
