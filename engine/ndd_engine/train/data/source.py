"""Where items come from: encoded anew each time, encoded once and kept, or gathered from tensors in memory.

A batch is the same batch whichever way it is made; only the time differs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from ndd_engine.batches import map_tensors, tensors
from ndd_engine.config.schema import LoaderSection
from ndd_engine.errors import DoesNotFitError, UsageError
from ndd_engine.hardware.host import free_memory
from ndd_engine.text import size
from ndd_engine.workloads.base import Batch, Collate, GatherDataset

# Of the memory that is free, what kept items may take: the training itself needs the rest.
SHARE = 0.8
# Items that are looked at to predict what all of them take.
LOOKED_AT = 8


class Kept(Dataset[Any]):
    """Items that were encoded once, and have no common shape."""

    def __init__(self, items: Sequence[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


class Stacked(Dataset[Any]):
    """Items that were encoded once into a tree of tensors (N, …), and make a batch in one gather."""

    def __init__(self, tree: Any) -> None:
        self.tree = tree

    def __len__(self) -> int:
        return int(next(tensors(self.tree)).shape[0])

    def __getitem__(self, index: int) -> Any:
        return map_tensors(self.tree, lambda tensor: tensor[index])

    def batch(self, indices: Tensor) -> Batch:
        """The items at `indices` (B,)."""
        return map_tensors(self.tree, lambda tensor: tensor[indices])

    def to(self, device: torch.device) -> Stacked:
        """The same items on another device."""
        return Stacked(map_tensors(self.tree, lambda tensor: tensor.to(device)))

    @property
    def nbytes(self) -> int:
        """Bytes of all items."""
        return sum(tensor.nbytes for tensor in tensors(self.tree))


class WholeBatches(Dataset[Any]):
    """Hands the loader's fetcher a whole batch for a list of indices; its collate function has nothing left to do."""

    def __init__(self, data: GatherDataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitems__(self, indices: list[int]) -> Batch:
        return self.data.batch(torch.tensor(indices))


@dataclass(frozen=True)
class Source:
    """Items ready for a loader.

    gather: makes whole batches, or None (then `data` and `collate` make them item by item). encoded: items that
    were encoded once and are kept, or None. on: the device that the data lies on. nbytes: what is kept there.
    possible: what could gather, also where the configuration wants items; None where nothing can.
    """

    data: Dataset[Any]
    collate: Collate | None
    gather: GatherDataset | None
    encoded: int | None
    on: torch.device
    nbytes: int | None
    possible: GatherDataset | None = None

    def rest_of(self, what: str) -> str:
        """How the items are kept, for people."""
        held = "" if self.nbytes is None else f", {size(self.nbytes)} on {self.on}"
        return (
            f"{self.encoded:,} {what} encoded once{held}" if self.encoded is not None else f"as it is{held}"
        )


def make_source(
    data: Dataset[Any],
    collate: Collate | None,
    loader: LoaderSection,
    device: torch.device,
    epochs_differ: bool,
    tell: Callable[[str], None],
) -> Source:
    """The data as `loader.cache`, `loader.placement` and `loader.fetch` want it.

    Raises UsageError where items cannot be kept, DoesNotFitError with the numbers where they do not fit.
    """
    place = loader.placement == "device"
    gather = _gathering(data)
    encoded = None
    if loader.cache or (place and gather is None):
        key = "loader.cache" if loader.cache else 'loader.placement "device"'
        if epochs_differ:
            raise UsageError(
                f"{key} keeps items, but this workload changes its items every epoch (augmentation)"
            )
        data = _encode(data, collate, key, tell)
        encoded = len(cast(Any, data))
        gather = _gathering(data)
    if place:
        if gather is None:
            return _on_device(cast(Kept, data), collate, device, encoded)
        if gather.nbytes > (limit := free_bytes(device)) * SHARE:
            raise DoesNotFitError(
                _does_not_fit('loader.placement "device"', gather.nbytes, limit, str(device))
            )
        gather = gather.to(device)
        return Source(cast(Any, gather), None, gather, encoded, device, gather.nbytes, gather)
    nbytes = None
    if encoded is not None:
        nbytes = (
            gather.nbytes if gather is not None else sum(item_bytes(item) for item in cast(Kept, data).items)
        )
    used = None if loader.fetch == "item" else gather
    return Source(data, collate, used, encoded, torch.device("cpu"), nbytes, gather)


def _on_device(data: Kept, collate: Collate | None, device: torch.device, encoded: int | None) -> Source:
    """Items of different shapes on the device, collated there."""
    needed = sum(item_bytes(item) for item in data.items)
    if needed > (limit := free_bytes(device)) * SHARE:
        raise DoesNotFitError(_does_not_fit('loader.placement "device"', needed, limit, str(device)))
    moved = Kept([map_tensors(item, lambda tensor: tensor.to(device)) for item in data.items])
    join = collate or default_collate
    if any(tensor.device.type != device.type for tensor in tensors(join([moved[0]]))):
        raise UsageError(
            'loader.placement "device" is not possible: this workload builds its batches on the host; '
            "loader.cache = true encodes each item once there"
        )
    return Source(moved, collate, None, encoded, device, needed)


def _gathering(data: Any) -> GatherDataset | None:
    return (
        cast(GatherDataset, data) if all(hasattr(data, name) for name in ("batch", "to", "nbytes")) else None
    )


def _encode(
    data: Dataset[Any], collate: Collate | None, key: str, tell: Callable[[str], None]
) -> Stacked | Kept:
    """Each item once, after a look at what they will take."""
    count, predicted = len(cast(Any, data)), kept_bytes(data)
    # Stacking holds both forms for a moment.
    if 2 * predicted > (limit := free_bytes(torch.device("cpu"))) * SHARE:
        raise DoesNotFitError(_does_not_fit(key, 2 * predicted, limit, "the host"))
    items = []
    step = max(count // 20, 1)
    for index in range(count):
        if index % step == 0:
            tell(f"encoding items once: {index:,} of {count:,}")
        items.append(data[index])
    if collate is None and _same_shapes(items):
        return Stacked(default_collate(items))
    return Kept(items)


def kept_bytes(data: Dataset[Any]) -> int:
    """What all items take once they are kept: told by what gathers, else predicted from a look at some of them."""
    if (gather := _gathering(data)) is not None:
        return int(gather.nbytes)
    count = len(cast(Any, data))
    looked = [data[index] for index in range(0, count, max(count // LOOKED_AT, 1))]
    return sum(map(item_bytes, looked)) * count // max(len(looked), 1)


def gathers(data: Dataset[Any]) -> bool:
    """Whether the items are tensors that make whole batches."""
    return _gathering(data) is not None


def can_keep(data: Dataset[Any], epochs_differ: bool) -> bool:
    """Whether items can lie on a device: they gather there, or are the same ones every epoch."""
    return _gathering(data) is not None or not epochs_differ


def _same_shapes(items: Sequence[Any]) -> bool:
    """Trees of tensors alike in everything but their values."""

    def shape(item: Any) -> Any:
        if isinstance(item, Tensor):
            return item.shape, item.dtype
        if isinstance(item, dict):
            return {key: shape(value) for key, value in item.items()}
        return [shape(value) for value in item] if isinstance(item, (list, tuple)) else object()

    first = shape(items[0])
    return all(shape(item) == first for item in items)


def _does_not_fit(key: str, needed: int, limit: int, where: str) -> str:
    return (
        f"{key} does not fit: it takes {size(needed)}, and {size(limit)} are free on {where}, of which "
        f"{SHARE:.0%} may be used; turn it off or use less data"
    )


def free_bytes(device: torch.device) -> int:
    """What can still be allocated on a device now; on the host no more than the control group leaves."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return free_memory()


def item_bytes(item: Any) -> int:
    """Bytes of an item's tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors(item))
