"""A simulation of CUDA's caching allocator: the memory that a sequence of requests reserves, computed without a GPU.

It models the native backend on one stream, as in c10/cuda/CUDACachingAllocator.cpp and c10/core/AllocatorConfig.h of
torch 2.13. CUDA graphs and compiled graphs (which have their own memory pools) and multiple streams are not modelled.
The constants in `Rules` may change between versions, so `Prober._self_check` replays a recorded step and compares.
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
    """A request exceeds the cap even after all cached segments are released. Sizes in bytes."""

    def __init__(self, requested: int, reserved: int, cap: int) -> None:
        super().__init__(f"{requested:,} bytes requested, {reserved:,} of {cap:,} reserved")
        self.requested, self.reserved, self.cap = requested, reserved, cap


@dataclass(frozen=True)
class Rules:
    """Allocator settings from PYTORCH_CUDA_ALLOC_CONF, in bytes.

    large_segment: size of a new segment for requests below 10 MiB. max_split: blocks of this size or more are not
    split. expandable: one growing segment per pool. divisions: round sizes up to 1/divisions of a power of two; 0
    rounds to multiples of 512 bytes.
    """

    large_segment: int = 20 * MIB
    max_split: int = UNLIMITED
    expandable: bool = False
    divisions: int = 0

    @classmethod
    def of_environment(cls, text: str | None = None) -> Rules:
        """Parse the environment variable, or `text`. Unknown and malformed options are ignored; torch reports them."""
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
        """Bytes that a request occupies in a block."""
        if size < MIN_BLOCK:
            return MIN_BLOCK
        if self.divisions > 1 and size > MIN_BLOCK * self.divisions:
            power = 1 << (size.bit_length() - 1)
            step = power // self.divisions
            return power + -(-(size - power) // step) * step
        return -(-size // MIN_BLOCK) * MIN_BLOCK

    def segment(self, size: int) -> int:
        """Bytes requested from the driver for a request of `size` (rounded) bytes."""
        if size <= SMALL_SIZE:
            return SMALL_SEGMENT
        if size < MIN_LARGE_SEGMENT:
            return self.large_segment
        return -(-size // ROUND_LARGE) * ROUND_LARGE


@dataclass(eq=False, slots=True)
class Block:
    """Part of a segment. address: orders blocks of equal size; before, after: neighbours in the segment."""

    size: int
    address: int
    small: bool
    free: bool = True
    before: Block | None = None
    after: Block | None = None


@dataclass
class Allocator:
    """The allocator's state. cap: limit of reserved bytes, or None.

    reserved, active, requested: current bytes reserved from the driver, in used blocks, and requested by the program.
    retries: requests that succeeded only after cached segments were released.
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
        # Free blocks by pool (small or large), sorted by size and address.
        self._free: dict[bool, list[tuple[int, int, Block]]] = {True: [], False: []}
        self._live: dict[int, tuple[Block, int]] = {}
        # Expandable segments: the last block of each pool.
        self._tail: dict[bool, Block | None] = {True: None, False: None}
        self._next_address = 1

    def allocate(self, key: int, size: int) -> None:
        """Allocate `size` bytes under `key`; 0 bytes are ignored. Raises SimulatedOutOfMemoryError."""
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
        """Free the request `key`. Unknown keys are ignored."""
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
        """Process events in order: (key, size) allocates, (key, -1) frees. Raises SimulatedOutOfMemoryError."""
        for key, size in events:
            if size < 0:
                self.free(key)
            else:
                self.allocate(key, size)
        return self

    def _found(self, small: bool, size: int) -> Block | None:
        """The smallest free block that is large enough; the lowest address on ties."""
        pool = self._free[small]
        place = bisect_left(pool, (size, 0))
        if place == len(pool):
            return None
        if self.rules.expandable and pool[place][2] is self._tail[small] and place + 1 < len(pool):
            # The last block can grow, so it is used last.
            place += 1
        block = pool[place][2]
        limit = self.rules.max_split
        if (size < limit <= block.size) or (size >= limit and block.size >= size + self.rules.large_segment):
            return None
        del pool[place]
        return block

    def _grown(self, small: bool, size: int) -> Block | None:
        """A block in a new segment, or None if the cap does not allow one."""
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
        """Split off the first `size` bytes if the remainder is large enough; otherwise return the whole block."""
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
        """Merge a block with its free neighbours."""
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
        """Release completely free segments. Returns the released bytes."""
        freed = 0
        for small, pool in self._free.items():
            kept = []
            for entry in pool:
                block = entry[2]
                if self.rules.expandable:
                    # Only pages at the end: pages in the middle are mapped again before they can help.
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
        insort(self._free[block.small], (block.size, block.address, block))

    def _take(self, block: Block) -> None:
        pool = self._free[block.small]
        place = bisect_left(pool, (block.size, block.address))
        assert pool[place][2] is block
        del pool[place]
