"""A model of CUDA's caching allocator: what a sequence of requests reserves on a card, without a card.

It follows the native back end on one stream, as in c10/cuda/CUDACachingAllocator.cpp and
c10/core/AllocatorConfig.h of torch 2.13. What it leaves out: CUDA graphs and compiled graphs, which keep pools of
their own, and requests from several streams. `Rules` are the constants; they drift between versions, so that a
prediction is trusted only after a recorded step was replayed and compared (see `Prober._self_check`).
"""

from __future__ import annotations

import os
import re
from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field

KIB, MIB = 1 << 10, 1 << 20
MIN_BLOCK = 512
SMALL_SIZE = MIB
SMALL_SEGMENT = 2 * MIB
MIN_LARGE_SEGMENT = 10 * MIB
ROUND_LARGE = 2 * MIB
UNLIMITED = 1 << 62


class SimulatedOutOfMemoryError(Exception):
    """A request that does not fit under the cap, even with all that is cached given back. Sizes in bytes."""

    def __init__(self, requested: int, reserved: int, cap: int) -> None:
        super().__init__(f"{requested:,} bytes requested, {reserved:,} of {cap:,} reserved")
        self.requested, self.reserved, self.cap = requested, reserved, cap


@dataclass(frozen=True)
class Rules:
    """What the allocator can be told by PYTORCH_CUDA_ALLOC_CONF. Bytes.

    large_segment: of a new segment for requests below 10 MiB. max_split: blocks from this size on are not split.
    expandable: one growing segment a pool. divisions: sizes are rounded up to so many parts of a power of two; 0 for
    multiples of 512 bytes.
    """

    large_segment: int = 20 * MIB
    max_split: int = UNLIMITED
    expandable: bool = False
    divisions: int = 0

    @classmethod
    def of_environment(cls, text: str | None = None) -> Rules:
        """As the environment has them. What it says of other matters, or wrongly, is left to torch to complain of."""
        if text is None:
            text = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
        options = dict(re.findall(r"(\w+)\s*:\s*([^,\[\]]+)", text))

        def number(name: str, default: int, unit: int) -> int:
            value = options.get(name, "").strip()
            return int(value) * unit if value.isdigit() else default

        return cls(
            large_segment=number("large_segment_size_mb", cls.large_segment, MIB),
            max_split=number("max_split_size_mb", cls.max_split, MIB),
            expandable=options.get("expandable_segments", "").strip().lower() == "true",
            divisions=number("roundup_power2_divisions", cls.divisions, 1),
        )

    def rounded(self, size: int) -> int:
        """Bytes that a request takes of a block."""
        if size < MIN_BLOCK:
            return MIN_BLOCK
        if self.divisions > 1 and size > MIN_BLOCK * self.divisions:
            power = 1 << (size.bit_length() - 1)
            step = power // self.divisions
            return power + -(-(size - power) // step) * step
        return -(-size // MIN_BLOCK) * MIN_BLOCK

    def segment(self, size: int) -> int:
        """Bytes that are asked of the driver for a request of `size` (rounded) bytes."""
        if size <= SMALL_SIZE:
            return SMALL_SEGMENT
        if size < MIN_LARGE_SEGMENT:
            return self.large_segment
        return -(-size // ROUND_LARGE) * ROUND_LARGE


@dataclass(eq=False, slots=True)
class Block:
    """A stretch of a segment. address: orders blocks of the same size; before, after: its neighbours in the segment."""

    size: int
    address: int
    small: bool
    free: bool = True
    before: Block | None = None
    after: Block | None = None


@dataclass
class Allocator:
    """Takes requests one after the other. cap: bytes that may be reserved, None for no limit.

    reserved, active, requested: bytes now, held of the driver, in blocks that are in use, and asked for. retries:
    requests that were met only after cached segments had been given back.
    """

    rules: Rules = field(default_factory=Rules)
    cap: int | None = None
    reserved: int = 0
    active: int = 0
    requested: int = 0
    peak_reserved: int = 0
    retries: int = 0
    segments: int = 0

    def __post_init__(self) -> None:
        # Free blocks by pool (small or not), ordered by size and address.
        self._free: dict[bool, list[tuple[int, int, Block]]] = {True: [], False: []}
        self._live: dict[int, tuple[Block, int]] = {}
        # Of expandable segments, the last block of each pool.
        self._tail: dict[bool, Block | None] = {True: None, False: None}
        self._next_address = 1

    def allocate(self, key: int, size: int) -> None:
        """A request of `size` bytes, known as `key` until it is freed; none for 0 bytes. Raises OutOfMemoryError."""
        if size <= 0:
            return
        rounded = self.rules.rounded(size)
        small = rounded <= SMALL_SIZE
        block = self._found(small, rounded) or self._grown(small, rounded)
        if block is None and self._released():
            self.retries += 1
            block = self._grown(small, rounded)
        if block is None:
            raise SimulatedOutOfMemoryError(size, self.reserved, self.cap or 0)
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        block = self._split(block, rounded)
        block.free = False
        self._live[key] = block, size
        self.active += block.size
        self.requested += size

    def free(self, key: int) -> None:
        """What was requested as `key` is not needed any more; unknown keys are left alone."""
        known = self._live.pop(key, None)
        if known is None:
            return
        block, size = known
        self.active -= block.size
        self.requested -= size
        block.free = True
        self._merge(block)
        self._put(block)

    def replay(self, events: Iterable[tuple[int, int]]) -> Allocator:
        """(key, size) for a request, (key, -1) for its end, one after the other. Raises OutOfMemoryError."""
        for key, size in events:
            if size < 0:
                self.free(key)
            else:
                self.allocate(key, size)
        return self

    # Blocks.

    def _found(self, small: bool, size: int) -> Block | None:
        """The smallest free block that holds it, the lowest address first."""
        pool = self._free[small]
        place = bisect_left(pool, (size, 0))
        if place == len(pool):
            return None
        if self.rules.expandable and pool[place][2] is self._tail[small] and place + 1 < len(pool):
            # The last block can grow: it counts as the largest of all.
            place += 1
        block = pool[place][2]
        limit = self.rules.max_split
        if (size < limit <= block.size) or (size >= limit and block.size >= size + self.rules.large_segment):
            return None
        del pool[place]
        return block

    def _grown(self, small: bool, size: int) -> Block | None:
        """A block of memory that was not reserved before; None where the cap is in the way."""
        if self.rules.expandable:
            return self._expanded(small, size)
        segment = self.rules.segment(size)
        if self._beyond(segment):
            return None
        self.reserved += segment
        self.segments += 1
        block = Block(segment, self._next_address, small)
        self._next_address += segment + (1 << 30)
        return block

    def _expanded(self, small: bool, size: int) -> Block | None:
        page = SMALL_SEGMENT if small else self.rules.large_segment
        tail = self._tail[small]
        free = tail if tail is not None and tail.free else None
        added = -(-(size - (free.size if free else 0)) // page) * page
        if self._beyond(added):
            return None
        self.reserved += added
        if free is not None:
            self._take(free)
            free.size += added
            return free
        if tail is None:
            self.segments += 1
            block = Block(added, self._next_address, small)
            self._next_address += 1 << 44
        else:
            block = Block(added, tail.address + tail.size, small, before=tail)
            tail.after = block
        self._tail[small] = block
        return block

    def _beyond(self, more: int) -> bool:
        return self.cap is not None and self.reserved + more > self.cap

    def _split(self, block: Block, size: int) -> Block:
        """The block, or its first part where the rest is worth keeping."""
        rest = block.size - size
        if block.small or self.rules.expandable:
            worth = rest >= MIN_BLOCK
        else:
            worth = size < self.rules.max_split and rest > SMALL_SIZE
        if not worth:
            return block
        first = Block(size, block.address, block.small, before=block.before, after=block)
        if first.before is not None:
            first.before.after = first
        block.before = first
        block.address += size
        block.size -= size
        block.free = True
        self._put(block)
        return first

    def _merge(self, block: Block) -> None:
        """With free neighbours, which are no blocks of their own any more."""
        before, after = block.before, block.after
        if before is not None and before.free:
            self._take(before)
            block.address, block.size = before.address, block.size + before.size
            block.before = before.before
            if block.before is not None:
                block.before.after = block
        if after is not None and after.free:
            self._take(after)
            block.size += after.size
            block.after = after.after
            if block.after is not None:
                block.after.before = block
            if self._tail[block.small] is after:
                self._tail[block.small] = block

    def _released(self) -> int:
        """Give back whole segments that are free. Returns their bytes."""
        freed = 0
        for small, pool in self._free.items():
            kept = []
            for entry in pool:
                block = entry[2]
                if self.rules.expandable:
                    # Whole pages at the end of the segment; pages in the middle are given back as well, but are of
                    # use to nobody else before they are needed again.
                    whole = block is self._tail[small]
                else:
                    whole = block.before is None and block.after is None
                if not whole:
                    kept.append(entry)
                    continue
                freed += block.size
                self.reserved -= block.size
                if self.rules.expandable:
                    self._tail[small] = block.before
                    if block.before is not None:
                        block.before.after = None
            self._free[small] = kept
        return freed

    def _put(self, block: Block) -> None:
        insort(self._free[block.small], (block.size, block.address, block), key=_order)

    def _take(self, block: Block) -> None:
        pool = self._free[block.small]
        place = bisect_left(pool, (block.size, block.address), key=_order)
        assert pool[place][2] is block
        del pool[place]


def _order(entry: tuple[int, int, Block]) -> tuple[int, int]:
    return entry[0], entry[1]
