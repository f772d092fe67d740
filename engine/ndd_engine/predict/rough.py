"""A rough answer within seconds: does the step fit, and how long will the run take.

Memory: parameters, gradients and optimizer state are counted; activations are the tensors that autograd saves,
counted at two small micro-batches and continued as a straight line. Temporary workspaces and the allocator's
rounding are not in it. Time: real steps at growing micro-batches until the configured one is reached (then it is
measured) or a step takes too long to go on (then it is predicted, in proportion to the micro-batch).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ndd_engine.config import Config
from ndd_engine.train.autosize import probe_batches
from ndd_engine.train.clock import PhaseClock
from ndd_engine.train.failures import is_out_of_memory
from ndd_engine.train.loader import to_device
from ndd_engine.train.prepare import total_steps
from ndd_engine.train.step import Stepper
from ndd_engine.workloads.base import Workload, parameter_count

# A probe step longer than this ends the probing; the whole stays within a few seconds.
LONGEST_STEP_S = 0.4
# Batch normalisation needs more than one item.
SMALL = (2, 4)


@dataclass(frozen=True)
class Rough:
    """Bytes and seconds. step_s: measured with `measured_micro` items, predicted if the configured ones are more."""

    parameters: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    available_bytes: int | None
    step_s: float
    measured_micro: int
    steps_per_epoch: int
    total_steps: int

    @property
    def total_bytes(self) -> int:
        """Predicted peak of what the step allocates."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes + self.activation_bytes

    @property
    def fits(self) -> bool | None:
        """Whether it fits into what is available, or None when that is not known."""
        return None if self.available_bytes is None else self.total_bytes <= self.available_bytes

    @property
    def epoch_s(self) -> float:
        """Predicted seconds of training an epoch, without evaluation and checkpoints."""
        return self.step_s * self.steps_per_epoch

    @property
    def total_s(self) -> float:
        """Predicted seconds of the whole run, likewise."""
        return self.step_s * self.total_steps


def rough(
    config: Config,
    workload: Workload,
    device: torch.device,
    available_bytes: int | None,
    progress: Callable[[str], None],
) -> Rough:
    """Probe the configured step on the device. Raises RuntimeError when even the smallest step fails."""
    per_epoch = probe_batches(workload, config).per_epoch // config.batch.accumulation
    stepper = Stepper(workload, config, device, total_steps(config, per_epoch))
    progress("counting the memory of a step")
    small = [min(size, config.batch.micro) for size in SMALL]
    low, high = (saved_bytes(stepper, workload, config, size) for size in small)
    slope = (high - low) / (small[1] - small[0]) if small[1] > small[0] else 0.0
    activation = high + slope * (config.batch.micro - small[1])

    progress("timing steps")
    micro, step_s = small[0], 0.0
    while True:
        try:
            seconds = step_seconds(stepper, workload, config, micro)
        except RuntimeError as error:
            if is_out_of_memory(error) and step_s:
                break
            raise
        step_s = seconds * config.batch.accumulation * (config.batch.micro / micro)
        if micro >= config.batch.micro or seconds > LONGEST_STEP_S:
            break
        micro = min(micro * 4, config.batch.micro)
    parameter_bytes = sum(parameter.nbytes for parameter in stepper.parameters)
    return Rough(
        parameters=parameter_count(stepper.model),
        parameter_bytes=parameter_bytes,
        gradient_bytes=parameter_bytes,
        optimizer_bytes=stepper.optimizer_bytes(),
        activation_bytes=int(activation),
        available_bytes=available_bytes,
        step_s=step_s,
        measured_micro=micro,
        steps_per_epoch=per_epoch,
        total_steps=stepper.total_steps,
    )


def saved_bytes(stepper: Stepper, workload: Workload, config: Config, micro: int) -> int:
    """Bytes that autograd keeps for the backward pass of one micro-batch, its inputs included, weights excluded."""
    batch = to_device(next(_batches(workload, config, micro)), stepper.device)
    weights = {parameter.untyped_storage().data_ptr() for parameter in stepper.model.parameters()}
    seen: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, stepper.precision.autocast or nullcontext():
        loss = workload.loss(workload.forward(stepper.model, batch), batch)
    total = sum(seen.values())
    del loss
    return total


def step_seconds(stepper: Stepper, workload: Workload, config: Config, micro: int) -> float:
    """Median of three steps of one micro-batch each, after one to warm up."""
    probe = config.model_copy(update={"batch": config.batch.model_copy(update={"accumulation": 1})})
    stepper.config = probe
    try:
        batches = _batches(workload, config, micro)
        clock = PhaseClock()
        times = []
        for index in range(4):
            begin = time.perf_counter()
            stepper.step(batches, clock, index)
            if stepper.device.type == "cuda":
                torch.cuda.synchronize(stepper.device)
            times.append(time.perf_counter() - begin)
            if times[-1] > 3 * LONGEST_STEP_S:
                return times[-1]
    finally:
        stepper.config = config
    return sorted(times[1:])[1]


def _batches(workload: Workload, config: Config, micro: int) -> Iterator[Any]:
    batch = config.batch.model_copy(update={"micro": micro})
    batches = probe_batches(workload, config.model_copy(update={"batch": batch}))

    def forever() -> Iterator[Any]:
        epoch = 0
        while True:
            yield from batches.epoch(epoch)
            epoch += 1

    return forever()
