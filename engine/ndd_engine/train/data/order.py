"""The order of items: a user's own sampler with its position, the share of each rank, and a checksum of the data."""

from __future__ import annotations

import copy
import ctypes
import random
import sys
import time
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from operator import index as as_index
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from ndd_engine.batches import tensors
from ndd_engine.errors import TrainingError, shortened
from ndd_engine.train.checkpoint_state import random_state, restore_random_state
from ndd_engine.workloads.base import RANDOM, Order, position

T = TypeVar("T")


@dataclass(frozen=True)
class Share:
    """This rank's share: rank of `of` ranks."""

    rank: int = 0
    of: int = 1

    def dealt(self, batches: Iterable[T], accumulation: int) -> Iterator[T]:
        """This rank's batches of whole steps; reads those of the other ranks, too."""
        everything = iter(batches)
        group = self.of * accumulation
        while len(step := list(islice(everything, group))) == group:
            yield from step[self.rank :: self.of]


ALONE = Share()


# Seconds between two copies of a sampler's state; batches drawn since the last copy are drawn again on a resume.
COPY_S = 0.25
_CPU = torch.device("cpu")


def mixed(seed: int, epoch: int) -> int:
    """A seed for one pass. With seed + epoch, neighbouring (seed, epoch) pairs would share an order."""
    return (seed * 0x9E3779B97F4A7C15 + epoch * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) % (2**63)


def length(order: Order, items: int, micro: int) -> int | None:
    """Micro-batches of a pass; None if the sampler has no len(). Raises what len() raises."""
    if order.batch_sampler is not None:
        return _length(order.batch_sampler)
    count = items if order.sampler is None else _length(order.sampler)
    if count is None:
        return None
    size = order.batch_size or micro
    return count // size if order.drop_last else -(-count // size)


def _length(thing: Any) -> int | None:
    if not hasattr(type(thing), "__len__"):
        return None
    try:
        return len(thing)
    except (TypeError, NotImplementedError):  # as torch does for samplers without a length
        return None


@dataclass(frozen=True)
class _Copy:
    """The state of a sampler after it drew some batches: its own, its generators', and the global generators'."""

    sampler: Any
    generators: list[Tensor]
    random: dict[str, Any]


class IndexOrder(Sampler[list[int]]):
    """The index lists of one pass after another; the position counts the batches that were delivered, not drawn.

    passes: passes done. batches: micro-batches delivered in the present pass, to all ranks. made: items delivered since
    the process started, to all ranks. share: of this rank, which counts in whole steps of `accumulation` micro-batches.
    The global random generators that a sampler of the user's own draws from are its own, seeded by `run.seed` and the
    number of the pass, so that neither the model nor the number of workers changes the order.
    """

    def __init__(
        self,
        order: Order,
        items: int,
        micro: int,
        seed: int,
        epochs_differ: bool = False,
        share: Share = ALONE,
        accumulation: int = 1,
    ) -> None:
        self.order, self.items, self.micro, self.seed = order, items, micro, seed
        self.epochs_differ, self.share = epochs_differ, share
        self._group = share.of * accumulation if share.of > 1 else 1
        self.position = position(order)
        self.per_pass = length(order, items, micro)
        self.passes = self.batches = self.made = 0
        self._isolated = order.chosen is not None and self.position != "replay"
        self._generators = _generators(order)
        # torch's random samplers without a generator: they would draw a seed from the model's.
        self._seeded = [
            sampler
            for sampler in _samplers(order.chosen)
            if type(sampler) in RANDOM and getattr(sampler, "generator", None) is None
        ]
        self._drawn: deque[tuple[int, _Copy | None, int]] = deque()
        self._begin: list[Tensor] = [generator.get_state() for generator in self._generators]
        self._at: tuple[_Copy | None, int] = (None, 0)  # the copy before the place, and the batches since
        self._loaded: dict[str, Any] | None = None

    def start(self) -> None:
        """Begin a pass, or the rest of one after `load`, with the next iteration."""
        self._drawn.clear()

    def delivered(self) -> None:
        """The next batch that was drawn has been delivered."""
        count, copied, since = self._drawn.popleft()
        self.batches += self.share.of
        self.made += count
        self._at = copied, since

    def end_pass(self) -> None:
        """All batches of the pass were delivered."""
        self.passes += 1
        self.batches = 0
        self._at = (None, 0)
        self._begin = [generator.get_state() for generator in self._generators]

    def __len__(self) -> int:
        if self.per_pass is None:
            raise TypeError("the length is unknown")
        return self.per_pass

    def __iter__(self) -> Iterator[list[int]]:
        return self._pass()

    def tensors(self) -> Iterator[Tensor]:
        """The same lists as tensors (B,) int64."""
        for indices in self:
            yield torch.tensor(indices)

    # A pass.

    def _pass(self) -> Iterator[list[int]]:
        loaded, self._loaded = self._loaded, None  # torch asks for several iterators and uses the last
        number, chosen = self.passes, self.order.chosen
        mine = OwnRandom(mixed(self.seed, number), self._isolated)
        for sampler in self._seeded:
            sampler.generator = torch.Generator().manual_seed(mixed(self.seed, number))
        if callable(set_epoch := getattr(chosen, "set_epoch", None)):
            set_epoch(number)
        skip = drawn = since = 0
        copied: _Copy | None = None
        group: list[list[int]] = []
        inside = fresh = False
        if loaded is not None:
            for generator, state in zip(self._generators, loaded["generators"], strict=True):
                generator.set_state(state)
            if self.position == "replay":
                skip = self.batches
            elif self.position == "state":
                skip, copied = (
                    loaded["since"],
                    _Copy(loaded["sampler"], loaded["generators"], loaded["random"]),
                )
                inside, fresh, drawn = self.batches > 0, self.batches == 0, self.batches - skip
                if inside:
                    mine.load(loaded["random"])
                with mine:
                    chosen.load_state_dict(loaded["sampler"])
        with mine:
            lists = self._lists()
            if not inside and self.order.generator is not None:
                # torch's DataLoader draws the seed of its workers from its generator, before the sampler draws.
                torch.empty((), dtype=torch.int64).random_(generator=self.order.generator)
        at = time.monotonic() - COPY_S
        while True:
            with mine:
                found = next(lists, None)
                if found is None and fresh and not drawn:
                    # The saved state is the end of the pass before.
                    fresh, lists = False, self._lists()
                    continue
            if (indices := self._checked(found, drawn)) is None:
                return
            drawn += 1
            since += 1
            if skip:
                skip -= 1
                continue
            if self.position == "state" and time.monotonic() - at >= COPY_S:
                copied, since, at = self._copy(mine), 0, time.monotonic()
            if self.epochs_differ:
                indices = [index + number * self.items for index in indices]
            group.append(indices)
            if len(group) < self._group:
                continue  # the batches of a step are dealt to the ranks together; an incomplete one is left out
            dealt = group[self.share.rank :: self.share.of]
            items, group = sum(map(len, group)), []
            for place, indices in enumerate(dealt, 1):
                # All items of the step count with its last batch, and so does the place in the order.
                self._drawn.append((items if place == len(dealt) else 0, copied, since))
                yield indices

    def _checked(self, found: Any, drawn: int) -> list[int] | None:
        """A list of indices; None at the end of the pass. Raises TrainingError for what is no list of valid indices."""
        title, promised = self.order.title, self.per_pass
        if found is None:
            if promised is not None and drawn < promised:
                text = (
                    f"the {title} ended after {drawn:,} of the {promised:,} batches that its len() promises"
                )
                raise TrainingError(f"{text}: make len() and the iteration agree")
            return None
        if promised is not None and drawn >= promised:
            text = f"the {title} yields more than the {promised:,} batches that its len() promises"
            raise TrainingError(f"{text}: remove __len__ if it is endless")
        try:
            indices = list(map(as_index, found))
        except TypeError:
            what = "whole numbers as indices" if self.order.batch_sampler is None else "a list of indices"
            raise TrainingError(f"the {title} yielded {shortened(repr(found), 80)}, not {what}") from None
        if not indices:
            raise TrainingError(f"the {title} yielded an empty list of indices")
        if min(indices) < 0 or max(indices) >= self.items:
            bad = next(index for index in indices if not 0 <= index < self.items)
            text = f"the {title} yielded the index {bad}, but {self.order.name} has {self.items:,} items"
            raise TrainingError(f"{text} (0 to {self.items - 1:,})")
        return indices

    def _lists(self) -> Iterator[Any]:
        order = self.order
        if order.batch_sampler is not None:
            return iter(order.batch_sampler)
        return _batched(self._single(), order.batch_size or self.micro, order.drop_last)

    def _single(self) -> Iterator[Any]:
        """Index after index of a pass."""
        if self.order.sampler is not None:
            yield from self.order.sampler
        elif self.order.shuffle:
            generator = torch.Generator().manual_seed(mixed(self.seed, self.passes))
            yield from torch.randperm(self.items, generator=generator).tolist()
        else:
            yield from range(self.items)

    # The position.

    def _copy(self, mine: OwnRandom) -> _Copy:
        sampler = copy.deepcopy(self.order.chosen.state_dict())
        generators = [generator.get_state() for generator in self._generators]
        return _Copy(sampler, generators, mine.state())

    def state(self) -> dict[str, Any]:
        """The position after the last delivered batch, for a checkpoint."""
        copied, since = self._at
        state = {"kind": self.position, "passes": self.passes, "batches": self.batches, "since": since,
                 "micro": self.micro}  # fmt: skip
        if copied is not None:
            more = {"sampler": copied.sampler, "generators": copied.generators, "random": copied.random}
            return {**state, **more}
        sampler = None
        if self.position == "state" and not self.batches:
            sampler = copy.deepcopy(self.order.chosen.state_dict())
        mine = random_state(_CPU) if sampler is not None else None
        return {**state, "sampler": sampler, "generators": self._begin, "random": mine}

    def load(self, state: dict[str, Any]) -> None:
        """Continue at a position that `state` returned; "anew" starts its pass again."""
        self._loaded = state
        self._drawn.clear()
        self.passes = int(state["passes"])
        self.batches = 0 if self.position == "anew" else int(state["batches"])
        self._begin = list(state["generators"])
        self._at = (None, 0)
        if state["sampler"] is not None:
            self._at = _Copy(state["sampler"], self._begin, state["random"]), int(state["since"])


class OwnRandom:
    """The global random generators as a sampler or a stream sees them: its own inside `with`, if `isolated`."""

    def __init__(self, seed: int, isolated: bool) -> None:
        self._isolated, self._seed = isolated, seed
        self._mine: tuple[Any, ...] | None = None

    def __enter__(self) -> None:
        if not self._isolated:
            return
        self._theirs = _raw()
        if self._mine is None:
            torch.default_generator.manual_seed(self._seed)
            random.seed(self._seed)
            if (numpy := sys.modules.get("numpy")) is not None:
                numpy.random.seed(self._seed % 2**32)
        else:
            _put(self._mine)

    def __exit__(self, *_: object) -> None:
        if self._isolated:
            self._mine = _raw()
            _put(self._theirs)

    def load(self, state: dict[str, Any] | None) -> None:
        """Continue with a state that `state` returned."""
        if state is not None:
            theirs = _raw()
            restore_random_state(state, _CPU)
            self._mine = _raw()
            _put(theirs)

    def state(self) -> dict[str, Any]:
        """The generators for a checkpoint."""
        theirs = _raw()
        if self._mine is not None:
            _put(self._mine)
        found = random_state(_CPU)
        _put(theirs)
        return found


def _raw() -> tuple[Any, ...]:
    """The global generators, faster than `random_state`: it is read for every batch."""
    numpy = sys.modules.get("numpy")
    return torch.get_rng_state(), random.getstate(), None if numpy is None else numpy.random.get_state()


def _put(state: tuple[Any, ...]) -> None:
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    if state[2] is not None:
        sys.modules["numpy"].random.set_state(state[2])


def _batched(single: Iterator[Any], size: int, drop_last: bool) -> Iterator[list[Any]]:
    while batch := list(islice(single, size)):
        if len(batch) < size and drop_last:
            return
        yield batch


def _generators(order: Order) -> list[torch.Generator]:
    """The generators that the order draws from: the DataLoader's, and those that the samplers hold."""
    found: list[torch.Generator] = []
    for thing in (order.generator, *_samplers(order.chosen)):
        values = (
            (thing,)
            if isinstance(thing, torch.Generator)
            else vars(thing).values()
            if thing is not None
            else ()
        )
        for value in values:
            if isinstance(value, torch.Generator) and not any(value is known for known in found):
                found.append(value)
    return found


def _samplers(thing: Any) -> list[Any]:
    """A sampler and those that it is made of."""
    if not isinstance(thing, Sampler) and not hasattr(thing, "__dict__"):
        return []
    inner = [value for value in vars(thing).values() if isinstance(value, Sampler)]
    return [thing, *(deep for value in inner for deep in _samplers(value))]


# Bytes of a tensor that its checksum covers wholly, and the number of blocks that it covers of a larger one.
WHOLE_BYTES = 16 << 20
BLOCKS = 16


def checksum(
    data: Dataset[Any] | list[Any], items: int, looked_at: int = 16, limit: int = WHOLE_BYTES
) -> int:
    """CRC-32 of evenly spread items.

    Of a tensor above `limit` bytes it covers evenly spread blocks and the size.
    """
    crc = 0
    looked_at = min(items, looked_at)
    for index in (place * items // looked_at for place in range(looked_at)):
        for tensor in tensors(data[index]):
            if tensor.numel():
                plain = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
                if plain.numel() > limit:
                    crc = zlib.crc32(plain.numel().to_bytes(8, "little"), crc)
                    block = limit // BLOCKS
                    last = plain.numel() - block
                    parts = [plain[place * last // (BLOCKS - 1) :][:block] for place in range(BLOCKS)]
                else:
                    parts = [plain]
                for part in parts:
                    # The tensor's own memory: copying it to a list takes 40 ms per megabyte.
                    crc = zlib.crc32((ctypes.c_ubyte * part.numel()).from_address(part.data_ptr()), crc)
    return crc
