"""Which numbers of ranks a scaling measurement compares, and the batch of each. Does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ndd_engine.config import Config
from ndd_engine.errors import UsageError
from ndd_engine.hardware.detect import equal_gpus
from ndd_engine.hardware.gpu import Machine
from ndd_engine.hardware.host import usable_threads
from ndd_engine.text import counted

# What stays the same for every number of ranks: the batch of a rank (weak scaling) or that of all (strong scaling).
RANK, EFFECTIVE = HOLDS = ("rank", "effective")
STRATEGIES = ("ddp", "fsdp2")


@dataclass(frozen=True, slots=True)
class Point:
    """A number of ranks with its batch. strategy: "" for a single rank, which shares nothing.

    effective: batch.effective, if the configuration sets it. several: whether strategies are compared.
    """

    ranks: int
    strategy: str
    micro: int
    accumulation: int
    effective: int | None = None
    several: bool = False

    @property
    def name(self) -> str:
        """ "1 rank", "4 ranks, fsdp2"."""
        named = self.strategy and (self.several or self.strategy != "ddp")
        return counted(self.ranks, "rank") + (f", {self.strategy}" if named else "")

    @property
    def items(self) -> int:
        """Items of one rank per optimizer step."""
        return self.micro * self.accumulation

    def settings(self) -> dict[str, str]:
        """By key, as in TOML."""
        found = {
            "parallel.ranks": str(self.ranks),
            "batch.micro": str(self.micro),
            "batch.accumulation": str(self.accumulation),
        }
        if self.effective is not None:
            found["batch.effective"] = str(self.effective)
        if self.strategy:
            found["parallel.strategy"] = self.strategy
        return found

    def sets(self, than: dict[str, str]) -> tuple[str, ...]:
        """As "key=value", without those that are the same in `than`."""
        return tuple(f"{key}={value}" for key, value in self.settings().items() if than.get(key) != value)


def counts_of(text: str) -> tuple[int, ...]:
    """The numbers of ranks in "1,2,4", ascending. Raises UsageError."""
    found: list[int] = []
    for word in text.split(","):
        if not word.strip().isdecimal() or int(word) < 1:
            raise UsageError(f"--ranks {text}: allowed: numbers of ranks from 1, such as 1,2,4")
        found.append(int(word))
    if len(set(found)) < len(found):
        raise UsageError(f"--ranks {text}: each number of ranks once")
    return tuple(sorted(found))


def strategies_of(text: str) -> tuple[str, ...]:
    """The strategies in "ddp,fsdp2". Raises UsageError."""
    found = tuple(word.strip() for word in text.split(","))
    if set(found) - set(STRATEGIES) or len(set(found)) < len(found):
        raise UsageError(f"--strategy {text}: allowed: ddp, fsdp2 or ddp,fsdp2")
    return found


def counts_for(asked: Sequence[int], machine: Machine, device: str = "auto") -> tuple[int, ...]:
    """The numbers of ranks to compare: those asked for, or 1, 2, 4, … up to the GPUs or the cores of this machine.

    device: run.device as configured. Raises UsageError if the machine has not enough GPUs, or if there is nothing to
    compare.
    """
    gpu = machine.device != "cpu"
    if device.startswith("cuda:"):
        raise UsageError(f"run.device is {device}, which all ranks would share: --set run.device=auto")
    gpus = len(equal_gpus(machine))
    most = gpus if gpu else usable_threads(machine.host)
    found = tuple(asked) or tuple(dict.fromkeys((*(2**power for power in range(most.bit_length())), most)))
    if gpu and max(found) > most:
        raise UsageError(f"--ranks {max(found)}: this machine has {counted(most, 'GPU')} of one kind")
    if not asked and most == 1:
        what = "GPU" if gpu else "core"
        more = "" if gpu else "; --ranks 1,2 measures two ranks on it"
        raise UsageError(f"this machine has one {what}: there is nothing to compare{more}")
    return found


def points(
    config: Config, counts: Sequence[int], strategies: Sequence[str], hold: str | None
) -> tuple[Point, ...]:
    """What to compare; the first is what the others are compared with.

    strategies: () for the configured one. hold: RANK or EFFECTIVE; None for what the configuration holds. Raises
    UsageError.
    """
    hold = hold or held(config)
    found: list[Point] = []
    for count in counts:
        micro, accumulation = config.batch.micro, config.batch.accumulation
        if hold == EFFECTIVE:
            micro, accumulation = _divided(config, count)
        effective = None if config.batch.effective is None else micro * accumulation * count
        wanted = strategies or (config.parallel.strategy,)
        found += [
            Point(count, strategy, micro, accumulation, effective, len(wanted) > 1)
            for strategy in (wanted if count > 1 else ("",))
        ]
    if len(found) < 2:
        raise UsageError(f"--ranks {counts[0]}: there is nothing to compare; allowed: several, such as 1,2")
    return tuple(found)


def held(config: Config) -> str:
    """What the configuration holds: the effective batch if it is set, else the batch of a rank."""
    return RANK if config.batch.effective is None else EFFECTIVE


def _divided(config: Config, count: int) -> tuple[int, int]:
    """(micro-batch, accumulation) of a rank for the configured effective batch."""
    total = config.items_per_step
    if total % count:
        raise UsageError(
            f"--ranks {count}: the effective batch of {total} cannot be shared by {count} ranks: choose another "
            "number, or --hold rank"
        )
    each = total // count
    micro = next(size for size in range(min(config.batch.micro, each), 0, -1) if not each % size)
    return micro, each // micro
