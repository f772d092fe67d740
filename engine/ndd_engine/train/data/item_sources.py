"""Where batches come from: item sources, and streams.

Items are encoded for every batch, encoded once and cached, or gathered from tensors in memory; all of this creates the
same batches. Batches of an IterableDataset come from this process or from workers, with a position that a checkpoint
restores.
"""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Sampler, default_collate, get_worker_info

from ndd_engine.batches import leaves, map_tensors, tensors
from ndd_engine.config.schema import LoaderSection
from ndd_engine.errors import DoesNotFitError, TrainingError, UsageError, said, shortened
from ndd_engine.hardware.gpus import free_memory
from ndd_engine.text import size
from ndd_engine.train.checkpoint_state import kept_random, random_state, restore_random_state
from ndd_engine.workloads.base import (
    Batch,
    Collate,
    GatherDataset,
    GatherItems,
    Order,
    Stream,
    batch_size,
    has_state,
    items_at,
    seed_all,
)
from ndd_watch.switches import checked_places, same_item

from .order import ALONE, OwnRandom, Share, mixed

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
        step, checked = max(count // 20, 1), set(checked_places(count))
        for index in range(count):
            if index % step == 0:
                tell(f"encoding items once: {index:,} of {count:,}")
            items.append(data[index])
            if index in checked:
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


# Seconds between two copies of a worker's state; batches since the last copy are made again on a resume.
COPY_S = 0.25
_CPU = torch.device("cpu")
# Kinds of what a worker sends: a batch, the end of its part of the pass, and nothing (to keep the workers' turns).
_BATCH, _END, _NOTHING = 0, 1, 2
_Chunk = tuple[int, int, int, bytes | None, Any]  # kind, shard, items, pickled state, batch


def joined(
    items: Iterator[Any], order: Order, micro: int, join: Collate | None
) -> Iterator[tuple[int, Batch]]:
    """(number of items, batch) after batch of a stream. Raises what the stream or the collate function raises."""
    size = order.batch_size or micro
    if order.whole:
        for item in items:
            batch = item if join is None else join(item)
            yield (batch_size(batch) if any(tensor.ndim for tensor in tensors(batch)) else 1), batch
        return
    make = join or default_collate
    while part := list(islice(items, size)):
        if len(part) < size and order.drop_last:
            return
        batch = make(part)
        if batch is None:
            raise TypeError("the collate function returned None, not a batch")
        yield len(part), batch


def _holder(data: Any, iterator: Any) -> Any:
    """What has the position: the dataset, its iterator, or None."""
    return data if has_state(data) else iterator if has_state(iterator) else None


class _Reading:
    """A pass over a user's dataset, begun or continued from a state.

    fresh: the state may be the end of the pass before; if nothing follows it, the next pass begins.
    """

    def __init__(self, stream: Stream, saved: Any, number: int, fresh: bool = False) -> None:
        self._stream, self._fresh = stream, fresh and saved is not None
        data = stream.data
        if callable(set_epoch := getattr(data, "set_epoch", None)):
            set_epoch(number)
        if saved is not None:
            stream.forget()
            if has_state(data):
                data.load_state_dict(saved)
        self._iterator = stream.begin()
        if saved is not None and not has_state(data):
            self._iterator.load_state_dict(saved)  # type: ignore[attr-defined]

    def items(self) -> Iterator[Any]:
        """The items that are left of the pass."""
        for item in self._iterator:
            self._fresh = False
            yield item
        if self._fresh:
            self._iterator = self._stream.begin()
            yield from self._iterator

    def state(self) -> Any:
        """The state of the dataset or of its iterator, None if neither has one."""
        holder = _holder(self._stream.data, self._iterator)
        return None if holder is None else holder.state_dict()


class Shards(IterableDataset[Any]):
    """Inside each loader worker: its part of every pass, in chunks that carry the position.

    saved: for each worker, what `StreamOrder.state` has of it; for the first pass only. first: the worker whose turn
    it is. number: of the pass.
    """

    def __init__(self, stream: Stream, order: Order, micro: int, join: Collate | None, seed: int) -> None:
        self.stream, self.order, self.micro, self.join, self.seed = stream, order, micro, join, seed
        self.saved: list[dict[str, Any]] | None = None
        self.first = self.number = 0

    def __iter__(self) -> Iterator[_Chunk]:
        info = get_worker_info()
        shard = 0 if info is None else info.id
        saved = None if self.saved is None else self.saved[shard]
        first, number = self.first, self.number
        self.saved, self.first, self.number = None, 0, number + 1
        if shard < first:
            yield _NOTHING, shard, 0, None, None
        try:
            yield from self._pass(shard, number, saved)
        except Exception as error:
            raise_sendable(error)
            raise

    def _pass(self, shard: int, number: int, saved: dict[str, Any] | None) -> Iterator[_Chunk]:
        seed_all(mixed(mixed(self.seed, number), shard))
        if saved is None or saved["state"] is None:
            saved = _fresh()
        elif saved["ended"]:
            yield _END, shard, 0, _packed(saved["state"], None, True), None
            return
        reading = _Reading(self.stream, saved["state"], number, fresh=saved["random"] is None)
        if saved["random"] is not None:
            restore_random_state(saved["random"], _CPU)
        at = time.monotonic() - COPY_S
        skip = int(saved["since"])
        for count, batch in joined(reading.items(), self.order, self.micro, self.join):
            if skip:
                skip -= 1
                continue
            check_sendable(batch)
            blob = None
            if time.monotonic() - at >= COPY_S and (state := reading.state()) is not None:
                blob, at = _packed(state, random_state(_CPU), False), time.monotonic()
            yield _BATCH, shard, count, blob, batch
        yield _END, shard, 0, _packed(reading.state(), None, True), None


def _packed(state: Any, mine: Any, ended: bool) -> bytes:
    """A worker's state as bytes: as an object, the loader would pin its tensors."""
    return pickle.dumps({"state": state, "random": mine, "since": 0, "ended": ended})


class StreamOrder:
    """The batches of a stream, pass after pass, and the place in it; see IndexOrder for the attributes.

    In this process the position is the dataset's own. With workers, each worker sends copies of its state.
    """

    items = None
    per_pass = None

    def __init__(
        self,
        stream: Stream,
        order: Order,
        micro: int,
        join: Collate | None,
        seed: int,
        workers: int,
        isolated: bool = False,
    ) -> None:
        """isolated: in this process, too, the stream draws from random generators of its own. All ranks read it, and
        have to read the same.
        """
        self.stream, self.order, self.micro, self.join, self.seed = stream, order, micro, join, seed
        self.workers = workers
        self.passes = self.batches = self.made = 0
        self.epochs_differ = True
        self.shards = Shards(stream, order, micro, join, seed) if workers else None
        self._of: list[dict[str, Any]] | None = None  # by worker
        self._turn = 0
        self._reading: _Reading | None = None
        self._saved: Any = None
        self._isolated, self._random = isolated and not workers, OwnRandom(seed, False)
        self._compared = workers < 2
        self.position = "state" if _holder(stream.data, stream.first_iterator) is not None else "anew"

    # Passes.

    def begin(self, iterate: Callable[[], Iterator[Any]]) -> Iterator[Batch]:
        """A pass, or the rest of one after `load`. iterate: begins an iteration of the workers' loader."""
        if self.shards is None:
            return self._here()
        if self._of is None:
            self._of = [_fresh() for _ in range(self.workers)]
        for of in self._of:
            of["ended"] = of["ended"] and self.batches > 0
        self.shards.saved = [dict(of) for of in self._of]
        self.shards.first, self.shards.number = self._turn, self.passes
        return self._from_workers(self._distinct(iterate()))

    def _here(self) -> Iterator[Batch]:
        saved, self._saved = self._saved, None
        mine = self._random = OwnRandom(mixed(self.seed, self.passes), self._isolated)
        if self._isolated and saved is not None and saved["random"] is not None and self.batches:
            mine.load(saved["random"])
        with mine:
            state = None if saved is None else saved["state"]
            reading = self._reading = _Reading(self.stream, state, self.passes, fresh=not self.batches)
        batches = joined(reading.items(), self.order, self.micro, self.join)
        while True:
            with mine:
                found = next(batches, None)
            if found is None:
                return
            self.batches += 1
            self.made += found[0]
            yield found[1]

    def _from_workers(self, chunks: Iterator[_Chunk]) -> Iterator[Batch]:
        assert self._of is not None
        for kind, shard, count, blob, batch in chunks:
            if kind == _NOTHING:
                continue
            if blob is not None:
                self._of[shard] = pickle.loads(blob)
            elif kind == _BATCH:
                self._of[shard]["since"] += 1
            if kind == _END:
                continue
            self._turn = (shard + 1) % self.workers
            self.batches += 1
            self.made += count
            yield batch

    def _distinct(self, chunks: Iterator[_Chunk]) -> Iterator[_Chunk]:
        """The chunks, after looking at the first ones. Raises TrainingError if two workers send the same data."""
        if self._compared:
            return chunks
        self._compared = True
        first: deque[_Chunk] = deque()
        by_shard: dict[int, list[Any]] = {}
        for chunk in chunks:
            first.append(chunk)
            if chunk[0] == _BATCH:
                by_shard.setdefault(chunk[1], []).append(chunk[4])
            if len(first) >= 2 * self.workers:
                break
        sent = {shard: batches for shard, batches in by_shard.items() if len(batches) > 1}
        for one in sent:
            for other in sent:
                same = one < other and all(map(_same, sent[one], sent[other]))
                if same and not _same(*sent[one][:2]):  # data that is constant repeats nothing
                    kind = shortened(type(self.stream.data).__name__, 80)
                    raise TrainingError(
                        f"loader workers {one} and {other} return the same batches of {self.order.name}: each worker "
                        f"has a copy of {kind}, so its __iter__ has to return only the part of its worker, by "
                        "torch.utils.data.get_worker_info(); or set loader.workers (loader.eval_workers) to 0"
                    )
        return _chained(first, chunks)

    def restart(self) -> None:
        """Begin with the first pass again, as every evaluation does."""
        self.batches = self._turn = 0
        self._of = None

    def end_pass(self) -> None:
        """All batches of the pass were delivered."""
        self.passes += 1
        self.batches = self._turn = 0
        if self._of is not None:
            self._of = [{**of, "since": 0, "random": None} for of in self._of]

    # The position.

    def state(self) -> dict[str, Any]:
        """The position after the last delivered batch, for a checkpoint."""
        state = {"kind": "stream", "position": self.position, "passes": self.passes, "batches": self.batches,
                 "workers": self.workers, "turn": self._turn, "micro": self.micro}  # fmt: skip
        if self.position == "anew":
            return state
        if self.shards is not None:
            shards = self._of
            if shards is None:  # nothing was read yet: only whether a checkpoint can contain the state
                return {**state, "shards": None, "first": self._first_state()}
            return {**state, "shards": [dict(of) for of in shards]}
        mine = self._random.state() if self._isolated else None
        now = self._first_state() if self._reading is None else self._reading.state()
        return {**state, "stream": now, "random": mine}

    def _first_state(self) -> Any:
        data = self.stream.data
        return data.state_dict() if has_state(data) else None

    def load(self, state: dict[str, Any]) -> None:
        """Continue at a position that `state` returned; a stream without a state starts its pass again."""
        self.passes = int(state["passes"])
        self.batches = self._turn = 0
        self._of, self._saved = None, None
        if self.position == "anew":
            return
        self.batches, self._turn = int(state["batches"]), int(state["turn"])
        if self.shards is not None:
            self._of = None if state["shards"] is None else [dict(of) for of in state["shards"]]
        else:
            self._saved = {"state": state["stream"], "random": state.get("random")}

    def sample(self, items: int | None = None) -> Batch:
        """The first micro-batch of the stream, or a batch of `items` items that repeats them."""
        order, count = self.order, items or self.micro
        found = self.stream.peek(1 if order.whole else self.micro)
        if not found:
            raise TrainingError(f"{order.name} is empty: its __iter__ yields nothing")
        if not order.whole:
            found = (found * -(-count // len(found)))[:count]
            return (self.join or default_collate)(found)
        batch = found[0] if self.join is None else self.join(found[0])
        return resized(batch, count)


def resized(batch: Batch, count: int) -> Batch:
    """A batch of `count` items made of those of another one, along the first dimension."""
    size = batch_size(batch)
    if size == count:
        return batch
    places = torch.arange(count) % size

    def pick(tensor: Tensor) -> Tensor:
        return tensor[places] if tensor.ndim and tensor.shape[0] == size else tensor

    return map_tensors(batch, pick)


def _chained(first: deque[_Chunk], rest: Iterator[_Chunk]) -> Iterator[_Chunk]:
    while first:
        yield first.popleft()
    yield from rest


def _fresh() -> dict[str, Any]:
    return {"state": None, "random": None, "since": 0, "ended": False}


def _same(one: Batch, other: Batch) -> bool:
    pairs = list(zip(tensors(one), tensors(other), strict=False))
    return bool(pairs) and all(a.shape == b.shape and bool((a == b).all()) for a, b in pairs)
