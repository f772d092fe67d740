"""How items become batches: the order that a factory asks for, and streams whose items have no index."""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from torch.utils.data import (
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from ndd_engine.errors import shortened

RANDOM = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
# Samplers whose indices depend only on their generator and the number of the pass.
_EXACT = (SequentialSampler, DistributedSampler, *RANDOM)


@dataclass(frozen=True)
class Order:
    """The order and the batches of training or evaluation data, as torch's DataLoader names them.

    shuffle: a new order in every pass; without it, the order of the dataset. sampler: an iterable of indices.
    batch_sampler: an iterable of lists of indices. generator: the DataLoader's. batch_size: items of a batch; None:
    `batch.micro`. whole: the items of a stream are batches (batch_size=None). drop_last: leave out an incomplete last
    batch. worker_init_fn: called in each loader worker with its number. name: of the data in messages ("train_data").
    """

    shuffle: bool = True
    sampler: Any = None
    batch_sampler: Any = None
    generator: Any = None
    batch_size: int | None = None
    whole: bool = False
    drop_last: bool = True
    worker_init_fn: Callable[[int], Any] | None = None
    name: str = "train_data"

    @property
    def chosen(self) -> Any:
        """The sampler or batch sampler; None if there is neither."""
        return self.sampler if self.batch_sampler is None else self.batch_sampler

    @property
    def title(self) -> str:
        """The sampler in a message: "batch_sampler Buckets"."""
        kind = shortened(type(self.chosen).__name__, 80)
        return f"{'sampler' if self.batch_sampler is None else 'batch_sampler'} {kind}"


class Stream(IterableDataset[Any]):
    """A user's IterableDataset. Its first items may be looked at without losing them for the first pass.

    in_workers: loader workers read it, each from a copy of its own. again: every pass starts where the first one did
    (an evaluation), also after one that was ended early.
    """

    def __init__(self, data: Any, in_workers: bool = False, again: bool = False) -> None:
        self.data, self.in_workers = data, in_workers
        self._start = [copy.deepcopy(data.state_dict())] if again and has_state(data) else None
        self._first: list[Any] = []
        self._rest: Iterator[Any] | None = None
        # Of the items that were looked at: nanoseconds of wall and of CPU time, and their number.
        self.spent = (0, 0, 0)

    def peek(self, count: int) -> list[Any]:
        """Up to `count` first items. Raises what the stream raises. Call it before the first pass only."""
        missing = count - len(self._first)
        if missing > 0:
            if self._rest is None:
                # Reading a stream can change it, and the workers' copies have to start at its beginning.
                data = pickle.loads(pickle.dumps(self.data)) if self.in_workers else self.data
                self._rest = iter(data)
            begin, begin_cpu, before = time.perf_counter_ns(), time.thread_time_ns(), len(self._first)
            self._first += islice(self._rest, missing)
            wall, cpu, items = self.spent
            cpu += time.thread_time_ns() - begin_cpu
            self.spent = (wall + time.perf_counter_ns() - begin, cpu, items + len(self._first) - before)
        return self._first[:count]

    @property
    def first_iterator(self) -> Iterator[Any] | None:
        """The iterator that `peek` read from, None if nothing was looked at."""
        return self._rest

    def forget(self) -> None:
        """Drop the items that were looked at: the stream continues from a loaded state."""
        self._first, self._rest = [], None

    def begin(self) -> Iterator[Any]:
        """An iterator over a pass in this process: of the dataset itself, after the items that were looked at."""
        first, rest = self._first, self._rest
        self.forget()
        if rest is None or self.in_workers:
            if self._start is not None:
                self.data.load_state_dict(copy.deepcopy(self._start[0]))
            return iter(self.data)
        return chain(first, rest) if first else rest

    def __iter__(self) -> Iterator[Any]:
        return self.begin()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_first": [], "_rest": None}


def has_state(thing: object) -> bool:
    """Whether an object can save and restore its position: torch's convention of state_dict and load_state_dict."""
    return all(callable(getattr(thing, name, None)) for name in ("state_dict", "load_state_dict"))


def item_count(data: Any) -> int | None:
    """The number of items of a dataset; None for a stream, whose length is unknown."""
    return None if isinstance(data, Stream) else len(data)


def position(order: Order) -> str:
    """How a resumed run finds its place in the order.

    "replay": the pass is drawn again up to it. "state": the sampler restores it. "anew": the pass starts again.
    """
    chosen = order.chosen
    if chosen is None or isinstance(chosen, (list, tuple, range)):
        return "replay"
    if has_state(chosen):
        return "state"
    return "replay" if type(chosen) in _EXACT else "anew"
