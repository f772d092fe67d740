"""Marks where a rank waits for the others: the sub-phase "exchange" in backward (DDP) and in collectives (FSDP2).

DDP launches its last bucket when the gradient of one certain parameter is ready; from then until backward returns, the
host (gloo) or the compute stream (NCCL) only waits. A hook on that gradient alone begins the sub-phase. FSDP2 calls its
collectives through an interface, which is where the sub-phase begins and ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ndd_engine.measure.clock import PhaseClock

PART = "exchange"


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
    """A collective of FSDP2 inside the sub-phase. Implements the interface of its custom collectives."""

    def __init__(self, clock: PhaseClock) -> None:
        self._clock = clock

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(_Marked):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> Any:
        outer = self._clock.enter_part(PART)
        try:
            return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)
        finally:
            self._clock.enter(outer)


class _Scatter(_Marked):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        outer = self._clock.enter_part(PART)
        try:
            return dist.reduce_scatter_tensor(
                output_tensor, input_tensor, op=op, group=group, async_op=async_op
            )
        finally:
            self._clock.enter(outer)


def mark_collectives(modules: Iterable[nn.Module], clock: PhaseClock) -> bool:
    """Mark the collectives of FSDP2's modules; False if this version of torch has no interface for that."""
    marked = False
    for module in cast("Iterable[Any]", modules):
        if hasattr(module, "set_custom_all_gather") and hasattr(module, "set_custom_reduce_scatter"):
            module.set_custom_all_gather(_Gather(clock))
            module.set_custom_reduce_scatter(_Scatter(clock))
            marked = True
    return marked
