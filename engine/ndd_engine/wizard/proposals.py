"""Answers and proposals: which combinations there are, with predicted memory, time and cost."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ndd_engine.config import Config, Draft, read
from ndd_engine.errors import UsageError
from ndd_engine.hardware.detect import equal_gpus
from ndd_engine.hardware.gpus import GpuProfile, Machine
from ndd_engine.hardware.named_gpus import gpu_named
from ndd_engine.predict.probe_process import Opened
from ndd_engine.trial.outcome import LENGTH
from ndd_watch.fitting import budget_bytes

Goal = Literal["throughput", "low-memory", "reproducible", "time"]
GOALS: dict[Goal, str] = {
    "throughput": "highest throughput",
    "low-memory": "low memory use",
    "reproducible": "reproducible results",
    "time": "shortest total time",
}
KEEPABLE = ("batch", "sequence", "size")
# Default share of the free memory to reserve for evaluation and other libraries.
RESERVED_SHARE = 0.08
# Default seconds of the verification.
BUDGET_S = 120.0


@dataclass(frozen=True)
class Answers:
    """config, workload, sets: the initial configuration, as in `config.read`.

    gpu: name of a GPU that is not in this machine, None for this machine. goal: see GOALS; items: number of items for
    the goal "time". keep: what stays as configured, see KEEPABLE. effective_batch: the effective batch to keep, None
    for any. min_sequence: minimum sequence; sizes: acceptable model sizes. Without them, a shorter sequence and the
    neighbouring sizes are shown as alternatives, which are not recommended. ranks: number of ranks to propose, None for
    one on each GPU of this machine.
    reserve_bytes: memory to keep free, None for RESERVED_SHARE of the free memory. budget_memory: the most memory that
    a rank may use, as in memory.budget, None for what is free.
    """

    config: Path | None = None
    workload: str | None = None
    sets: tuple[str, ...] = ()
    gpu: str | None = None
    goal: Goal = "throughput"
    items: int | None = None
    effective_batch: int | None = None
    keep: tuple[str, ...] = ()
    min_sequence: int | None = None
    sizes: tuple[str, ...] = ()
    reserve_bytes: int | None = None
    budget_memory: str | None = None
    ranks: int | None = None

    @property
    def all_sets(self) -> tuple[str, ...]:
        """All overrides; the user's take precedence over those of the goal."""
        goal = ("run.preset=reproducible",) if self.goal == "reproducible" else ()
        length = ("run.epochs=1",) if self.assumes_length else ()
        return (*length, *goal, *self.sets)

    @property
    def assumes_length(self) -> bool:
        """Whether the length of the run is not given, as for an own workload without a file: one epoch is assumed."""
        given = any(item.partition("=")[0].strip() in LENGTH for item in self.sets)
        return self.config is None and ":" in (self.workload or "") and not given

    def draft(self) -> Draft:
        """The initial configuration. Raises ConfigError."""
        return read(self.config, self.all_sets, self.workload)

    def checked(self, sequence: int, known_sizes: tuple[str, ...]) -> Answers:
        """Returns itself if valid. Raises UsageError with the allowed values.

        sequence: the configured one; see `longest_sequence` if the model size is not known yet.
        """
        if self.goal not in GOALS:
            raise UsageError(f"--goal {self.goal}: unknown goal; allowed: {', '.join(GOALS)}")
        if self.goal == "time" and self.items is None:
            raise UsageError("--goal time requires --items N")
        counts = ("--items", self.items), ("--effective-batch", self.effective_batch), ("--ranks", self.ranks)
        for name, value in counts:
            if value is not None and value < 1:
                raise UsageError(f"{name} {value}: allowed: 1 or more")
        wrong = [name for name in self.keep if name not in KEEPABLE]
        if wrong:
            raise UsageError(f"--keep {', '.join(wrong)}: unknown; allowed: {', '.join(KEEPABLE)}")
        if "sequence" in self.keep and self.min_sequence is not None:
            raise UsageError("--keep sequence and --min-sequence cannot be combined")
        if "size" in self.keep and self.sizes:
            raise UsageError("--keep size and --size cannot be combined")
        if self.min_sequence is not None and not 2 <= self.min_sequence <= sequence:
            raise UsageError(
                f"--min-sequence {self.min_sequence}: allowed: 2 to {sequence} (the configured sequence)"
            )
        if self.budget_memory is not None and not budget_bytes(self.budget_memory):
            raise UsageError(f"--budget-memory {self.budget_memory}: allowed: a size such as 8GB or 7.5 GiB")
        if self.reserve_bytes is not None and self.reserve_bytes < 0:
            raise UsageError(f"--reserve-memory {self.reserve_bytes}: allowed: 0 or more")
        unknown = [size for size in self.sizes if size not in known_sizes]
        if unknown:
            allowed = ", ".join(known_sizes) or "none (this workload has only one size)"
            raise UsageError(f"--size {', '.join(unknown)}: unknown size; allowed: {allowed}")
        if self.gpu is not None:
            gpu_named(self.gpu)
        return self

    def step_items(self, config: Config) -> int | None:
        """The effective batch to keep, or None if it may change."""
        return self.effective_batch or (config.items_per_step if "batch" in self.keep else None)

    @property
    def alternatives(self) -> bool:
        """Whether other sequences and sizes are only shown: nobody asked for any."""
        return not self.sizes and self.min_sequence is None


def longest_sequence(draft: Draft) -> int:
    """The configured sequence, or the longest of any model size if the size is not known yet."""
    if draft.size != "auto":
        return draft.resolve().batch.sequence
    return max(draft.resolve(size).batch.sequence for size in draft.sizes)


# The shortest sequence of an alternative.
SHORTEST = 2
# Maximum number of times that a sequence is halved.
HALVINGS = 3
# Maximum micro-batches per model in the table; more would differ by less than the prediction error.
MOST_MICROS = 12
LARGEST_MICRO = 4096
# Number of micro-batches to show that do not fit, smallest first.
TOO_LARGE = 2
# Resolution of the search for the largest micro-batch that fits.
GRAIN = 8


@dataclass(frozen=True)
class Model:
    """A model variant that needs its own probe. amp: as in precision.amp, but never "auto".

    tier: further overrides: of the size "auto" for the memory of a GPU, and a memory budget.
    """

    size: str | None
    sequence: int
    amp: str
    tier: tuple[str, ...] = ()

    @property
    def recomputes(self) -> bool:
        """Whether it is within a memory budget."""
        return any(text.startswith("memory.") for text in self.tier)

    @property
    def precision(self) -> str:
        """Name of the dtype: fp32, bf16 or fp16."""
        return "fp32" if self.amp == "off" else self.amp

    def sets(self) -> tuple[str, ...]:
        """The overrides that select it."""
        size = () if self.size is None else (f"workload.size={self.size}",)
        return (*size, *self.tier, f"batch.sequence={self.sequence}", f"precision.amp={self.amp}")


@dataclass(frozen=True)
class Batch:
    """A micro-batch and the number of them per optimizer step."""

    micro: int
    accumulation: int

    @property
    def items(self) -> int:
        """The effective batch."""
        return self.micro * self.accumulation


def models(
    config: Config,
    answers: Answers,
    sizes: Sequence[str],
    amps: Sequence[str],
    known: Sequence[str] = (),
    beside_amp: str | None = None,
    tier: tuple[str, ...] = (),
) -> list[Model]:
    """The models to probe, the configured one first.

    sizes: () for the configured size only. known: all sizes, in ascending order. Sizes and sequences that were asked
    for are combined, with each precision. Otherwise the configured model has each precision; half of its sequence and
    the sizes next to it have `beside_amp`, by default the first. tier: see Model, of the configured size.
    """
    size, sequence = getattr(config.workload, "size", None), config.batch.sequence
    chosen: Sequence[str | None] = list(sizes) or [size]
    if not answers.alternatives:
        found = [
            Model(one, length, amp, tier if one == size else ())
            for one in chosen
            for length in sequences(sequence, answers.min_sequence)
            for amp in amps
        ]
        return sorted(found, key=lambda model: (model.size, model.sequence) != (size, sequence))
    now = chosen[0]
    tier = tier if now == size else ()
    found, amp = [Model(now, sequence, amp, tier) for amp in amps], beside_amp or amps[0]
    if "sequence" not in answers.keep and sequence >= 2 * SHORTEST:
        found.append(Model(now, sequence // 2, amp, tier))
    if "size" not in answers.keep and now is not None and now in known:
        place = list(known).index(now)
        beside = (*known[max(place - 1, 0) : place], *known[place + 1 : place + 2])
        found += [Model(one, sequence, amp) for one in beside]
    return found


def sequences(now: int, minimum: int | None) -> list[int]:
    """The configured sequence, its halves above `minimum`, and `minimum` itself."""
    found = [now]
    if minimum is None or minimum >= now:
        return found
    while found[-1] // 2 > minimum and len(found) <= HALVINGS:
        found.append(found[-1] // 2)
    return [*found, minimum]


def batches(config: Config, hold: int | None, most: int, single: bool = False) -> list[Batch]:
    """Micro-batches up to `most`, each with the accumulation that keeps the effective batch `hold`.

    hold None: any effective batch, without accumulation. single: also of one item, which batch normalisation cannot
    train on; otherwise only if it is configured.
    """
    single = single or config.batch.micro == 1
    if hold is None:
        grid = sorted({*_steps(min(most, LARGEST_MICRO)), min(config.batch.micro, most)})
        return [Batch(micro, 1) for micro in _more_than_one(grid, single)]
    micros = [micro for micro in range(1, min(hold, most) + 1) if hold % micro == 0]
    return [Batch(micro, hold // micro) for micro in _more_than_one(micros, single)]


def worth_a_row(found: Sequence[Batch], now: int, fits: Callable[[int], bool], free: bool) -> list[Batch]:
    """Select evenly spaced batches that fit, with the largest and the configured one (`now`), and the smallest others.

    found: ascending. fits: whether a micro-batch fits into memory; must be monotonic. free: any micro-batch is allowed,
    so the largest that fits may lie between two of `found`.
    """
    count = bisect_left(found, True, key=lambda batch: not fits(batch.micro))
    fitting, rest = list(found[:count]), list(found[count : count + TOO_LARGE])
    if free and fitting and rest:
        between = range(fitting[-1].micro + GRAIN, rest[0].micro, GRAIN)
        largest = bisect_left(between, True, key=lambda micro: not fits(micro)) - 1
        if largest >= 0:
            fitting.append(Batch(between[largest] // GRAIN * GRAIN, 1))
    if len(fitting) > MOST_MICROS:
        apart = (len(fitting) - 1) / (MOST_MICROS - 1)
        places = {round(index * apart) for index in range(MOST_MICROS)}
        places |= {place for place, batch in enumerate(fitting) if batch.micro == now}
        fitting = [fitting[place] for place in sorted(places)]
    return [*fitting, *rest]


def _more_than_one(micros: list[int], single: bool) -> list[int]:
    return micros if single else [micro for micro in micros if micro > 1] or micros


def _steps(most: int) -> Iterable[int]:
    """1, 2, 3, 4, 6, 8, 12, 16, 24, …"""
    power = 1
    while power <= most:
        yield power
        if power > 1 and power * 3 // 2 <= most:
            yield power * 3 // 2
        power *= 2


@dataclass(frozen=True)
class Layout:
    """So many ranks, and how they share the model: `parallel.ranks` and `parallel.strategy`."""

    ranks: int = 1
    strategy: str = "ddp"

    def sets_to_probe(self, config: Config) -> tuple[str, ...]:
        """The overrides of `config` that select it, with any batch: a probe has batches of its own."""
        if self == layout_of(config):
            return ()
        chosen = (f"parallel.ranks={self.ranks}", f"parallel.strategy={self.strategy}")
        if config.batch.effective is None:
            return chosen
        micro = max(config.batch.effective // self.ranks, 1)
        return (
            *chosen,
            f"batch.effective={micro * self.ranks}",
            f"batch.micro={micro}",
            "batch.accumulation=1",
        )


SINGLE = Layout()


def layout_of(config: Config) -> Layout:
    """The layout of a configuration; the strategy of a single rank does not matter."""
    return SINGLE if config.parallel.ranks == 1 else Layout(config.parallel.ranks, config.parallel.strategy)


@dataclass(frozen=True)
class RankProposal:
    """How many ranks to propose, and why. free_bytes: of the GPU with the least, None if unknown or without GPUs."""

    count: int = 1
    why: str = ""
    free_bytes: int | None = None
    notes: list[str] = field(default_factory=list)


def ranks_to_propose(
    answers: Answers, config: Config, machine: Machine, gpu: GpuProfile | None, opened: Opened
) -> RankProposal:
    """The ranks asked for, as configured, or one for each GPU like the first; fewer if the batch is not divisible.

    gpu: one that is not in this machine; its number is not known.
    """
    gpus = equal_gpus(machine) if gpu is None else []
    asked = answers.ranks or (config.parallel.ranks if config.parallel.ranks > 1 else max(len(gpus), 1))
    if asked == 1:
        return RankProposal()
    if opened.not_shared:
        return RankProposal(notes=[f"no proposal for several ranks: {opened.not_shared}"])
    hold = answers.step_items(config)
    count = asked
    while hold is not None and hold % count:
        count -= 1
    notes = []
    if count < asked:
        notes.append(
            f"{count} of {asked} ranks are proposed: the effective batch of {hold} is divisible by {count}"
        )
    if count == 1:
        return RankProposal(notes=notes)
    known = [one.free_bytes for one in gpus[:count] if one.free_bytes is not None]
    name = gpu.name if gpu is not None else gpus[0].name if gpus else opened.device_name
    why = f"{count} ranks on {name}"
    if gpu is not None or len(gpus) >= count:
        why = f"{count} x {name}"
    notes.append(
        f"{why}: proposals for {count} ranks are predicted, without the time to exchange gradients, and not measured "
        "(ndd-console scaling measures them)"
    )
    return RankProposal(
        count, why, min(known) if gpus and len(known) == min(count, len(gpus)) else None, notes
    )


Json = dict[str, Any]
NOT_MEASURED = "not measured"
# A larger effective batch is proposed only if it leaves so many steps an epoch: a model learns in steps.
FEWEST_STEPS = 50
# Rounds of a verification that only sort out the slow ones.
SHORT_ROUNDS = 2


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
    not include. step_range_s: of an estimate, the seconds with a fast and with a slow host, else None. decides:
    what an estimate depends on, see launches.Decides. cost: disadvantages other than time and memory, or "".
    steps_per_epoch: None if the length of the data is unknown. batch_times: the effective batch, relative to the
    configured one.
    alternative: it has another sequence or size than configured although nobody asked for one; it is shown, never
    recommended. threads: intra-op threads, None for the default. given: the overrides that select the present
    configuration as it is, None for every other row. allowed: whether it is within the limits of the answers; only the
    present configuration may not be. layout: the ranks, on each of which `batch` and the memory are; select_ranks:
    whether it differs from the initial configuration. whole_bytes: for a sharded model, the predicted peak with the
    whole model on each rank, which does not fit; None if unknown. item, token: what the workload calls them.
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
    step_range_s: tuple[float, float] | None = None
    decides: str = ""
    steps_per_epoch: int | None = None
    batch_times: float = 1.0
    alternative: bool = False
    cost: str = ""
    measured: Measured | None = None
    threads: int | None = None
    retries: int = 0
    given: tuple[str, ...] | None = None
    allowed: bool = True
    layout: Layout = SINGLE
    select_ranks: bool = False
    whole_bytes: int | None = None
    item: str = "item"
    token: str | None = None

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
    def enough_steps(self) -> bool:
        """Whether an epoch keeps FEWEST_STEPS steps, or the effective batch is at most the configured one."""
        return self.batch_times <= 1 or self.steps_per_epoch is None or self.steps_per_epoch >= FEWEST_STEPS

    @property
    def spare_bytes(self) -> int | None:
        """Usable bytes that are left; negative if it does not fit, None if the memory is unknown."""
        return None if self.memory_bytes is None else self.free_bytes - self.memory_bytes

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
            "recomputes": self.model.recomputes,
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
            "predicted_step_range_s": None if self.step_range_s is None else list(self.step_range_s),
            "decides": self.decides or None,
            "spare_bytes": self.spare_bytes,
            "steps_per_epoch": self.steps_per_epoch,
            "alternative": self.alternative,
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
