"""The combinations of model and batch to predict. Does not import torch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ndd_engine.config import Config

from .answers import Answers

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
