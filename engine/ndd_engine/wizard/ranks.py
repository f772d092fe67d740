"""How many ranks to propose on this machine, and how they share the model. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from ndd_engine.config import Config
from ndd_engine.hardware.detect import equal_gpus
from ndd_engine.hardware.gpu import Machine
from ndd_engine.hardware.profiles import GpuProfile
from ndd_engine.predict.probe_process import Opened

from .answers import Answers


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
