"""Proposals: combinations with predicted memory and time, what each costs, and which of them nothing beats."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ndd_engine.config import Config
from ndd_engine.text import number

from .answers import Answers
from .space import Batch, Model

Json = dict[str, Any]
NOT_MEASURED = "not measured"
# Of the fastest that fits, what "fits beside others" may give up for less memory.
BESIDE = 0.8
# Of what is free, what it may take on a card of which only the peaks are known.
HALF = 0.5


@dataclass(frozen=True)
class Measured:
    """What a verification found. Seconds and bytes; verdict: "measured", or why there is no figure.

    rounds_s: of a step in each round, the longest round last: how much the machine's own pace differs.
    """

    step_s: float | None
    memory_bytes: int | None
    verdict: str = "measured"
    rounds_s: tuple[float, ...] = ()

    @property
    def spread(self) -> float | None:
        """From the fastest round to the slowest, as a part of the fastest; None with fewer than two rounds."""
        return max(self.rounds_s) / min(self.rounds_s) - 1 if len(self.rounds_s) > 1 else None


@dataclass(frozen=True)
class Proposal:
    """One row of the trade-offs.

    memory_bytes: predicted peak, None where it cannot be predicted; free_bytes: what may be used. step_s: predicted,
    None where unknown; total_s: of `items` items (the run, or those of the goal), preparing the data included.
    doubt: why the memory is a guess, "" where it is none. lower_bound: the time is what the card's published
    peaks allow at best. cost: what it costs beside time and memory, in plain words; "" for nothing. threads: intra-op
    threads, None for the usual number.
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

    @property
    def key(self) -> tuple[Model, Batch, str, int]:
        """What tells it from others of the same table, whatever is known of it."""
        return self.model, self.batch, self.placement, self.workers

    @property
    def missing_bytes(self) -> int:
        """What there is too little of; 0 where it fits, or where that is not known."""
        return max((self.memory_bytes or 0) - self.free_bytes, 0)

    @property
    def fits(self) -> bool:
        return self.missing_bytes == 0

    @property
    def failed(self) -> str:
        """Why it could not be trained when that was tried; "" where it could, or was not tried."""
        known = self.measured
        return known.verdict if known and known.step_s is None and known.verdict != NOT_MEASURED else ""

    @property
    def over_bytes(self) -> int:
        """By how much it was measured to take more than may be used; 0 where it does not."""
        known = self.measured
        return max((known.memory_bytes or 0) - self.free_bytes, 0) if known else 0

    @property
    def items_per_s(self) -> float | None:
        return None if not self.step_s else self.batch.items / self.step_s

    @property
    def tokens_per_s(self) -> float | None:
        rate = self.items_per_s
        return None if rate is None or not self.tokens_per_item else rate * self.tokens_per_item

    @property
    def total_s(self) -> float | None:
        rate = self.items_per_s
        return None if rate is None else self.setup_s + self.items / rate

    def sets(self) -> tuple[str, ...]:
        """The edits that make it, on top of the configuration to begin with."""
        threads = () if self.threads is None else (f"run.threads={self.threads}",)
        return (
            *self.model.sets(),
            *threads,
            f"batch.micro={self.batch.micro}",
            f"batch.accumulation={self.batch.accumulation}",
            f"loader.placement={self.placement}",
            f"loader.workers={self.workers}",
        )

    def to_dict(self) -> Json:
        """As JSON takes it."""
        measured = self.measured
        return {
            "size": self.model.size,
            "sequence": self.model.sequence,
            "amp": self.model.amp,
            "micro": self.batch.micro,
            "accumulation": self.batch.accumulation,
            "placement": self.placement,
            "workers": self.workers,
            "parameters": self.parameters,
            "predicted_memory_bytes": self.memory_bytes,
            "missing_bytes": self.missing_bytes,
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
    """Those that fit and that no other one beats or equals in memory, speed, sequence and size of the model at once."""
    rows = [(_merits(one), place, one) for place, one in enumerate(proposals) if one.fits]
    kept: list[tuple[tuple[float, ...], int, Proposal]] = []
    # In this order none is beaten by one that comes later.
    for row in sorted(rows, key=lambda row: row[0], reverse=True):
        if not any(_beats(other[0], row[0]) for other in kept):
            kept.append(row)
    return [one for _, _, one in sorted(kept, key=lambda row: row[1])]


def _beats(mine: tuple[float, ...], theirs: tuple[float, ...]) -> bool:
    return mine != theirs and all(a >= b for a, b in zip(mine, theirs, strict=True))


def _merits(proposal: Proposal) -> tuple[float, ...]:
    """The more the better."""
    return (
        -(proposal.memory_bytes or 0),
        _rate(proposal),
        proposal.model.sequence,
        proposal.parameters,
        # Peaks do not tell micro-batches apart; in truth the larger one comes nearer to them.
        proposal.batch.micro if proposal.lower_bound else 0,
    )


def _rate(proposal: Proposal) -> float:
    """Items per second; where they are what the peaks allow, only as far as these can be believed to differ."""
    rate = proposal.items_per_s or 0.0
    return float(f"{rate:.2g}") if proposal.lower_bound else rate


def ranked(proposals: Sequence[Proposal], answers: Answers) -> list[Proposal]:
    """The ones that fit, the best for the goal first."""
    fitting = [proposal for proposal in proposals if proposal.fits]
    known = [proposal for proposal in fitting if proposal.items_per_s is not None]
    if answers.goal == "beside" and known:
        if any(proposal.lower_bound for proposal in known):
            lean = [one for one in by_speed(known) if (one.memory_bytes or 0) <= HALF * one.free_bytes]
        else:
            enough = BESIDE * max(_rate(proposal) for proposal in known)
            lean = [proposal for proposal in known if _rate(proposal) >= enough]
            lean.sort(key=lambda one: one.memory_bytes or 0)
        taken = set(map(id, lean))
        return [*lean, *by_speed(one for one in fitting if id(one) not in taken)]
    if answers.goal == "time" and not any(proposal.lower_bound for proposal in known):
        return sorted(fitting, key=lambda one: (one.total_s is None, one.total_s or 0.0))
    return by_speed(fitting)


def by_speed(proposals: Iterable[Proposal]) -> list[Proposal]:
    """The fastest first; of equally fast ones that with the least memory, or, where only a card's peaks are known, that
    with the largest micro-batch."""
    return sorted(proposals, key=slowness)


def slowness(proposal: Proposal) -> tuple[bool, float, int]:
    """What `by_speed` goes by."""
    order = -proposal.batch.micro if proposal.lower_bound else proposal.memory_bytes or 0
    return proposal.items_per_s is None, -_rate(proposal), order


def cost_in_words(
    config: Config,
    token: str | None,
    now: tuple[str | None, int],
    model: Model,
    batch: Batch,
    parameters: tuple[int, int],
) -> str:
    """What a combination costs beside time and memory.

    now: size and sequence that are configured. parameters: of the configured model, and of this one.
    """
    words = []
    if model.sequence < now[1]:
        unit = f"{token}s" if token else "steps"
        words.append(f"sees {model.sequence} of {now[1]} {unit} at a time, and an item is that much less")
    if model.size != now[0] and parameters[1] != parameters[0]:
        kind = "smaller" if parameters[1] < parameters[0] else "larger"
        words.append(f"a {kind} model: {number(parameters[1])} of {number(parameters[0])} parameters")
    if batch.items != config.batch.items:
        words.append(
            f"{batch.items} items a step instead of {config.batch.items}: another training, tune optimizer.lr"
        )
    if model.amp == "fp16":
        words.append("fp16 has a narrow range: losses are scaled")
    if model.amp in ("bf16", "fp16"):
        words.append(f"{model.amp} rounds to {'8' if model.amp == 'bf16' else '11'} bits")
    return "; ".join(words)
