"""Which combinations are worth predicting: few enough to be read, spread enough to hold the best one. No torch here."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ndd_engine.config import Config

from .answers import Answers

# Sequences are halved so often at most.
HALVINGS = 3
# Micro-batches of one model in the table; more of them differ by less than a prediction is good for.
MOST_MICROS = 12
LARGEST_MICRO = 4096
# Of those that do not fit, the smallest are shown, with what is missing.
TOO_LARGE = 2
# The largest micro-batch that fits is found to so many items.
GRAIN = 8


@dataclass(frozen=True)
class Model:
    """What has to be probed by itself: its steps are other ones. amp: as in precision.amp, resolved."""

    size: str | None
    sequence: int
    amp: str

    @property
    def precision(self) -> str:
        """As people call it."""
        return "fp32" if self.amp == "off" else self.amp

    def sets(self) -> tuple[str, ...]:
        """The edits that make it."""
        size = () if self.size is None else (f"workload.size={self.size}",)
        return (*size, f"batch.sequence={self.sequence}", f"precision.amp={self.amp}")


@dataclass(frozen=True)
class Batch:
    """Micro-batch and how many of them an optimizer step has."""

    micro: int
    accumulation: int

    @property
    def items(self) -> int:
        """The effective batch."""
        return self.micro * self.accumulation


def models(config: Config, answers: Answers, sizes: Sequence[str], amps: Sequence[str]) -> list[Model]:
    """Every size, sequence and precision that the answers allow, the configured ones first.

    sizes: () where the workload has none, or only the configured one counts.
    """
    chosen: Sequence[str | None] = list(sizes) or [getattr(config.workload, "size", None)]
    found = [
        Model(size, sequence, amp)
        for size in chosen
        for sequence in sequences(config.batch.sequence, answers.shortest)
        for amp in amps
    ]
    now = (getattr(config.workload, "size", None), config.batch.sequence)
    return sorted(found, key=lambda model: (model.size, model.sequence) != now)


def sequences(now: int, shortest: int | None) -> list[int]:
    """The sequence and its halves down to the shortest one, that one included."""
    if shortest is None or shortest >= now:
        return [now]
    found = [now]
    while found[-1] // 2 > shortest and len(found) <= HALVINGS:
        found.append(found[-1] // 2)
    return [*found, shortest]


def batches(config: Config, hold: int | None, most: int) -> list[Batch]:
    """Micro-batches up to `most`, each with the accumulation that holds `hold` items a step; () where none divides.

    hold None: the batch is free, and nothing is accumulated.
    """
    if hold is None:
        grid = sorted({*_steps(min(most, LARGEST_MICRO)), min(config.batch.micro, most)})
        return [Batch(micro, 1) for micro in _more_than_one(config, grid)]
    micros = [micro for micro in range(1, min(hold, most) + 1) if hold % micro == 0]
    return [Batch(micro, hold // micro) for micro in _more_than_one(config, micros)]


def worth_a_row(found: Sequence[Batch], now: int, fits: Callable[[int], bool], free: bool) -> list[Batch]:
    """Few enough to be read: spread evenly over those that fit, the largest and the configured one (`now`) among them,
    and the smallest ones that do not.

    found: ascending. fits: whether memory holds a micro-batch; one that it does not, it holds no larger one. free: any
    micro-batch may be taken, so that the largest one lies between two of `found`.
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
    """Without a single item, which batch normalisation cannot train on, unless that is what is configured."""
    return micros if config.batch.micro == 1 else [micro for micro in micros if micro > 1] or micros


def _steps(most: int) -> Iterable[int]:
    """1, 2, 3, 4, 6, 8, 12, 16, 24, …"""
    power = 1
    while power <= most:
        yield power
        if power > 1 and power * 3 // 2 <= most:
            yield power * 3 // 2
        power *= 2
