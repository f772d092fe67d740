"""Batches in an order that depends only on the seed and the epoch, starting at any position."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from ndd_engine.batches import map_tensors, tensors
from ndd_engine.config.schema import Config
from ndd_engine.workloads.base import Batch, Collate

from .source import Collated, Source, WholeBatches, make_source
from .workers import WatchedLoader, worker_options, worker_pids

CPU = torch.device("cpu")
# Bytes of a tensor that its checksum covers wholly, and the number of blocks that it covers of a larger one.
WHOLE_BYTES = 16 << 20
BLOCKS = 16


class EpochBatches(Sampler[list[int]]):
    """Index lists of one epoch's micro-batches; `set` chooses the epoch and the position to start at.

    The incomplete last batch is dropped, so that every step has the same shape. If epochs differ, an index also
    encodes the epoch: epoch * items + item.
    """

    def __init__(self, items: int, micro: int, seed: int, epochs_differ: bool = False) -> None:
        self.items, self.micro, self.seed = items, micro, seed
        self.epoch = 0
        self.start = 0
        self.epochs_differ = epochs_differ

    def set(self, epoch: int, start: int = 0) -> None:
        """Select the epoch (0-based) and the number of micro-batches to skip."""
        self.epoch, self.start = epoch, start

    def __len__(self) -> int:
        return self.items // self.micro - self.start

    def __iter__(self) -> Iterator[list[int]]:
        return (indices.tolist() for indices in self.tensors())

    def tensors(self) -> Iterator[Tensor]:
        """The same lists as tensors (micro,) int64."""
        generator = torch.Generator().manual_seed(_mix(self.seed, self.epoch))
        order = torch.randperm(self.items, generator=generator)
        if self.epochs_differ:
            order += self.epoch * self.items
        whole = self.items // self.micro * self.micro
        yield from torch.split(order[self.start * self.micro : whole], self.micro) if len(self) > 0 else ()


def _mix(seed: int, epoch: int) -> int:
    # With seed + epoch, neighbouring (seed, epoch) pairs would share an order.
    return (seed * 0x9E3779B97F4A7C15 + epoch * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) % (2**63)


@dataclass(frozen=True)
class FirstBatch:
    """What an epoch's first batch shows of the loader: worker ids, pinned memory, device."""

    workers: tuple[int, ...]
    pinned: bool
    device: str


class _Loaded:
    """Batches of a source, from a DataLoader or created in this process.

    seen: what the first batch of the newest epoch shows. loader: None if torch's DataLoader would have nothing to do.
    """

    def __init__(
        self, source: Source, config: Config, pin: bool, workers: dict[str, Any], **order: Any
    ) -> None:
        """workers: see worker_options. order: the DataLoader's options that choose the items of a batch."""
        self.source = source
        self.seen: FirstBatch | None = None
        self.loader: DataLoader[Any] | None = None
        self._pin = pin
        gather = source.gather
        if config.loader.placement != "device" and (gather is None or workers["num_workers"]):
            self.loader = WatchedLoader(
                config.loader.timeout_s,
                dataset=Collated(source) if gather is None else WholeBatches(gather),
                collate_fn=_as_it_is,
                # A separate generator: drawing the workers' seeds must not advance the model's.
                generator=torch.Generator().manual_seed(config.run.seed),
                pin_memory=pin,
                **workers,
                **order,
            )

    def _begun(self, lists: Iterator[Tensor]) -> Iterator[Batch]:
        """All batches of an epoch; looks at the first one. lists: the indices of each batch."""
        iterator: Iterator[Batch]
        iterator = gathered(self.source, lists, self._pin) if self.loader is None else iter(self.loader)
        self.seen = None
        first = next(iterator, None)
        if first is None:
            return iter(())
        if (tensor := next(tensors(first), None)) is not None:
            pinned = tensor.device.type == "cpu" and tensor.is_pinned()
            self.seen = FirstBatch(worker_pids(iterator), pinned, str(tensor.device))
        return chain((first,), iterator)


class Batches(_Loaded):
    """The training batches of a run. `epoch(n, start)` iterates; the loader lives as long as the run.

    collate, epochs_differ: the workload's. device: target of `placement = "device"`. tell: called with the progress
    of encoding. Raises UsageError and DoesNotFitError, see make_source.
    """

    def __init__(
        self,
        data: Dataset[Any],
        config: Config,
        collate: Collate | None = None,
        epochs_differ: bool = False,
        device: torch.device = CPU,
        tell: Callable[[str], None] = lambda _text: None,
    ) -> None:
        items = len(data)  # type: ignore[arg-type]
        loader = config.loader
        self.sampler = EpochBatches(items, config.batch.micro, config.run.seed, epochs_differ)
        self.crc, self._whole_crc = checksum(data, items)
        self._data = data
        source = make_source(data, collate, loader, device, epochs_differ, tell)
        persistent = loader.workers > 0 if loader.persistent is None else loader.persistent
        workers = worker_options(loader.workers, loader.prefetch, persistent)
        super().__init__(source, config, loader.pin_memory, workers, batch_sampler=self.sampler)

    def sample(self, items: int | None = None) -> Batch:
        """The first micro-batch of the first epoch, or its first `items`, created in this process.

        Raises what the data raises.
        """
        micro = self.sampler.micro
        self.sampler.set(0)
        lists = islice(self.sampler.tensors(), 1 if items is None else -(-items // micro))
        first = torch.cat(list(lists))[:items]
        return next(gathered(self.source, iter([first]), False))

    def has_crc(self, saved: object) -> bool:
        """Whether a checkpoint with this checksum has the same data; older versions covered large items wholly."""
        if saved == self.crc:
            return True
        return not self._whole_crc and saved == checksum(self._data, self.sampler.items, limit=1 << 62)[0]

    @property
    def per_epoch(self) -> int:
        """Micro-batches per epoch."""
        return self.sampler.items // self.sampler.micro

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Batches of one epoch, starting at micro-batch `start`."""
        self.sampler.set(epoch, start)
        return self._begun(self.sampler.tensors())


class EvalBatches(_Loaded):
    """Evaluation batches in their original order; the last one may be smaller."""

    def __init__(
        self,
        data: Dataset[Any],
        config: Config,
        collate: Collate | None = None,
        device: torch.device = CPU,
        tell: Callable[[str], None] = lambda _text: None,
    ) -> None:
        loader = config.loader
        source = make_source(data, collate, loader, device, False, tell)
        self._items, self._micro = len(data), config.batch.micro  # type: ignore[arg-type]
        pin = loader.pin_memory if loader.eval_pin_memory is None else loader.eval_pin_memory
        workers = worker_options(loader.eval_workers, loader.eval_prefetch, loader.eval_persistent)
        super().__init__(source, config, pin, workers, batch_size=self._micro, shuffle=False)

    def __iter__(self) -> Iterator[Batch]:
        return self._begun(iter(torch.split(torch.arange(self._items), self._micro)))


def _as_it_is(batch: Batch) -> Batch:
    return batch


def gathered(source: Source, lists: Iterator[Tensor], pin: bool) -> Iterator[Batch]:
    """One batch per list of indices, created in this process on the device that holds the data."""
    pin = pin and source.on.type == "cpu" and torch.cuda.is_available()
    items = Collated(source)
    for indices in lists:
        if source.gather is not None:
            batch = source.gather.batch(indices.to(source.on, non_blocking=True))
        else:
            batch = items.__getitems__(indices.tolist())
        yield map_tensors(batch, Tensor.pin_memory) if pin else batch


def checksum(
    data: Dataset[Any], items: int, looked_at: int = 16, limit: int = WHOLE_BYTES
) -> tuple[int, bool]:
    """CRC-32 of evenly spread items, to detect that a resumed run has other data, and whether it covers them wholly.

    Of a tensor above `limit` bytes it covers evenly spread blocks and the size.
    """
    crc, whole = 0, True
    looked_at = min(items, looked_at)
    for index in (place * items // looked_at for place in range(looked_at)):
        for tensor in tensors(data[index]):
            if tensor.numel():
                plain = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
                if plain.numel() > limit:
                    whole = False
                    crc = zlib.crc32(plain.numel().to_bytes(8, "little"), crc)
                    block = limit // BLOCKS
                    last = plain.numel() - block
                    parts = [plain[place * last // (BLOCKS - 1) :][:block] for place in range(BLOCKS)]
                else:
                    parts = [plain]
                for part in parts:
                    # The tensor's own memory: copying it to a list takes 40 ms per megabyte.
                    crc = zlib.crc32((ctypes.c_ubyte * part.numel()).from_address(part.data_ptr()), crc)
    return crc, whole


def to_device(batch: Batch, device: torch.device, non_blocking: bool = True) -> Batch:
    """Move a batch to the device, tensor by tensor; copies from pinned memory need not block."""
    return map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=non_blocking))
