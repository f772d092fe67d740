"""The items of a user's own datasets: split for evaluation, checked once, and ready for the loader."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset, default_collate

from ndd_engine.batches import leaves, tensors
from ndd_engine.config.schema import Config
from ndd_engine.errors import said
from ndd_watch.caching import same_item

from .base import Batch, Collate, GatherItems, batch_size, items_at
from .order import Order, Stream
from .own_module import calling
from .own_order import restarts
from .own_result import FactoryResult
from .problems import Problems

EVAL_SHARE = 0.1
_PLAIN = (Tensor, str, bytes, int, float, complex, type(None))


class GatherTensors(GatherItems):
    """A TensorDataset that makes a batch in one gather; items are tuples and batches lists, as in torch."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tuple(tensors)

    def __len__(self) -> int:
        return int(self.tensors[0].shape[0])

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(tensor[index] for tensor in self.tensors)

    def batch(self, indices: Tensor) -> list[Tensor]:
        return [tensor[indices] for tensor in self.tensors]


class DatasetSlice(Dataset[Any]):
    """`count` items of a dataset from `start` on, in every epoch of one whose items change each epoch."""

    def __init__(self, data: Any, start: int, count: int) -> None:
        self.data, self.start, self.count = data, start, count
        self._whole = len(data)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.data[self._index(index)]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return items_at(self.data, [self._index(index) for index in indices])

    def _index(self, index: int) -> int:
        epoch, item = divmod(index, self.count)
        return epoch * self._whole + self.start + item


class GatherSlice(DatasetSlice):
    """A slice of a dataset that makes whole batches."""

    def batch(self, indices: Tensor) -> Batch:
        return self.data.batch(indices + self.start)

    def to(self, device: torch.device) -> GatherSlice:
        """The same items on another device, with the whole dataset that they belong to."""
        return GatherSlice(self.data.to(device), self.start, self.count)

    @property
    def nbytes(self) -> int:
        return int(self.data.nbytes)


def train_and_eval(result: FactoryResult, where: str, config: Config) -> tuple[Any, Any, list[str]]:
    """(training data, evaluation data, notes). Without eval_data, the last items of train_data become it.

    An IterableDataset becomes a Stream. Raises ConfigError if train_data has only one item.
    """
    loader = config.loader
    train = _read(result.train_data, result.collate, loader.workers > 0)
    if result.eval_data is not None:
        return train, _read(result.eval_data, result.collate, loader.eval_workers > 0, evaluates=True), []
    total, problems = len(train), Problems(where)
    kept = max(int(total * EVAL_SHARE), 1)
    if kept >= total:
        message = "is missing, and train_data has only one item, so none can be kept for evaluation"
        problems.add("eval_data", message, suggestion="add eval_data, or more items")
        problems.check()
    note = f"Without eval_data, the last {kept:,} of {total:,} items are kept for evaluation ({kept / total:.0%})."
    return _slice(train, 0, total - kept), _slice(train, total - kept, kept), [note]


def try_items(train: Any, evaluation: Any, result: FactoryResult, where: str, config: Config) -> list[str]:
    """Fetches and collates a few items, and returns notes about what a resumed run will not see again.

    Raises ConfigError that names the line of the user's code, or the allowed contents of a batch.
    """
    join = result.collate or default_collate
    advice = None if result.collate else "add collate, a function from a list of items to a batch"
    problems = Problems(where)
    for name, data, order in (
        ("train_data", train, result.order),
        ("eval_data", evaluation, result.eval_order),
    ):
        whole = isinstance(data, Stream) and order is not None and order.whole
        if isinstance(data, Stream):
            with calling(f"reading the first items of {name}", where=where):
                items = data.peek(1 if whole else min(2, config.batch.micro))
            if not items:
                problems.add(name, "is empty: its __iter__ yields nothing", allowed="at least one item")
                continue
        else:
            with calling(f"{name}[0]", where=where):
                items = [data[0], data[min(1, len(data) - 1)]]
        with calling(f"collating two items of {name}", advice, where):
            batch = (result.collate or _as_it_is)(items[0]) if whole else join(items)
        _check_batch(batch, name, "change" if result.collate else "add", problems)
        micro = config.batch.micro
        if whole and name == "train_data" and not problems.found and (count := batch_size(batch)) != micro:
            message = f"yields batches of {count} items, but batch.micro is {micro}"
            problems.add(
                name, message, suggestion=f"set batch.micro = {count}, or yield batches of settings.micro"
            )
    if isinstance(train, Stream):
        if result.epochs_differ:
            message = "cannot be used with an IterableDataset, whose items have no index"
            problems.add("epochs_differ", message, suggestion="remove it")
        problems.check()
        note = restarts(result.order, train, train.first_iterator)
        return [note] if note else []
    with calling("train_data[0]", where=where):
        steady = same_item(torch, train[0], train[0], unknown=True)
    if result.epochs_differ:
        total = len(train)
        with calling(f"train_data[{total}] (epochs_differ: item 0 of the second epoch)", where=where):
            train[total]
    problems.check()
    notes = [note] if (note := restarts(result.order, train)) else []
    if result.order is not None and result.order.batch_sampler is not None:
        notes.append(
            f"The {result.order.title} decides the number of items of each batch; batch.micro = {config.batch.micro} "
            "is used for predictions and for the test step only."
        )
    if steady:
        return notes
    return [
        *notes,
        "train_data[0] is a different item each time, so a resumed run will not see the same data. Draw random numbers "
        "from a generator seeded with settings.seed and the index; if items change every epoch, set epochs_differ.",
    ]


def _as_it_is(batch: Batch) -> Batch:
    return batch


def _read(data: Any, collate: Collate | None, in_workers: bool, evaluates: bool = False) -> Any:
    if isinstance(data, IterableDataset):
        return Stream(data, in_workers, again=evaluates)
    return _gathering(data, collate)


def check_workers(
    train: Any,
    evaluation: Any,
    collate: Collate | None,
    config: Config,
    problems: Problems,
    orders: tuple[Order | None, Order | None] = (None, None),
) -> None:
    """Adds a problem if loader workers are configured and the data cannot be pickled for them."""
    for key, workers, name, data, order in (
        ("loader.workers", config.loader.workers, "train_data", train, orders[0]),
        ("loader.eval_workers", config.loader.eval_workers, "eval_data", evaluation, orders[1]),
    ):
        if not workers:
            continue
        try:
            _PickleCheck(_NullFile(), pickle.HIGHEST_PROTOCOL).dump(
                (data, collate, order and order.worker_init_fn)
            )
        except Exception as error:  # noqa: BLE001  a user's __reduce__ may raise anything
            message = f"{name} or its collate function cannot be pickled for a worker process: {said(error)}"
            advice = "define classes and functions at the top level of the module (no lambda)"
            advice += f" and open files in __getitem__, or set {key} to 0"
            problems.add(key, message, workers, suggestion=advice)


class _PickleCheck(pickle.Pickler):
    """Pickles everything except the contents of tensors, which can always be pickled."""

    def persistent_id(self, thing: object) -> str | None:
        return "tensor" if type(thing) is Tensor else None


class _NullFile:
    def write(self, data: Any) -> int:
        return len(data)


def _gathering(data: Any, collate: Collate | None) -> Any:
    """A plain TensorDataset as GatherTensors; other data unchanged."""
    return GatherTensors(data.tensors) if type(data) is TensorDataset and collate is None else data


def _slice(data: Any, start: int, count: int) -> Dataset[Any]:
    if isinstance(data, GatherTensors):
        return GatherTensors([tensor[start : start + count] for tensor in data.tensors])
    gathers = all(hasattr(data, name) for name in ("batch", "to", "nbytes"))
    return (GatherSlice if gathers else DatasetSlice)(data, start, count)


def _check_batch(batch: Batch, name: str, verb: str, problems: Problems) -> None:
    """Adds a problem unless a batch consists of tensors that can be moved to the GPU."""
    wrong = next((type(leaf).__name__ for leaf in leaves(batch) if not isinstance(leaf, _PLAIN)), None)
    allowed = "a tensor, or a tuple, list or dict of tensors"
    advice = f"{verb} collate, a function from a list of items to such a batch"
    if wrong is not None:
        message = f"a batch contains a {wrong}, which cannot be moved to the GPU"
        problems.add(name, message, allowed=allowed, suggestion=advice)
    elif not any(tensor.ndim for tensor in tensors(batch)):
        problems.add(name, "a batch contains no tensor", allowed=allowed, suggestion=advice)
