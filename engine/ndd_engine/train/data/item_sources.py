"""Item sources: encoded for every batch, encoded once and cached, or gathered from tensors in memory.

All of them create the same batches; only the time differs.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler, default_collate, get_worker_info

from ndd_engine.batches import leaves, map_tensors, tensors
from ndd_engine.config.schema import LoaderSection
from ndd_engine.errors import DoesNotFitError, UsageError, said, shortened
from ndd_engine.hardware.host import free_memory
from ndd_engine.text import size
from ndd_engine.train.random_state import kept_random
from ndd_engine.workloads.base import Batch, Collate, GatherDataset, GatherItems, items_at
from ndd_watch.switches import CHECKED, same_item

from .order import ALONE, Share, mixed

# Share of the free memory that cached items may use; training needs the rest.
SHARE = 0.8
# Items that are sampled to predict the size of all of them.
LOOKED_AT = 8


class Stacked(GatherItems):
    """Items cached as a tree of tensors (N, …); one gather creates a batch."""

    def __init__(self, tree: Any) -> None:
        self.tree = tree

    def __len__(self) -> int:
        return int(next(tensors(self.tree)).shape[0])

    def __getitem__(self, index: int) -> Any:
        return map_tensors(self.tree, lambda tensor: tensor[index])

    def batch(self, indices: Tensor) -> Batch:
        """The items at `indices` (B,)."""
        return map_tensors(self.tree, lambda tensor: tensor[indices])


class WholeBatches(Dataset[Any]):
    """Returns a whole batch for a list of indices to the DataLoader's fetcher, so that nothing is left to collate."""

    def __init__(self, data: GatherDataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitems__(self, indices: list[int]) -> Batch:
        return self.data.batch(torch.tensor(indices))


class Collated(Dataset[Any]):
    """Returns a collated batch of a source's items for a list of indices, in this process or in a loader worker."""

    def __init__(self, source: ItemSource) -> None:
        self.data, self.join = source.data, source.collate or default_collate

    def __len__(self) -> int:
        return len(cast(Any, self.data))

    def __getitems__(self, indices: list[int]) -> Batch:
        """Raises what the data raises, but no StopIteration, which would end the epoch unnoticed."""
        try:
            batch = self.join(items_at(self.data, indices))
            if batch is None:
                raise TypeError("the collate function returned None, not a batch")
            if get_worker_info() is not None:
                check_sendable(batch)
            return batch
        except StopIteration as error:
            text = "the data or its collate function raised StopIteration"
            raise RuntimeError(text).with_traceback(error.__traceback__) from None
        except Exception as error:
            raise_sendable(error)
            raise


def check_sendable(batch: Batch) -> None:
    """Raise TypeError for a batch that a worker cannot send: its queue would wait for ever."""
    for leaf in leaves(batch):
        if not isinstance(leaf, (Tensor, str, bytes, int, float, complex, type(None))):
            kind = shortened(type(leaf).__name__, 80)
            raise TypeError(f"a batch contains a value of the type {kind}, which a loader worker cannot send")
        if isinstance(leaf, Tensor) and leaf.requires_grad and not leaf.is_leaf:
            raise TypeError(
                "a batch contains a tensor with a gradient, which a loader worker cannot send: detach it"
            )


def raise_sendable(error: Exception) -> None:
    """Inside a worker, raise the error as one that a worker can send."""
    if get_worker_info() is not None and not _sendable(error):
        raise RuntimeError(said(error)).with_traceback(error.__traceback__) from None


def _sendable(error: Exception) -> bool:
    try:
        pickle.dumps(type(error))
    except Exception:  # noqa: BLE001  of a local class, or of a user's metaclass
        return False
    return True


@dataclass(frozen=True)
class ItemSource:
    """Items ready for a loader.

    gather: creates whole batches, or None (`data` and `collate` create them item by item). encoded: number of cached
    items, or None. on: the device that holds the data. nbytes: size of the cache. possible: what could gather even if
    the configuration asks for items; None if nothing can.
    """

    data: Dataset[Any]
    collate: Collate | None
    gather: GatherDataset | None
    encoded: int | None
    on: torch.device
    nbytes: int | None
    possible: GatherDataset | None = None

    def rest_of(self, what: str) -> str:
        """How the items are stored, as text."""
        held = "" if self.nbytes is None else f", {size(self.nbytes)} on {self.on}"
        return ("as it is" if self.encoded is None else f"{self.encoded:,} {what} encoded once") + held


def make_source(
    data: Dataset[Any],
    collate: Collate | None,
    loader: LoaderSection,
    device: torch.device,
    epochs_differ: bool,
    tell: Callable[[str], None],
) -> ItemSource:
    """The data as configured by `loader.cache`, `loader.placement` and `loader.fetch`.

    Raises UsageError if items cannot be cached, DoesNotFitError with the sizes if they do not fit.
    """
    place = loader.placement == "device"
    gather = _gathering(data)
    encoded = None
    if loader.cache or (place and gather is None):
        key = "loader.cache" if loader.cache else 'loader.placement "device"'
        if epochs_differ:
            raise UsageError(
                f"{key} caches items, but this workload changes its items every epoch (augmentation)"
            )
        # Encode each item once, after checking that all of them fit: Stacked, or a list if their shapes differ.
        count = len(cast(Any, data))
        # Stacking needs memory for both forms.
        _check_room(key, 2 * kept_bytes(data), torch.device("cpu"), "the host")
        items = []
        step = max(count // 20, 1)
        for index in range(count):
            if index % step == 0:
                tell(f"encoding items once: {index:,} of {count:,}")
            items.append(data[index])
            if index < CHECKED:
                with kept_random(torch.device("cpu")):
                    again = data[index]
                if not same_item(torch, items[-1], again, unknown=True):
                    why = f"item {index} differs when it is read again, as by random augmentation"
                    raise UsageError(
                        f"{key} caches items, but {why}: cached, it would be the same in every epoch"
                    )
        stack = collate is None and _same_shapes(items)
        data = Stacked(default_collate(items)) if stack else cast(Dataset[Any], items)
        encoded = len(cast(Any, data))
        gather = _gathering(data)
    nbytes = None
    if place or encoded is not None:
        nbytes = gather.nbytes if gather is not None else item_bytes(data)
    if not place:
        used = None if loader.fetch == "item" else gather
        return ItemSource(data, collate, used, encoded, torch.device("cpu"), nbytes, gather)
    _check_room('loader.placement "device"', nbytes or 0, device, str(device))
    if gather is not None:
        gather = gather.to(device)
        return ItemSource(cast(Any, gather), None, gather, encoded, device, gather.nbytes, gather)
    # Items of different shapes are collated on the device.
    moved = map_tensors(data, lambda tensor: tensor.to(device))
    join = collate or default_collate
    if any(tensor.device.type != device.type for tensor in tensors(join([moved[0]]))):
        raise UsageError(
            'loader.placement "device" is not possible: this workload creates its batches on the host; '
            "use loader.cache = true to encode each item once there"
        )
    return ItemSource(moved, collate, None, encoded, device, nbytes)


def _gathering(data: Any) -> GatherDataset | None:
    return data if all(hasattr(data, name) for name in ("batch", "to", "nbytes")) else None


def kept_bytes(data: Dataset[Any]) -> int:
    """Bytes of all cached items: exact for data that gathers, else predicted from a sample."""
    if (gather := _gathering(data)) is not None:
        return int(gather.nbytes)
    count = len(cast(Any, data))
    looked = [data[index] for index in range(0, count, max(count // LOOKED_AT, 1))]
    return item_bytes(looked) * count // max(len(looked), 1)


def gathers(data: Dataset[Any]) -> bool:
    """Whether the items are tensors that can be gathered into batches."""
    return _gathering(data) is not None


def can_keep(data: Dataset[Any], epochs_differ: bool) -> bool:
    """Whether items can be stored on a device: they gather there, or are the same every epoch."""
    return _gathering(data) is not None or not epochs_differ


def _same_shapes(items: Sequence[Any]) -> bool:
    """Whether trees of tensors have the same structure, shapes and dtypes."""

    def shape(item: Any) -> Any:
        if isinstance(item, Tensor):
            return item.shape, item.dtype
        if isinstance(item, dict):
            return {key: shape(value) for key, value in item.items()}
        return [shape(value) for value in item] if isinstance(item, (list, tuple)) else object()

    first = shape(items[0])
    return all(shape(item) == first for item in items)


def _check_room(key: str, needed: int, device: torch.device, where: str) -> None:
    if needed > (limit := free_bytes(device)) * SHARE:
        raise DoesNotFitError(
            f"{key} does not fit: it needs {size(needed)}; {size(limit)} are free on {where}, of which "
            f"at most {SHARE:.0%} may be used; turn it off or use less data"
        )


def free_bytes(device: torch.device) -> int:
    """Free memory of a device; on the host, limited by the control group."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else free_memory()


def item_bytes(item: Any) -> int:
    """Bytes of the tensors of an item, or of a list of items."""
    return sum(tensor.nbytes for tensor in tensors(item))


class EpochBatches(Sampler[list[int]]):
    """Index lists of one epoch's micro-batches; `set` chooses the epoch and the position to start at.

    The incomplete last batch is dropped, so that every step has the same shape. If epochs differ, an index also
    encodes the epoch: epoch * items + item. share: the micro-batches of this rank; positions count them alone.
    """

    def __init__(
        self,
        items: int,
        micro: int,
        seed: int,
        epochs_differ: bool = False,
        shuffle: bool = True,
        share: Share = ALONE,
    ) -> None:
        self.items, self.micro, self.seed, self.shuffle, self.share = items, micro, seed, shuffle, share
        self.epoch = 0
        self.start = 0
        self.epochs_differ = epochs_differ

    def set(self, epoch: int, start: int = 0) -> None:
        """Select the epoch (0-based) and the number of micro-batches to skip."""
        self.epoch, self.start = epoch, start

    def __len__(self) -> int:
        return self.items // self.micro // self.share.of - self.start

    def __iter__(self) -> Iterator[list[int]]:
        return (indices.tolist() for indices in self.tensors())

    def tensors(self) -> Iterator[Tensor]:
        """The same lists as tensors (micro,) int64."""
        generator = torch.Generator().manual_seed(mixed(self.seed, self.epoch))
        order = torch.randperm(self.items, generator=generator) if self.shuffle else torch.arange(self.items)
        if self.epochs_differ:
            order += self.epoch * self.items
        rank, of, micro = self.share.rank, self.share.of, self.micro
        for index in range(self.start, self.start + max(len(self), 0)):
            begin = (index * of + rank) * micro
            yield order[begin : begin + micro]
