"""One rank of several in a single process, for predicting its memory.

A fake process group takes the place of the others: it exchanges nothing, but everything that the real exchange
allocates is allocated. On the CPU that includes the temporary copies of gloo; on a GPU NCCL's own buffers, which lie
outside of the allocator, are not included.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ndd_engine.config import Config
from ndd_engine.errors import UsageError
from ndd_engine.train.parallel.strategy import (
    DTYPES,
    GATHER,
    SCATTER,
    Ddp,
    Forward,
    Fsdp2,
    Strategy,
    blocks,
    strategy_of,
    why_not,
)
from ndd_engine.train.step.stepper import Stepper
from ndd_engine.workloads.base import Workload
from ndd_engine.workloads.result import TrainingParts

# The layers that FSDP2 holds gathered at a time: one that computes and one that is gathered for afterwards.
GATHERED = 2
MB = 1 << 20


@contextmanager
def pretended(ranks: int, device: torch.device) -> Iterator[None]:
    """Inside, this process is rank 0 of so many on devices of this type; nothing happens for a single one."""
    if ranks == 1:
        yield
        return
    if dist.is_initialized():
        raise RuntimeError("memory cannot be predicted in a process of a process group")
    from torch.testing._internal.distributed import fake_pg  # registers the backend; needed before torch 2.8

    dist.init_process_group("fake", rank=0, world_size=ranks, store=fake_pg.FakeStore())
    try:
        with _copies_of_gloo() if device.type == "cpu" else nullcontext():
            yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _copies_of_gloo() -> Iterator[None]:
    """Allocate what gloo does while FSDP2 gathers and reduces: a copy of the whole, as a profile of its calls shows."""
    gather, scatter = getattr(dist, GATHER), getattr(dist, SCATTER)

    def gathered(output_tensor: Tensor, *args: Any, **options: Any) -> Any:
        torch.empty_like(output_tensor)
        return gather(output_tensor, *args, **options)

    def scattered(*args: Any, **options: Any) -> Any:
        torch.empty_like(options["input"] if "input" in options else args[1])
        return scatter(*args, **options)

    _set_collectives(gathered, scattered)
    try:
        yield
    finally:
        _set_collectives(gather, scatter)


def _set_collectives(gather: Callable[..., Any], scatter: Callable[..., Any]) -> None:
    setattr(dist, GATHER, gather)
    setattr(dist, SCATTER, scatter)


def is_sharded(config: Config) -> bool:
    """Whether the ranks shard the parameters."""
    return config.parallel.ranks > 1 and config.parallel.strategy == "fsdp2"


def stepper_of_rank(
    workload: Workload, config: Config, device: torch.device, strategy: Strategy | None
) -> Stepper:
    """A stepper of this rank. A model that is sharded is copied first, since sharding cannot be undone."""
    if isinstance(strategy, Fsdp2):
        known: dict[int, Any] = {}
        workload = workload.with_model(copy.deepcopy(workload.model, known), known)
        strategy.copied = True
    return Stepper(workload, config, device, total_steps=1000, strategy=strategy)


def strategy_for_fakes(config: Config, parts: TrainingParts) -> Strategy | None:
    """The configured strategy for fake tensors, within `pretended`. Raises UsageError."""
    section = config.parallel
    if section.ranks > 1 and section.strategy == "ddp":
        if (why := why_not(config, parts)) is not None:
            raise UsageError(why)
        return BucketsOnly(section, torch.device("cpu"))
    return strategy_of(config, torch.device("cpu"), parts)


class BucketsOnly(Ddp):
    """Allocates and copies what DistributedDataParallel does, whose C++ code does not accept fake tensors."""

    def computing(self, _forward: Forward | None = None) -> nn.Module:
        self._last = True
        self._steps = 0
        self._trainable = [item for item in self.module.parameters() if item.requires_grad]
        self._allocate()
        for parameter in self._trainable:
            parameter.register_post_accumulate_grad_hook(self._ready)  # type: ignore[no-untyped-call]
        return self.module

    def micro(self, last: bool) -> AbstractContextManager[Any]:
        if self._steps == 1:
            self._allocate()  # DistributedDataParallel rebuilds its buckets after the first backward
        self._last = last
        self._steps += last
        return nullcontext()

    def _allocate(self) -> None:
        """Buckets of at most bucket_mb, in reverse order of the parameters, as their gradients become ready."""
        self._views: dict[Tensor, tuple[int, Tensor]] = {}
        self._buckets: list[Tensor] = []
        rest, filled = list(reversed(self._trainable)), 0
        while filled < len(rest):
            size, begin = 0, filled
            first = rest[begin]
            while filled < len(rest) and rest[filled].dtype == first.dtype:
                size += rest[filled].numel() * first.element_size()
                filled += 1
                if size >= self.section.bucket_mb * MB:
                    break
            bucket = first.new_empty(size // first.element_size())
            at = 0
            for item in rest[begin:filled]:
                self._views[item] = len(self._buckets), bucket[at : at + item.numel()].view_as(item)
                at += item.numel()
            self._buckets.append(bucket)
        held = Counter(place for place, _ in self._views.values())
        self._waiting = [held[place] for place in range(len(self._buckets))]

    @torch.no_grad()
    def _ready(self, parameter: Tensor) -> None:
        if not self._last:
            return
        place, view = self._views[parameter]
        assert parameter.grad is not None
        parameter.grad = view.copy_(parameter.grad)
        self._waiting[place] -= 1
        if not self._waiting[place] and self.section.compress != "off":
            self._buckets[place].to(DTYPES[self.section.compress])  # freed when it was exchanged


@dataclass(frozen=True)
class Shares:
    """Bytes that one rank holds throughout a step, by what they hold; activations come on top.

    gradients: outside of buckets. gathered: parameters of other ranks that are there at a time. buckets: gradients on
    their way, which DistributedDataParallel keeps for the whole run.
    """

    parameters: int
    gradients: int
    optimizer: int
    gathered: int = 0
    buckets: int = 0


def shares(config: Config, model: nn.Module, moment_bytes: int) -> Shares:
    """What one rank holds. model: the whole one; moment_bytes: optimizer state of the whole model."""
    section = config.parallel
    several = config.batch.accumulation > 1
    whole = sum(item.nbytes for item in model.parameters())
    trained = sum(item.nbytes for item in model.parameters() if item.requires_grad)
    if not is_sharded(config):
        if section.ranks == 1:
            return Shares(whole, trained, moment_bytes)
        biggest = min(trained, int(section.bucket_mb * MB))
        compressed = 0 if section.compress == "off" else biggest // 2
        # Before the last micro-batch gradients add up beside the buckets.
        return Shares(whole, trained if several else 0, moment_bytes, buckets=trained + compressed)
    kept = sum(map(_part(section.ranks), model.parameters()))
    kept_trained = sum(map(_part(section.ranks), (item for item in model.parameters() if item.requires_grad)))
    layers = sorted((_bytes(layer, section.param_dtype) for layer in blocks(model)), reverse=True)
    root = _bytes(model, section.param_dtype) - sum(layers)
    gathered = root + sum(layers[:GATHERED] if section.reshard else layers)
    moments = moment_bytes * kept_trained // max(trained, 1)
    # Between micro-batches gradients are not reduced, so they stay whole.
    return Shares(kept, trained if several else kept_trained, moments, gathered=gathered)


def _part(ranks: int) -> Any:
    """Bytes of a parameter on the rank with the most: FSDP2 splits the first dimension."""

    def part(parameter: Tensor) -> int:
        rows = parameter.shape[0] if parameter.ndim else 1
        return parameter.nbytes // max(rows, 1) * -(-rows // ranks)

    return part


def _bytes(module: nn.Module, dtype: str) -> int:
    return sum(item.numel() for item in module.parameters()) * DTYPES[dtype].itemsize
