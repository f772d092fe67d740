"""Runs the whole optimizer step as one CUDA graph: captured once, then replayed with each batch copied into place.

The graph covers forward and backward of every micro-batch, clipping and the optimizer. The learning rate is a tensor on
the device. The first steps run eagerly on a side stream, so that libraries initialise and the optimizer creates its
state; capturing itself computes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ndd_engine.batches import map_tensors, tensors
from ndd_engine.config.schema import Config
from ndd_engine.errors import message_of
from ndd_engine.measure import clock as phase
from ndd_engine.measure.clock import PhaseClock, no_phase
from ndd_engine.measure.memory import is_out_of_memory
from ndd_engine.record.events import SettingEvent
from ndd_engine.workloads.base import Batch
from ndd_engine.workloads.training import TrainingParts

from .precision import Precision

if TYPE_CHECKING:
    from .stepper import Stepper

WARM_UP_STEPS = 3
# After this many batches of other shapes than the captured one, the graph is dropped.
MANY_OTHER_SHAPES = 3

Work = Callable[[], Tensor]
Replay = Callable[[], None]


def why_not(
    config: Config, device: torch.device, precision: Precision, parts: TrainingParts | None = None
) -> str | None:
    """Why a step of this configuration cannot be captured, or None. parts: what a factory replaces of the step."""
    if device.type != "cuda":
        return "there is no CUDA GPU"
    if config.parallel.ranks > 1:
        return "several ranks exchange gradients during backward"
    if precision.scaler is not None:
        return 'fp16 loss scaling checks the gradients on the host: use precision.amp "bf16"'
    if parts is not None and (parts.step or parts.state or parts.optimizers is not None or parts.lr):
        return "the factory has its own step, state, optimizer or lr, which cannot be captured"
    if config.optimizer.name == "sgd":
        return "torch's SGD reads the learning rate on the host"
    return None


class CudaRecorder:
    """Captures and replays with torch; tests pass their own."""

    @contextmanager
    def warm_up(self) -> Iterator[None]:
        """Run the body on a side stream, in order with the current stream."""
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        current = torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            yield
        current.wait_stream(side)

    def record(self, work: Work) -> tuple[Tensor, Replay]:
        """(the result of `work`, overwritten by each replay; the replay function)."""
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads (the hardware sampler) may use the GPU meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            result = work()
        return result, graph.replay


class StepGraph:
    """Replays the steps of a Stepper. failed: why steps run eagerly instead."""

    def __init__(self, stepper: Stepper, recorder: CudaRecorder | None = None) -> None:
        self.failed: str | None = None
        self._stepper = stepper
        self._recorder = recorder or CudaRecorder()
        self._warmed = 0
        self._other_shapes = 0
        self._static: list[Batch] = []
        self._loss: Tensor | None = None
        self._extras: dict[str, Tensor] = {}
        self._shares: Tensor | None = None  # of the micro-batches, see Stepper.shares; None for equal ones
        self._replay: Replay | None = None

    @property
    def settled(self) -> bool:
        """Whether the graph has been captured or given up."""
        return self.failed is not None or self._replay is not None

    def step(self, batches: Iterator[Batch], clock: PhaseClock, step: int) -> Tensor | None:
        """Like Stepper.step. The replay counts as "forward/graph" because it cannot be split into phases."""
        stepper = self._stepper
        clock.enter(phase.DATA_WAIT)
        micro = list(islice(batches, stepper.config.batch.accumulation))
        if len(micro) < stepper.config.batch.accumulation:
            return None
        if self.failed is None and self._replay is None and self._warmed >= WARM_UP_STEPS:
            clock.enter(phase.FORWARD)
            self._record(micro)
        if self._replay is None or not self._fits(micro):
            return self._eager(micro, clock, step)
        shares: list[Tensor | float] = []
        if self._shares is not None:
            clock.enter(phase.LOSS)
            shares = stepper.shares(micro)
            if any(isinstance(share, float) and not share for share in shares):
                return self._eager(micro, clock, step)  # which skips them; the mean over nothing is NaN
        clock.enter(phase.TO_DEVICE)
        for static, batch in zip(self._static, micro, strict=True):
            for place, tensor in zip(tensors(static), tensors(batch), strict=True):
                place.copy_(tensor, non_blocking=stepper.config.loader.non_blocking)
        if self._shares is not None:
            self._shares.copy_(_stacked(shares), non_blocking=True)
        clock.enter(phase.OPTIMIZER)
        stepper.set_rate(step)
        clock.enter(phase.FORWARD)
        clock.enter_part("graph")
        self._replay()
        assert self._loss is not None
        # The next replay overwrites the result, and the loss is read back later.
        loss = self._loss.clone()
        # An eager step in between has put its own scalars there.
        stepper.extras.update(self._extras)
        clock.enter(phase.LOG)
        return loss

    def _eager(self, micro: list[Batch], clock: PhaseClock, step: int) -> Tensor | None:
        stepper = self._stepper
        warming = self.failed is None and self._replay is None
        if self._replay is not None:
            # The gradients belong to the graph: drop them, so that this step allocates its own.
            stepper.optimizer.zero_grad(set_to_none=True)
        around: AbstractContextManager[Any] = self._recorder.warm_up() if warming else nullcontext()
        with around:
            loss = stepper.eager_step(iter(micro), clock, step)
        self._warmed += warming
        return loss

    def _record(self, micro: list[Batch]) -> None:
        stepper = self._stepper
        self._static = [map_tensors(stepper.moved(batch), Tensor.clone) for batch in micro]
        if stepper.workload.weight is not None and len(micro) > 1:
            # Computed outside of the graph: a number would be captured as it is now.
            self._shares = _stacked(stepper.shares(micro)).to(stepper.device)
        stepper.optimizer.zero_grad(set_to_none=True)

        def work() -> Tensor:
            total: Tensor | None = None
            for index, batch in enumerate(self._static):
                share = None if self._shares is None else self._shares[index]
                part = stepper.forward_backward(batch, no_phase, share)
                total = part if total is None else total + part
            stepper.update(no_phase)
            assert total is not None
            return total

        try:
            self._loss, self._replay = self._recorder.record(work)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            self._give_up(f"capturing failed: {message_of(error)}")
            return
        self._extras = dict(stepper.extras)  # each replay overwrites these tensors
        text = f"captured after {WARM_UP_STEPS} steps, then replayed"
        stepper.reports.append(SettingEvent("speed.cuda_graph", "true", "the whole step", True, text))

    def _give_up(self, why: str) -> None:
        self.failed, self._replay, self._static = why, None, []
        self._stepper.optimizer.zero_grad(set_to_none=True)
        self._stepper.reports.append(SettingEvent("speed.cuda_graph", "true", "off", False, why))

    def _fits(self, micro: list[Batch]) -> bool:
        """Whether the batches have the captured shapes; gives up after too many that do not."""
        same = all(
            place.shape == tensor.shape and place.dtype == tensor.dtype
            for static, batch in zip(self._static, micro, strict=True)
            for place, tensor in zip(tensors(static), tensors(batch), strict=True)
        )
        if not same:
            self._other_shapes += 1
            if self._other_shapes == MANY_OTHER_SHAPES:
                self._give_up("batch shapes change: pad all batches to one shape")
        return same


def _stacked(shares: Sequence[Tensor | float]) -> Tensor:
    """The shares of the micro-batches (k,) float64, on the device of the batches."""
    first = shares[0]
    device = first.device if isinstance(first, Tensor) else None
    return torch.stack([torch.as_tensor(share, dtype=torch.float64, device=device) for share in shares])
