"""Runs the whole optimizer step as one CUDA graph: captured once, then replayed with each batch copied into place.

The graph covers forward and backward of every micro-batch, clipping and the optimizer. The learning rate is a tensor on
the device. The first steps run eagerly on a side stream, so that libraries initialise and the optimizer creates its
state; capturing itself computes nothing.

A capture that fails cannot be taken back: `torch.cuda.graph.__exit__` calls `CUDAGraph.capture_end`, which raises
before it gives back the memory pool and the random state, and before the stream is left. So a step is rehearsed first
with an error at everything that waits for the GPU, which is what most steps fail at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from ndd_engine.batches import map_tensors, same_constants, tensors
from ndd_engine.errors import CaptureError, message_of
from ndd_engine.measure.memory import is_out_of_memory
from ndd_engine.record.events import SettingEvent
from ndd_engine.train.checkpoint_state import kept_buffers, kept_random
from ndd_engine.workloads.base import Batch
from ndd_engine.workloads.interface import place
from ndd_watch import clock as phase
from ndd_watch.clock import PhaseClock, no_phase

from .stepper import Stepper

WARM_UP_STEPS = 3
# After this many batches that differ from the captured one in what cannot be copied into place, the graph is dropped.
MANY_OTHERS = 3

# What torch says of them under `set_sync_debug_mode("error")`, see `c10/cuda/CUDAFunctions.h`.
_SYNCHRONIZES = "called a synchronizing CUDA operation"

Work = Callable[[], Tensor]
Replay = Callable[[], None]


class CudaRecorder:
    """Captures and replays with torch; tests pass their own."""

    def __init__(self) -> None:
        # One for all steps: the allocator keeps the memory of a step for the stream that it ran on.
        self._side: torch.cuda.Stream | None = None

    @contextmanager
    def strict(self) -> Iterator[None]:
        """In the body, an operation that waits for the GPU raises RuntimeError."""
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)

    @contextmanager
    def warm_up(self) -> Iterator[None]:
        """Run the body on a side stream, in order with the current stream."""
        if self._side is None:
            self._side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side = self._side
        current = torch.cuda.current_stream()
        side.wait_stream(current)
        try:
            with torch.cuda.stream(side):
                yield
        finally:
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
        self._others = 0
        self._static: list[Batch] = []
        self._loss: Tensor | None = None
        self._extras: dict[str, Tensor] = {}
        self._skip: Tensor | None = None
        self._shares: Tensor | None = None  # of the micro-batches, see Stepper.shares; None for equal ones
        self._replay: Replay | None = None

    @property
    def settled(self) -> bool:
        """Whether the graph has been captured or given up."""
        return self.failed is not None or self._replay is not None

    @property
    def records_next(self) -> bool:
        """Whether the next step is captured."""
        return self.failed is None and self._replay is None and self._warmed >= WARM_UP_STEPS

    def step(self, batches: Iterator[Batch], clock: PhaseClock, step: int) -> Tensor | None:
        """Like Stepper.step. The replay counts as "forward/graph" because it cannot be split into phases."""
        stepper = self._stepper
        clock.enter(phase.DATA_WAIT)
        micro = list(islice(batches, stepper.config.batch.accumulation))
        if len(micro) < stepper.config.batch.accumulation:
            return None
        if self.records_next:
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
            for there, tensor in zip(tensors(static), tensors(batch), strict=True):
                there.copy_(tensor, non_blocking=stepper.config.loader.non_blocking)
        if self._shares is not None:
            self._shares.copy_(_stacked(shares), non_blocking=True)
        clock.enter(phase.OPTIMIZER)
        stepper.optimizer.set_rate(step)
        clock.enter(phase.FORWARD)
        clock.enter_part("graph")
        self._replay()
        assert self._loss is not None
        # The next replay overwrites the result, and the loss is read back later.
        loss = self._loss.clone()
        # An eager step in between has put its own scalars there.
        stepper.extras.update(self._extras)
        stepper.skip = None if self._skip is None else self._skip.clone()
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
        if (why := self._waits()) is not None:
            self._give_up(why)
            return

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
            # What torch raises at the end of the capture hides the operation that ended it.
            cause = error.__context__ or error
            if is_out_of_memory(cause):
                raise cause from None
            text = f"the CUDA graph cannot be captured: {message_of(cause)}{_where(cause)}"
            raise CaptureError(text) from error
        # Each replay overwrites these tensors.
        self._extras, self._skip = dict(stepper.extras), stepper.skip
        text = f"captured after {WARM_UP_STEPS} steps, then replayed"
        stepper.reports.append(SettingEvent("speed.cuda_graph", "true", "the whole step", True, text))

    def _waits(self) -> str | None:
        """Why a step cannot be captured, as it waits for the GPU. It computes gradients once and leaves no trace."""
        stepper = self._stepper
        carried, extras = stepper.carry.value, dict(stepper.extras)
        try:
            # On the stream of the warm-up: the allocator has the memory of a step there already.
            with (
                kept_random(stepper.device),
                kept_buffers(stepper.model),
                self._recorder.warm_up(),
                self._recorder.strict(),
            ):
                for index, batch in enumerate(self._static):
                    share = None if self._shares is None else self._shares[index]
                    stepper.forward_backward(batch, no_phase, share)
        except RuntimeError as error:
            if _SYNCHRONIZES not in str(error):
                raise
            return f"a step waits for the GPU{_where(error)}"
        finally:
            stepper.carry.value, stepper.extras = carried, extras
            stepper.optimizer.zero_grad(set_to_none=True)
        return None

    def _give_up(self, why: str) -> None:
        self.failed, self._replay, self._static = why, None, []
        self._stepper.optimizer.zero_grad(set_to_none=True)
        self._stepper.reports.append(SettingEvent("speed.cuda_graph", "true", "off", False, why))

    def _fits(self, micro: list[Batch]) -> bool:
        """Whether the batches can take the place of the captured ones; gives up after too many that cannot."""
        kinds = [[(each.shape, each.dtype) for each in tensors(batches)] for batches in (self._static, micro)]
        shapes = kinds[0] == kinds[1]
        # Keys, numbers, words and flags were captured as they were then: a replay would compute with those.
        same = shapes and all(map(same_constants, self._static, micro))
        if not same:
            self._others += 1
            if self._others == MANY_OTHERS:
                why = "keys or values in the batches that are not tensors change: make tensors of the values"
                self._give_up(why if shapes else "batch shapes change: pad all batches to one shape")
        return same


def _where(error: BaseException) -> str:
    found = place(error)
    return f" ({found})" if found else ""


def _stacked(shares: Sequence[Tensor | float]) -> Tensor:
    """The shares of the micro-batches (k,) float64, on the device of the batches."""
    first = shares[0]
    device = first.device if isinstance(first, Tensor) else None
    return torch.stack([torch.as_tensor(share, dtype=torch.float64, device=device) for share in shares])
