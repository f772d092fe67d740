"""The user's goal and what may change to reach it. Does not import torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ndd_engine.config import Config, Draft, read
from ndd_engine.errors import UsageError
from ndd_engine.hardware.profiles import GpuProfile, load
from ndd_engine.trial.request import LENGTH

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


def gpu_named(name: str) -> GpuProfile:
    """The profile of a GPU by its name, its file name, a unique part of either, or its NVML name.

    Raises UsageError with the known names.
    """
    wanted = _plain(name)
    known = [(gpu, (_plain(gpu.name), _plain(gpu.slug))) for gpu in load()]
    exact = [gpu for gpu, names in known if wanted in names or gpu.is_named(name, re.IGNORECASE)]
    found = exact or [gpu for gpu, names in known if wanted and any(wanted in own for own in names)]
    if len(found) == 1:
        return found[0]
    what = "the name is ambiguous" if found else "there is no profile of this GPU"
    raise UsageError(f"--gpu {name!r}: {what}; allowed: {', '.join(gpu.name for gpu in found or load())}")


def _plain(name: str) -> str:
    return "".join(
        letter for letter in name.lower().replace("nvidia", "").replace("geforce", "") if letter.isalnum()
    )
