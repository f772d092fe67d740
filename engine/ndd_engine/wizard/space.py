"""The user's goal, and the combinations of model, batch and ranks to predict. Does not import torch."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ndd_engine.config import Config, Draft, read
from ndd_engine.errors import UsageError
from ndd_engine.hardware.detect import equal_gpus
from ndd_engine.hardware.gpus import GpuProfile, Machine, load
from ndd_engine.predict.probe_process import Opened
from ndd_engine.trial.trial_request import LENGTH

Goal = Literal["throughput", "low-memory", "reproducible", "time"]
GOALS: dict[Goal, str] = {
    "throughput": "highest throughput",
    "low-memory": "low memory use",
    "reproducible": "reproducible results",
    "time": "shortest total time",
}
# Default share of the free memory to reserve for evaluation and other libraries.
RESERVED_SHARE = 0.08
# Share of a GPU's nominal memory that programs can use: a T4 reports 14.6 of 16 GB.
USABLE = 0.91
GIB = 1 << 30
# Default seconds of the verification.
BUDGET_S = 120.0


@dataclass(frozen=True)
class Answers:
    """config, workload, sets: the initial configuration, as in `config.read`.

    gpu: name of a GPU that is not in this machine, None for this machine. goal: see GOALS; items: number of items for
    the goal "time". effective_batch: the effective batch to keep, None for the configured one; hold_effective: False
    to allow any. min_sequence: minimum sequence, None to keep the configured one. sizes: acceptable model sizes, ()
    for the configured one. ranks: number of ranks to propose, None for one on each GPU of this machine.
    reserve_bytes: memory to keep free, None for RESERVED_SHARE of the free memory.
    """

    config: Path | None = None
    workload: str | None = None
    sets: tuple[str, ...] = ()
    gpu: str | None = None
    goal: Goal = "throughput"
    items: int | None = None
    effective_batch: int | None = None
    hold_effective: bool = True
    min_sequence: int | None = None
    sizes: tuple[str, ...] = ()
    reserve_bytes: int | None = None
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
        if self.min_sequence is not None and not 2 <= self.min_sequence <= sequence:
            raise UsageError(
                f"--min-sequence {self.min_sequence}: allowed: 2 to {sequence} (the configured sequence)"
            )
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
        return (self.effective_batch or config.items_per_step) if self.hold_effective else None


def usable_bytes(gpu: GpuProfile) -> int:
    """Bytes that programs can use on a GPU, by its profile."""
    return int(gpu.memory_gb * USABLE * GIB)


def longest_sequence(draft: Draft) -> int:
    """The configured sequence, or the longest of any model size if the size is not known yet."""
    if draft.size != "auto":
        return draft.resolve().batch.sequence
    return max(draft.resolve(size).batch.sequence for size in draft.sizes)


# Words that make another GPU of a name.
_MODELS = frozenset({"laptop", "ti", "super", "max"})


def gpu_named(name: str) -> GpuProfile:
    """The profile of a GPU by its name, its file name, a unique part of either, or its NVML name.

    Raises UsageError with the known names.
    """
    wanted = _plain(name)
    known = [(gpu, (_plain(gpu.name), _plain(gpu.slug))) for gpu in load()]
    exact = [gpu for gpu, names in known if wanted in names or gpu.is_named(name, re.IGNORECASE)]
    found = exact or [gpu for gpu, names in known if wanted and any(wanted in own for own in names)]
    if len(found) == 1 and (exact or not _other_model(name, found[0])):
        return found[0]
    what = "the name is ambiguous" if len(found) > 1 else "there is no profile of this GPU"
    raise UsageError(f"--gpu {name!r}: {what}; allowed: {', '.join(gpu.name for gpu in found or load())}")


def _other_model(name: str, gpu: GpuProfile) -> bool:
    """Whether the profile is of another model than the name: of a laptop's, or of a faster one."""
    return bool(
        _MODELS & {*gpu.name.lower().replace("-", " ").split()} - {*name.lower().replace("-", " ").split()}
    )


def _plain(name: str) -> str:
    return "".join(
        letter for letter in name.lower().replace("nvidia", "").replace("geforce", "") if letter.isalnum()
    )


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
    """A model variant that needs its own probe. amp: as in precision.amp, but never "auto"."""

    size: str | None
    sequence: int
    amp: str

    @property
    def precision(self) -> str:
        """Name of the dtype: fp32, bf16 or fp16."""
        return "fp32" if self.amp == "off" else self.amp

    def sets(self) -> tuple[str, ...]:
        """The overrides that select it."""
        size = () if self.size is None else (f"workload.size={self.size}",)
        return (*size, f"batch.sequence={self.sequence}", f"precision.amp={self.amp}")


@dataclass(frozen=True)
class Batch:
    """A micro-batch and the number of them per optimizer step."""

    micro: int
    accumulation: int

    @property
    def items(self) -> int:
        """The effective batch."""
        return self.micro * self.accumulation


def models(config: Config, answers: Answers, sizes: Sequence[str], amps: Sequence[str]) -> list[Model]:
    """All allowed combinations of size, sequence and precision, the configured one first.

    sizes: () for the configured size only.
    """
    chosen: Sequence[str | None] = list(sizes) or [getattr(config.workload, "size", None)]
    found = [
        Model(size, sequence, amp)
        for size in chosen
        for sequence in sequences(config.batch.sequence, answers.min_sequence)
        for amp in amps
    ]
    now = (getattr(config.workload, "size", None), config.batch.sequence)
    return sorted(found, key=lambda model: (model.size, model.sequence) != now)


def sequences(now: int, minimum: int | None) -> list[int]:
    """The configured sequence, its halves above `minimum`, and `minimum` itself."""
    found = [now]
    if minimum is None or minimum >= now:
        return found
    while found[-1] // 2 > minimum and len(found) <= HALVINGS:
        found.append(found[-1] // 2)
    return [*found, minimum]


def batches(config: Config, hold: int | None, most: int) -> list[Batch]:
    """Micro-batches up to `most`, each with the accumulation that keeps the effective batch `hold`.

    hold None: any effective batch, without accumulation.
    """
    if hold is None:
        grid = sorted({*_steps(min(most, LARGEST_MICRO)), min(config.batch.micro, most)})
        return [Batch(micro, 1) for micro in _more_than_one(config, grid)]
    micros = [micro for micro in range(1, min(hold, most) + 1) if hold % micro == 0]
    return [Batch(micro, hold // micro) for micro in _more_than_one(config, micros)]


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


def _more_than_one(config: Config, micros: list[int]) -> list[int]:
    """Remove micro-batch 1, which batch normalisation cannot train on, unless it is configured."""
    return micros if config.batch.micro == 1 else [micro for micro in micros if micro > 1] or micros


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
class Ranks:
    """How many ranks to propose, and why. free_bytes: of the GPU with the least, None if unknown or without GPUs."""

    count: int = 1
    why: str = ""
    free_bytes: int | None = None
    notes: list[str] = field(default_factory=list)


def ranks_to_propose(
    answers: Answers, config: Config, machine: Machine, gpu: GpuProfile | None, opened: Opened
) -> Ranks:
    """The ranks asked for, as configured, or one for each GPU like the first; fewer if the batch is not divisible.

    gpu: one that is not in this machine; its number is not known.
    """
    gpus = equal_gpus(machine) if gpu is None else []
    asked = answers.ranks or (config.parallel.ranks if config.parallel.ranks > 1 else max(len(gpus), 1))
    if asked == 1:
        return Ranks()
    if opened.not_shared:
        return Ranks(notes=[f"no proposal for several ranks: {opened.not_shared}"])
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
        return Ranks(notes=notes)
    known = [one.free_bytes for one in gpus[:count] if one.free_bytes is not None]
    name = gpu.name if gpu is not None else gpus[0].name if gpus else opened.device_name
    why = f"{count} ranks on {name}"
    if gpu is not None or len(gpus) >= count:
        why = f"{count} x {name}"
    notes.append(
        f"{why}: proposals for {count} ranks are predicted, without the time to exchange gradients, and not measured "
        "(ndd-console scaling measures them)"
    )
    return Ranks(count, why, min(known) if gpus and len(known) == min(count, len(gpus)) else None, notes)
