"""Prepare a configuration on this machine and predict memory and time of its run."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ndd_engine.config import Config, Draft
from ndd_engine.errors import MachineError, NddError, TrainingError, said
from ndd_engine.hardware.detect import detect, equal_gpus
from ndd_engine.hardware.gpu import Machine
from ndd_engine.hardware.host import usable_threads
from ndd_engine.hardware.torch_gpus import with_free_memory
from ndd_engine.measure.memory import is_out_of_memory
from ndd_engine.train.failures import smaller_batch
from ndd_engine.train.prepare import seed
from ndd_engine.train.probes.autosize import SizeChoice, decide
from ndd_engine.workloads.base import Workload
from ndd_engine.workloads.own_module import place
from ndd_engine.workloads.registry import prepare

from .outlook import Outlook, outlook


class Prediction(NamedTuple):
    """What a configuration needs. choice: how the model size was chosen, if it was "auto"."""

    outlook: Outlook
    machine: Machine
    workload: Workload
    choice: SizeChoice | None


def predict(draft: Draft, progress: Callable[[str], None]) -> Prediction:
    """Prepare the run of a draft that passed preflight and probe its steps.

    Raises MachineError out of memory, and TrainingError for an exception in the user's own workload.
    """
    asked = draft.resolve()
    machine = with_free_memory(detect(asked.run.device))
    device = torch.device(machine.device)
    ranks = asked.parallel.ranks
    # As each of several ranks will have.
    threads = max(usable_threads(machine.host) // ranks, 1) if ranks > 1 else None
    config, choice = decide(draft, machine, progress, threads)
    seed(config.run.seed)
    with draft.locating():
        workload = prepare(config, progress)
    try:
        found = outlook(config, workload, device, *room(machine, config.parallel.ranks), progress=progress)
    except NddError:
        raise
    except Exception as error:
        raise _step_error(error, config, device) from error
    return Prediction(found, machine, workload, choice)


def room(machine: Machine, ranks: int) -> tuple[int | None, int]:
    """(free bytes of the device, or of the fullest GPU that a rank gets; the GPUs that ranks could use)."""
    gpus = equal_gpus(machine)
    if machine.chosen is None or ranks == 1:
        return machine.free_bytes, max(len(gpus), 1)
    free = [gpu.free_bytes for gpu in gpus[:ranks]]
    known = [bytes_ for bytes_ in free if bytes_ is not None]
    return (min(known) if known and len(known) == len(free) else machine.free_bytes), max(len(gpus), 1)


def _step_error(error: Exception, config: Config, device: torch.device) -> Exception:
    if is_out_of_memory(error):
        shard = ""
        if config.parallel.ranks > 1 and config.parallel.strategy == "ddp":
            shard = ', or shard the model: parallel.strategy = "fsdp2"'
        return MachineError(f"out of memory in a training step on {device}; {smaller_batch(config)}{shard}")
    return TrainingError(f"{place(error) or config.workload.name}: a step failed: {said(error)}")
