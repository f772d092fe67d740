"""Marks where a rank waits for the others: the sub-phase "exchange" of forward and backward.

DDP launches its last bucket when the gradient of one certain parameter is ready; from then until backward returns, the
host (gloo) or the compute stream (NCCL) only waits. A hook on that gradient alone begins the sub-phase. FSDP2 calls its
collectives through an interface: with gloo, the sub-phase is their call. With NCCL they run on streams of their own.
The compute stream waits for an event of these streams where it needs what was exchanged: that wait is the sub-phase.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ndd_engine.measure.phase_clock import PhaseClock

PART = "exchange"
# The functions of torch.distributed that FSDP2 calls. torch 2.13 renames them, and warns of the old names.
GATHER, SCATTER = (
    ("all_gather_single", "reduce_scatter_single")
    if hasattr(dist, "all_gather_single")
    else ("all_gather_into_tensor", "reduce_scatter_tensor")
)


class DdpMarks:
    """Begins "backward/exchange" when the last gradient of a step is ready.

    Which one that is shows in two backward passes (DDP arranges its buckets after the first); see `learned`.
    """

    def __init__(self, module: DistributedDataParallel) -> None:
        self._module = module
        self._clock: PhaseClock | None = None
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._order: list[int] = []
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._noting(index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(self._parameters)
        ]

    def _noting(self, index: int) -> Callable[[Tensor], None]:
        return lambda _parameter: self._order.append(index)

    def learned(self, clock: PhaseClock) -> None:
        """After two backward passes: keep the hook of the last gradient only, and mark on this clock."""
        self._clock = clock
        for handle in self._handles:
            handle.remove()
        last = self._parameters[self._order[-1]] if self._order else None
        self._handles = [] if last is None else [last.register_post_accumulate_grad_hook(self._mark)]  # type: ignore[no-untyped-call]

    def _mark(self, _parameter: Tensor) -> None:
        if self._clock is not None and self._module.require_backward_grad_sync:
            self._clock.enter_part(PART)


class _Marked:
    """A collective inside the sub-phase. Implements the interface of FSDP2's custom collectives."""

    def __init__(self, clock: PhaseClock, name: str) -> None:
        self._clock, self._name = clock, name

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **more: Any) -> Any:
        with self._clock.part(PART):
            return getattr(dist, self._name)(output_tensor, input_tensor, **more)


def mark_collectives(modules: Iterable[nn.Module], clock: PhaseClock) -> bool:
    """Mark the collectives of FSDP2's modules; False if this version of torch has no interface for that."""
    marked = False
    for module in cast("Iterable[Any]", modules):
        if hasattr(module, "set_custom_all_gather") and hasattr(module, "set_custom_reduce_scatter"):
            module.set_custom_all_gather(_Marked(clock, GATHER))
            module.set_custom_reduce_scatter(_Marked(clock, SCATTER))
            marked = True
    return marked


class StreamWaits:
    """Marks the waits of the compute stream for other streams in forward, loss and backward.

    With FSDP2 these are the waits for its collectives. clock: records CUDA events on the compute stream, before and
    after the wait. kind: the class of streams, whose method is replaced until `stop`.
    """

    def __init__(self, clock: PhaseClock, compute: Any, kind: Any = torch.cuda.Stream) -> None:
        self._clock, self._compute, self._kind = clock, compute, kind
        self._wait_event = kind.wait_event

        # A method has to be a function: it is called with the stream.
        def wait_event(stream: Any, event: Any) -> None:
            self._wait(stream, event)

        kind.wait_event = wait_event

    def stop(self) -> None:
        """Mark no more."""
        self._kind.wait_event = self._wait_event

    def _wait(self, stream: Any, event: Any) -> None:
        clock = self._clock
        phase = clock.current.partition("/")[0]
        if phase not in ("forward", "loss", "backward") or stream != self._compute:
            self._wait_event(stream, event)
            return
        with clock.part(PART):
            self._wait_event(stream, event)
