"""The items of a user's own dataset: cut in two for evaluation, tried once, and fit for the loader."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset, default_collate

from ndd_engine.config.schema import Config
from ndd_engine.errors import ConfigError

from .base import Batch, Collate
from .own_given import Given
from .own_module import calling, said
from .windows import Complaints

EVAL_SHARE = 0.1
_PLAIN = (Tensor, str, bytes, int, float, complex, type(None))


class Tensors(Dataset[Any]):
    """A TensorDataset whose batches are made in one gather; an item is a tuple, a batch a list, as with torch's own."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tuple(tensors)

    def __len__(self) -> int:
        return int(self.tensors[0].shape[0])

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(tensor[index] for tensor in self.tensors)

    def batch(self, indices: Tensor) -> list[Tensor]:
        """The items at `indices` (B,) int64 as a collated batch."""
        return [tensor[indices] for tensor in self.tensors]

    def to(self, device: torch.device) -> Tensors:
        """The same items on another device."""
        return Tensors([tensor.to(device) for tensor in self.tensors])

    @property
    def nbytes(self) -> int:
        """What `to` takes on the device."""
        return sum(tensor.nbytes for tensor in self.tensors)


class Part(Dataset[Any]):
    """`count` items of a dataset from `start` on; also of one that makes other items each epoch."""

    def __init__(self, data: Any, start: int, count: int) -> None:
        self.data, self.start, self.count = data, start, count
        self._whole = len(data)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.data[self._place(index)]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        places = [self._place(index) for index in indices]
        together = getattr(self.data, "__getitems__", None)
        return list(together(places)) if callable(together) else [self.data[place] for place in places]

    def _place(self, index: int) -> int:
        epoch, item = divmod(index, self.count)
        return epoch * self._whole + self.start + item


class GatherPart(Part):
    """The same of a dataset that makes whole batches."""

    def batch(self, indices: Tensor) -> Batch:
        """The items at `indices` (B,) int64 as a collated batch."""
        return self.data.batch(indices + self.start)

    def to(self, device: torch.device) -> GatherPart:
        """The same items on another device, with all of the dataset that they are a part of."""
        return GatherPart(self.data.to(device), self.start, self.count)

    @property
    def nbytes(self) -> int:
        """What `to` takes on the device."""
        return int(self.data.nbytes)


def train_and_eval(given: Given, where: str) -> tuple[Dataset[Any], Dataset[Any], list[str]]:
    """(training data, evaluation data, what to tell of a part that was kept for evaluation).

    Raises ConfigError when there is nothing to keep.
    """
    train = _gathering(given.train_data, given.collate)
    if given.eval_data is not None:
        return train, _gathering(given.eval_data, given.collate), []
    total = len(train)
    kept = max(int(total * EVAL_SHARE), 1)
    if kept >= total:
        complaints = Complaints(where)
        complaints.add(
            "eval_data", "is missing, and train_data has one item: none can be kept for evaluation"
        )
        raise ConfigError(complaints.problems)
    note = f"There is no eval_data: the last {kept:,} of {total:,} items are kept for evaluation ({kept / total:.0%})."
    return _part(train, 0, total - kept), _part(train, total - kept, kept), [note]


def try_items(train: Any, evaluation: Any, given: Given, where: str) -> list[str]:
    """Fetch and collate a few items: whether that works, what a batch holds, whether an item is the same twice.

    Returns what to tell. Raises ConfigError that names the line of the user's code, or what a batch may hold.
    """
    join = given.collate or default_collate
    advice = None if given.collate else "give collate, a function from a list of items to a batch"
    complaints = Complaints(where)
    for name, data in (("train_data", train), ("eval_data", evaluation)):
        with calling(f"{name}[0]", where=where):
            items = [data[0], data[min(1, len(data) - 1)]]
        with calling(f"making a batch of two items of {name}", advice, where):
            batch = join(items)
        _look_at(batch, name, complaints)
    with calling("train_data[0]", where=where):
        steady = _same(train[0], train[0])
    if given.epochs_differ:
        total = len(train)
        with calling(
            f"train_data[{total}], which with epochs_differ is item 0 of the second epoch,", where=where
        ):
            train[total]
    if complaints.problems:
        raise ConfigError(complaints.problems)
    if steady:
        return []
    return [
        "train_data[0] is another item each time it is asked for: a resumed run will not see the same data. Draw from "
        "a generator that is seeded with settings.seed and the index (with epochs_differ for another item each epoch)."
    ]


def check_workers(
    train: Any, evaluation: Any, collate: Collate | None, config: Config, complaints: Complaints
) -> None:
    """Complains when loader workers are wanted and the data cannot be sent to another process."""
    for key, workers, name, data in (
        ("loader.workers", config.loader.workers, "train_data", train),
        ("loader.eval_workers", config.loader.eval_workers, "eval_data", evaluation),
    ):
        if not workers:
            continue
        try:
            _Trial(_Nowhere(), pickle.HIGHEST_PROTOCOL).dump((data, collate))
        except Exception as error:  # noqa: BLE001  a user's __reduce__ may raise anything
            message = f"{name} or its collate cannot be sent to a worker process: {said(error)}"
            advice = "define classes and functions at the top of the module (no lambda), open files in __getitem__, "
            complaints.add(key, message, workers, suggestion=advice + f"or set {key} to 0")


def check_count(train: Any, config: Config, complaints: Complaints) -> None:
    """Complains when the training data is too small for one optimizer step."""
    batch, items = config.batch, len(train)
    if items < batch.items:
        key = "batch.micro" if batch.micro > items else "batch.accumulation"
        message = (
            f"one optimizer step takes {batch.items:,} items (micro {batch.micro} x accumulation "
            f"{batch.accumulation}), the training data holds {items:,}"
        )
        found = batch.micro if key == "batch.micro" else batch.accumulation
        complaints.add(key, message, found, f"micro x accumulation of at most {items:,}")


class _Trial(pickle.Pickler):
    """Pickles everything but the contents of tensors, which can always be sent."""

    def persistent_id(self, thing: object) -> str | None:
        return "tensor" if type(thing) is Tensor else None


class _Nowhere:
    def write(self, data: Any) -> int:
        return len(data)


def _gathering(data: Any, collate: Collate | None) -> Any:
    """A plain TensorDataset so that it makes whole batches; other data as it is."""
    return Tensors(data.tensors) if type(data) is TensorDataset and collate is None else data


def _part(data: Any, start: int, count: int) -> Dataset[Any]:
    if isinstance(data, Tensors):
        return Tensors([tensor[start : start + count] for tensor in data.tensors])
    gathers = all(hasattr(data, name) for name in ("batch", "to", "nbytes"))
    return (GatherPart if gathers else Part)(data, start, count)


def _look_at(batch: Batch, name: str, complaints: Complaints) -> None:
    """Complains unless a batch is made of tensors that can be moved to a card."""
    strange, some = None, False
    for leaf in _leaves(batch):
        some = some or (isinstance(leaf, Tensor) and leaf.ndim > 0)
        strange = strange if strange is not None or isinstance(leaf, _PLAIN) else type(leaf).__name__
    allowed = "a tensor, or a tuple, list or dict of them (collate can make it)"
    if strange is not None:
        complaints.add(
            name, f"a batch of it holds a {strange}, which cannot be moved to a card", allowed=allowed
        )
    elif not some:
        complaints.add(name, "a batch of it holds no tensor", allowed=allowed)


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, (list, tuple, dict)):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from _leaves(value)
    else:
        yield tree


def _same(one: Any, other: Any) -> bool:
    """Whether two items hold the same; what cannot be compared counts as the same."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and bool(((one == other) | ((one != one) & (other != other))).all())
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, (str, int, float)) and isinstance(other, (str, int, float)):
        return one == other or (one != one and other != other)
    return True
