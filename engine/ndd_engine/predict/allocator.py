"""A simulation of CUDA's caching allocator: the memory that a sequence of requests reserves, computed without a GPU.

Its settings come first, then its blocks.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from ndd_engine.text import printable

KIB, MIB = 1 << 10, 1 << 20
MIN_BLOCK = 512
SMALL_SIZE = MIB
SMALL_SEGMENT = 2 * MIB
MIN_LARGE_SEGMENT = 10 * MIB
ROUND_LARGE = 2 * MIB
UNLIMITED = 1 << 62


@dataclass(frozen=True)
class Rules:
    """Allocator settings from PYTORCH_ALLOC_CONF or PYTORCH_CUDA_ALLOC_CONF, in bytes.

    large_segment: size of a new segment for requests below 10 MiB. max_split: blocks of this size or more are not
    split. max_rounding: how much larger than such a request a block may be. expandable: one growing segment per pool.
    divisions: round sizes up to 1/divisions of a power of two; 0 rounds to multiples of 512 bytes. gc_threshold: share
    of the memory limit above which idle blocks are released; 0 never.
    """

    large_segment: int = 20 * MIB
    max_split: int = UNLIMITED
    max_rounding: int = 20 * MIB
    expandable: bool = False
    divisions: int = 0
    gc_threshold: float = 0.0

    @classmethod
    def of_environment(cls, text: str | None = None) -> Rules:
        """Parse the environment variable, or `text`. Unknown and malformed options are ignored; torch reports them."""
        if text is None:
            text = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
        options = dict(re.findall(r"(\w+)\s*:\s*([^,\[\]]+)", text))

        def number(name: str, default: int, unit: int) -> int:
            value = options.get(name, "").strip()
            return int(value) * unit if value.isdecimal() and len(value) < 10 else default

        share = options.get("garbage_collection_threshold", "").strip()
        return cls(
            large_segment=number("large_segment_size_mb", cls.large_segment, MIB),
            max_split=number("max_split_size_mb", cls.max_split, MIB),
            max_rounding=number("max_non_split_rounding_mb", cls.max_rounding, MIB),
            expandable=options.get("expandable_segments", "").strip().lower() == "true",
            divisions=number("roundup_power2_divisions", cls.divisions, 1),
            gc_threshold=float(share) if re.fullmatch(r"0?\.\d{1,9}", share) else cls.gc_threshold,
        )

    @classmethod
    def of_snapshot(cls, settings: Mapping[str, object]) -> Rules:
        """The settings of the process that wrote a memory snapshot (`allocator_settings`; {} before torch 2.2)."""
        text = settings.get("PYTORCH_CUDA_ALLOC_CONF") or settings.get("PYTORCH_ALLOC_CONF") or ""
        rules = cls.of_environment(text[:4096] if isinstance(text, str) else "")
        # These are also right where the program changed them later.
        split, share = settings.get("max_split_size"), settings.get("garbage_collection_threshold")
        expandable, divisions = settings.get("expandable_segments"), settings.get("roundup_power2_divisions")
        if isinstance(split, int) and 0 < split < UNLIMITED:
            rules = replace(rules, max_split=split)
        if isinstance(share, float) and 0 < share < 1:
            rules = replace(rules, gc_threshold=share)
        if isinstance(expandable, bool):
            rules = replace(rules, expandable=expandable)
        # Different divisions for different sizes are not modelled.
        known = divisions.values() if isinstance(divisions, Mapping) else ()
        parts = {part for part in known if isinstance(part, int)}
        if len(parts) == 1 and 0 <= (part := parts.pop()) <= 1024:
            rules = replace(rules, divisions=int(part))
        return rules

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


def _whole(least: int) -> Callable[[str], bool]:
    return lambda value: value.isdecimal() and len(value) < 10 and int(value) >= least


# Settings of PYTORCH_ALLOC_CONF that the simulation follows -> (values that torch allows, whether it is one).
_MODELLED: dict[str, tuple[str, Callable[[str], bool]]] = {
    "expandable_segments": ("True or False", lambda value: value in ("True", "False")),
    "max_split_size_mb": ("a whole number, at least 20", _whole(20)),
    "max_non_split_rounding_mb": ("a whole number, at least 20", _whole(20)),
    "large_segment_size_mb": ("a whole number above 10", _whole(11)),
    "garbage_collection_threshold": (
        "between 0 and 1, such as 0.8", lambda value: bool(re.fullmatch(r"0?\.\d{1,9}", value)) and float(value) > 0,
    ),
    "roundup_power2_divisions": (
        "a power of two, or 0", lambda value: _whole(0)(value) and int(value).bit_count() <= 1
    ),
}  # fmt: skip
# Those that it does not follow: they change nothing of it, or are of the host's memory.
_NOT_MODELLED = frozenset({
    "backend", "graph_capture_record_stream_reuse", "per_process_memory_fraction", "pinned_max_cached_size_mb",
    "pinned_max_round_threshold_mb", "pinned_num_register_threads", "pinned_reserve_segment_size_mb",
    "pinned_use_background_threads", "pinned_use_cuda_host_register", "pinned_use_hip_host_register",
    "release_lock_on_cudamalloc", "release_lock_on_hipmalloc", "throw_on_cudamalloc_oom",
})  # fmt: skip


def problem_of(text: str) -> str:
    """Why the simulation cannot follow settings as in PYTORCH_ALLOC_CONF, with what is allowed; "" if it can."""
    for option in re.split(r",(?![^\[]*\])", text):
        name, _, value = (part.strip() for part in option.partition(":"))
        if name in _NOT_MODELLED and value:
            return f"{name} is a setting of torch, but it is not modelled"
        if name not in _MODELLED:
            wrong = (
                f"{printable(name)} is not a setting of torch's allocator" if name else "the name is missing"
            )
            return f"{wrong}; expected NAME:VALUE with one of {', '.join(_MODELLED)}"
        allowed, fits = _MODELLED[name]
        if name == "roundup_power2_divisions" and value.startswith("["):
            return "different values of roundup_power2_divisions for different sizes are not modelled"
        if not fits(value):
            return f"{name} is {allowed}"
    return ""


Pool = tuple[int, bool]  # stream, small


@dataclass(eq=False, slots=True)
class Block:
    """Part of a segment. address: orders blocks of equal size; before, after: neighbours in the segment.

    mapped: False for addresses of an expandable segment without memory. base: address of the segment. idle_since: the
    pool's count of searches when it was freed, for the garbage collection.
    """

    size: int
    address: int
    pool: Pool
    base: int
    free: bool = True
    mapped: bool = True
    before: Block | None = None
    after: Block | None = None
    idle_since: int = 0

    @property
    def expandable_size(self) -> int:
        """Its size with the addresses that follow and can be mapped."""
        return self.size + (self.after.size if self.after is not None and not self.after.mapped else 0)

    @property
    def whole(self) -> bool:
        """Whether it is the whole segment."""
        return self.before is None and self.after is None


def part(of: Block, address: int, size: int, mapped: bool = True) -> Block:
    """A new free block in the segment of another one."""
    return Block(size, address, of.pool, of.base, mapped=mapped)


def link(before: Block | None, block: Block, after: Block | None) -> None:
    """Insert a block between two neighbours."""
    block.before, block.after = before, after
    if before is not None:
        before.after = block
    if after is not None:
        after.before = block


def following(block: Block | None) -> Iterator[Block]:
    """The block and those after it, up to the first in use."""
    while block is not None and block.free:
        yield block
        block = block.after


def run(hole: Block) -> Iterator[Block]:
    """The adjacent blocks that can be used together: unmapped ones, and free ones from just before the hole on."""
    before = hole.before
    return following(before if before is not None and before.free else hole)


__all__ = ["MIB", "Allocator", "Rules", "SimulatedOutOfMemoryError", "problem_of"]

# Virtual addresses of one expandable segment, and the gap between segments.
_VIRTUAL = 1 << 46
_GAP = 1 << 30
# Where simulated addresses begin, in either order.
_MIDDLE = 1 << 56


class SimulatedOutOfMemoryError(Exception):
    """A request exceeds the cap even after all cached segments are released. Sizes in bytes."""

    def __init__(self, requested: int, reserved: int, cap: int) -> None:
        super().__init__(f"{requested:,} bytes requested, {reserved:,} of {cap:,} reserved")
        self.requested, self.reserved, self.cap = requested, reserved, cap


@dataclass
class Allocator:
    """The allocator's state. cap: limit of reserved bytes, or None.

    fraction_bytes: limit set by `torch.cuda.set_per_process_memory_fraction`, without which torch collects no garbage.
    descending: whether the driver returns descending addresses for new segments; the order matters where several free
    blocks have the same size.

    reserved, active, requested: current bytes reserved from the driver, in used blocks, and requested by the program.
    retries: requests that succeeded only after all cached segments were released. collections: garbage collections.
    """

    rules: Rules = field(default_factory=Rules)
    cap: int | None = None
    fraction_bytes: int | None = None
    descending: bool = False
    reserved: int = 0
    active: int = 0
    requested: int = 0
    peak_reserved: int = 0
    retries: int = 0
    collections: int = 0
    segments: int = 0

    def __post_init__(self) -> None:
        # Free blocks of each pool, sorted by size and address; unmapped ones, sorted by address.
        self._free: dict[Pool, list[tuple[int, int, Block]]] = {}
        self._unmapped: dict[Pool, list[tuple[int, Block]]] = {}
        self._live: dict[int, tuple[Block, int]] = {}
        # Searches for a free small or large block.
        self._searches = [0, 0]
        self._edge = _MIDDLE

    def allocate(self, key: int, size: int, stream: int = 0) -> None:
        """Allocate `size` bytes under `key`; 0 bytes are ignored. Raises SimulatedOutOfMemoryError."""
        if size <= 0:
            return
        rounded = self.rules.rounded(size)
        pool = stream, rounded <= SMALL_SIZE
        block = self._found(pool, rounded) or self._new(pool, rounded)
        if block is None:
            raise SimulatedOutOfMemoryError(size, self.reserved, self.cap or 0)
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        self._use(key, self._split(block, rounded), size)

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

    def replay(self, events: Iterable[tuple[int, int]], streams: Sequence[int] = ()) -> Allocator:
        """Process events in order: (key, size) allocates, (key, -1) frees. Raises SimulatedOutOfMemoryError.

        streams: by key; () for one stream.
        """
        for key, size in events:
            if size < 0:
                self.free(key)
            else:
                self.allocate(key, size, streams[key] if streams else 0)
        return self

    def adopt(self, address: int, pool: Pool, blocks: Iterable[tuple[int, int | None, int]]) -> None:
        """Add a segment as it is: (bytes of a block, its key or None if it is free, requested bytes) by address.

        Adjacent free blocks must be merged. Do this before the first request.
        """
        last: Block | None = None
        start = address
        for size, key, requested in blocks:
            block = Block(size, address, pool, start, before=last)
            if last is not None:
                last.after = block
            if key is None:
                self._put(block)
            else:
                self._use(key, block, requested)
            address, last = address + size, block
        self.segments += 1
        self.reserved += address - start
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def released(self) -> int:
        """Release cached memory: whole free segments, or all whole pages of expandable ones. Returns the bytes."""
        before = self.reserved
        for block in [entry[2] for entry in chain.from_iterable(self._free.values())]:
            if self.rules.expandable:
                self._unmap(block)
            elif block.whole:
                self._drop(block)
        return before - self.reserved

    def _use(self, key: int, block: Block, size: int) -> None:
        block.free = False
        self._live[key] = block, size
        self.active += block.size
        self.requested += size

    def _found(self, pool: Pool, size: int) -> Block | None:
        """The smallest free block that is large enough; the lowest address on ties."""
        self._searches[pool[1]] += 1
        blocks = self._free.get(pool, [])
        place = bisect_left(blocks, (size, 0))
        if place == len(blocks):
            return None
        if self.rules.expandable:
            # A block that can grow counts with the size to which it can grow, so it is used last.
            while place + 1 < len(blocks) and (
                blocks[place + 1][2].expandable_size < blocks[place][2].expandable_size
            ):
                place += 1
        block = blocks[place][2]
        limit = self.rules.max_split
        if (size < limit <= block.size) or (size >= limit and block.size >= size + self.rules.max_rounding):
            return None
        del blocks[place]
        return block

    def _new(self, pool: Pool, size: int) -> Block | None:
        """A block from the driver, if necessary after releasing cached ones; None if the cap does not allow one."""
        self._collect()
        block = self._grown(pool, size)
        if block is None and self._made_room(pool, size):
            block = self._grown(pool, size)
        if block is None and self.released():
            block = self._grown(pool, size)
            self.retries += block is not None
        return block

    def _grown(self, pool: Pool, size: int) -> Block | None:
        """A block in a new segment, or None if the cap does not allow one."""
        if self.rules.expandable:
            return self._expanded(pool, size)
        segment = self.rules.segment(size)
        if self._beyond(segment):
            return None
        self.reserved += segment
        self.segments += 1
        address = self._address(segment)
        return Block(segment, address, pool, address)

    def _address(self, size: int) -> int:
        if self.descending:
            self._edge -= size + _GAP
            return self._edge
        address, self._edge = self._edge, self._edge + size + _GAP
        return address

    def _beyond(self, more: int) -> bool:
        return self.cap is not None and self.reserved + more > self.cap

    def _split(self, block: Block, size: int) -> Block:
        """Split off the first `size` bytes if the remainder is large enough; otherwise return the whole block."""
        rest = block.size - size
        if block.pool[1] or self.rules.expandable:
            worth = rest >= MIN_BLOCK
        else:
            worth = size < self.rules.max_split and rest > SMALL_SIZE
        if not worth:
            return block
        first = Block(size, block.address, block.pool, block.base, before=block.before, after=block)
        if first.before is not None:
            first.before.after = first
        block.before = first
        block.address += size
        block.size = rest
        block.free = True
        self._put(block)
        return first

    def _merge(self, block: Block) -> None:
        """Merge a block with its free neighbours, or an unmapped one with its unmapped neighbours."""
        before, after = block.before, block.after
        if before is not None and before.free and before.mapped == block.mapped:
            self._take(before)
            block.address, block.size = before.address, block.size + before.size
            block.before = before.before
            if block.before is not None:
                block.before.after = block
        if after is not None and after.free and after.mapped == block.mapped:
            self._take(after)
            block.size += after.size
            block.after = after.after
            if block.after is not None:
                block.after.before = block

    def _put(self, block: Block) -> None:
        block.idle_since = self._searches[block.pool[1]]
        if block.mapped:
            insort(self._free.setdefault(block.pool, []), (block.size, block.address, block))
        else:
            insort(self._unmapped.setdefault(block.pool, []), (block.address, block))

    def _take(self, block: Block) -> None:
        if block.mapped:
            blocks = self._free[block.pool]
            place = bisect_left(blocks, (block.size, block.address))
            assert blocks[place][2] is block
            del blocks[place]
        else:
            holes = self._unmapped[block.pool]
            place = bisect_left(holes, (block.address,))
            assert holes[place][1] is block
            del holes[place]

    def _drop(self, block: Block) -> None:
        """Return a whole free segment to the driver."""
        self._take(block)
        self.reserved -= block.size

    # Limits: max_split_size_mb and garbage_collection_threshold.

    def _made_room(self, pool: Pool, size: int) -> bool:
        """Release oversize blocks of a pool, only as many as a request needs. Returns whether it may be retried."""
        limit = self.rules.max_split
        if limit == UNLIMITED or self.rules.expandable:
            return False
        wanted = max(size, limit)
        blocks = self._free.get(pool, [])
        place = bisect_left(blocks, (wanted, 0))
        if place < len(blocks):
            if blocks[place][2].whole:  # larger blocks are never split
                self._drop(blocks[place][2])
            return True
        made = 0
        for released, _, block in reversed(list(blocks)):
            if made >= wanted or released < limit:
                break
            self._drop(block)
            made += released
        return made >= wanted

    def _collect(self) -> None:
        """Release large blocks that were idle for longer than average, while more than the threshold is reserved."""
        threshold = self.rules.gc_threshold
        if not threshold or self.fraction_bytes is None or self.rules.expandable:
            return
        excess = self.reserved - int(threshold * self.fraction_bytes)
        pools = sorted(pool for pool in self._free if not pool[1])
        now = self._searches[False]
        ages = [(now - entry[2].idle_since, entry[2])
                for pool in pools for entry in self._free[pool] if entry[2].whole]  # fmt: skip
        while excess > 0 and ages:
            average = sum(age for age, _ in ages) / len(ages)
            # torch lowers the average while it walks the blocks, but compares all of them with this one.
            for age, block in ages:
                if age >= average:
                    self._drop(block)
                    excess -= block.size
            ages = [item for item in ages if item[0] < average]
            self.collections += 1

    # Expandable segments.

    def _page(self, pool: Pool) -> int:
        return SMALL_SEGMENT if pool[1] else self.rules.large_segment

    def _expanded(self, pool: Pool, size: int) -> Block | None:
        """A free block of at least `size` bytes, made by mapping addresses; None if the cap does not allow it."""
        runs = (list(run(hole)) for _, hole in self._unmapped.get(pool, []))
        first = next((blocks[0] for blocks in runs if sum(block.size for block in blocks) >= size), None)
        if first is None:
            address = self._address(_VIRTUAL)
            first = Block(_VIRTUAL, address, pool, address, mapped=False)
            self.segments += 1
            self._put(first)
        page, missing, added = self._page(pool), size, 0
        for block in following(first):
            if missing <= 0:
                break
            part = block.size if block.mapped else min(-(-missing // page) * page, block.size)
            added += 0 if block.mapped else part
            missing -= part
        if self._beyond(added):
            return None
        block = first
        if not block.mapped:
            self._map(block, size)
        while block.size < size:
            hole = block.after
            assert hole is not None and not hole.mapped
            self._map(hole, size - block.size)
            block = hole  # merged with the block before it
        self._take(block)
        return block

    def _map(self, block: Block, size: int) -> None:
        """Map at least the first `size` bytes of an unmapped block, in whole pages."""
        self._take(block)
        page = self._page(block.pool)
        size = min(-(-size // page) * page, block.size)
        if size < block.size:
            rest = part(block, block.address + size, block.size - size, mapped=False)
            link(block, rest, block.after)
            self._put(rest)
            block.size = size
        block.mapped = True
        self.reserved += size
        self._merge(block)
        self._put(block)

    def _unmap(self, block: Block) -> None:
        """Return the whole pages of a free block to the driver."""
        page, offset = self._page(block.pool), block.address - block.base
        low, high = -(-offset // page) * page, (offset + block.size) // page * page
        if high <= low:
            return
        self._take(block)
        begin, end = block.base + low, block.base + high
        if begin > block.address:
            left = part(block, block.address, begin - block.address)
            link(block.before, left, block)
            self._put(left)
        if end < block.address + block.size:
            right = part(block, end, block.address + block.size - end)
            link(block, right, block.after)
            self._put(right)
        block.address, block.size, block.mapped = begin, end - begin, False
        self.reserved -= end - begin
        self._merge(block)
        if block.whole:
            self.segments -= 1
        else:
            self._put(block)
