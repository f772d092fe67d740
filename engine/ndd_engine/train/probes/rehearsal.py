"""Runs a test step of one micro-batch before training: compiles, counts FLOPs, and shows which settings take effect.

It does not affect training: random states, buffers and extra states are restored, gradients dropped, and the optimizer
does not step.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ndd_engine.batches import map_tensors
from ndd_engine.errors import UsageError, said
from ndd_engine.measure.clock import no_phase
from ndd_engine.measure.flops import WorkCounter
from ndd_engine.measure.memory import is_out_of_memory
from ndd_engine.record.events import BaselineEvent, LoaderEvent
from ndd_engine.train.random_state import kept_random
from ndd_engine.train.step.kept import kept_buffers
from ndd_engine.train.step.stepper import Stepper
from ndd_engine.workloads.base import Batch

from .baseline import Baseline, time_micro

if TYPE_CHECKING:
    from ndd_engine.train.parallel.strategy import Strategy


@dataclass
class Rehearsal:
    """Results of the test step.

    counter: FLOPs, bytes and operations, None if counting failed. channels_last: whether convolution outputs had that
    format, None without 4-D convolutions. compile_s, graphs, breaks: of torch.compile; compile_error: why it is not
    used. part_calls: module calls per timed part. micro_ns: host time of an eager micro-batch. baseline: the
    micro-batch measured by itself, None if not requested or failed. loader: the cost of creating a micro-batch.
    changed_parameters: whether the forward pass itself changed a parameter, which is not restored.
    """

    counter: WorkCounter | None = None
    channels_last: bool | None = None
    compile_s: float | None = None
    compile_error: str | None = None
    graphs: int = 0
    breaks: int = 0
    part_calls: Counter[str] = field(default_factory=Counter)
    micro_ns: float = 0.0
    baseline: BaselineEvent | None = None
    loader: LoaderEvent | None = None
    changed_parameters: bool = False
    notes: list[str] = field(default_factory=list)


def rehearse(stepper: Stepper, batch: Batch, baseline: Baseline | None = None) -> Rehearsal:
    """Run one micro-batch forward and backward, first eagerly, then as configured. Raises what the model raises.

    baseline: also measure it, as configured.
    """
    found = Rehearsal()
    versions = [_version(parameter) for parameter in stepper.parameters]
    extras = dict(stepper.extras)
    batch = stepper.moved(batch)
    with kept_random(stepper.device), kept_training(stepper), kept_buffers(stepper.model):
        stepper.compute = stepper.shared
        try:
            calls = stepper.parts.calls.copy()
            with _watch_format(stepper.model, found):
                _count(stepper, batch, found)
            found.part_calls = stepper.parts.calls - calls
            if stepper.config.speed.compile != "off":
                _compile(stepper, batch, found)
            elif found.part_calls:
                found.micro_ns = time_micro(stepper, batch)[0]
            if baseline is not None:
                counted = found.counter.operations if found.counter is not None else None
                found.baseline = baseline.measure(stepper, batch, counted)
        finally:
            stepper.drop_gradients()
            stepper.extras = extras
    if stepper.workload_parts.step is None:  # else they were restored
        found.changed_parameters = versions != [_version(parameter) for parameter in stepper.parameters]
    return found


def _version(tensor: Tensor) -> int:
    """Changes with every operation in place."""
    return 0 if tensor.is_inference() else tensor._version


@contextmanager
def kept_training(stepper: Stepper) -> Iterator[None]:
    """Restore what a factory's own step or callbacks change: all of a checkpoint's state, and what was logged.

    Without an own step, only the carried state can change.
    """
    training, carry = stepper.training, stepper.carry
    kept = None
    if stepper.workload_parts.step is not None:
        kept = map_tensors(
            _without_versions(stepper.state()), lambda tensor: tensor.detach().to("cpu", copy=True)
        )
    before, logged, names = carry.value, list(training.logged), set(training.names)
    step, loss, stopping = training.step, training.loss, training.stopping
    carry.value = None
    try:
        yield
    finally:
        if kept is not None:
            stepper.load(kept)
        carry.value = before
        training.logged[:], training.names = logged, names
        training.step, training.loss, training.stopping = step, loss, stopping


def _without_versions(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "model": dict(state["model"])}


def _count(stepper: Stepper, batch: Batch, found: Rehearsal) -> None:
    counter = WorkCounter()
    try:
        with counter:
            stepper.forward_backward(batch, no_phase)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        # Counting may be the cause: repeat without it, which raises the model's own error if there is one.
        stepper.forward_backward(batch, no_phase)
        found.notes.append(f"cannot count the FLOPs of a step: {said(error)}")
        return
    found.counter = counter


def _compile(stepper: Stepper, batch: Batch, found: Rehearsal) -> None:
    speed = stepper.config.speed
    before = compiled()
    mode = None if speed.compile == "default" else speed.compile
    strategy = stepper.strategy
    if strategy is not None and not strategy.gathers:
        # DDP arranges its buckets in the pass after the first one, and tells all ranks.
        stepper.forward_backward(batch, no_phase)
        stepper.drop_gradients()
    begin = time.perf_counter()
    try:
        stepper.compute = torch.compile(stepper.shared, mode=mode, dynamic=speed.compile_dynamic)  # type: ignore[assignment]
        # Several ranks exchange nothing yet: one that cannot compile would be an exchange behind from now on.
        stepper.forward_backward(batch, no_phase, last=strategy is None or strategy.gathers)
    except Exception as error:
        stepper.compute = stepper.shared
        if is_out_of_memory(error):
            raise
        found.compile_error = said(error)
    if strategy is not None:
        _agree(stepper, strategy, found)
    if found.compile_error is not None:
        return
    if strategy is not None and not strategy.gathers:
        stepper.drop_gradients()
        stepper.forward_backward(batch, no_phase)
    found.compile_s = time.perf_counter() - begin
    found.graphs, found.breaks = (now - then for now, then in zip(compiled(), before, strict=True))


def compiled() -> tuple[int, int]:
    """(graphs, graph breaks) of torch.compile in this process so far."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def _agree(stepper: Stepper, strategy: Strategy, found: Rehearsal) -> None:
    """All ranks use compiled code, or none does. Raises UsageError where they have exchanged data while compiling."""
    why = found.compile_error
    if strategy.gathers:
        if why is not None:
            raise UsageError(
                f'speed.compile: torch.compile failed with FSDP2, set speed.compile = "off": {why}'
            )
        return
    failed = strategy.mean(0.0 if why is None else 1.0)
    if failed and why is None:
        stepper.compute = stepper.shared
        found.compile_error = "torch.compile failed on another rank"


@contextmanager
def _watch_format(model: nn.Module, found: Rehearsal) -> Iterator[None]:
    """Check the memory format of 4-D convolution outputs."""

    def look(_module: nn.Module, _inputs: object, output: Tensor) -> None:
        # With one channel, both formats are the same.
        if output.dim() == 4 and output.shape[1] > 1:
            last = output.is_contiguous(memory_format=torch.channels_last)
            found.channels_last = last and found.channels_last is not False

    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    handles = [module.register_forward_hook(look) for module in convolutions]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
