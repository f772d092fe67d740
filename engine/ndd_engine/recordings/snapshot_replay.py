"""Rebuilds the state before a memory history, and replays the history in the simulated allocator."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field

from ndd_engine.measure.memory_owners import Frames
from ndd_engine.predict.allocator import Allocator, Rules, SimulatedOutOfMemoryError

from .snapshot_file import DeviceHistory, Entry

ALLOC, FREED = "alloc", "free_completed"
GROWS, SHRINKS = ("segment_alloc", "segment_map"), ("segment_free", "segment_unmap")
_LARGE_REST = 1 << 20  # the largest remainder that is not split off a large block


@dataclass(frozen=True, slots=True)
class Request:
    """Memory in use. block_bytes: of its block, None if the snapshot does not tell."""

    address: int
    requested: int
    stream: int
    frames: Frames = ()
    block_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Held:
    """A segment before the history."""

    address: int
    size: int
    stream: int
    small: bool


@dataclass
class Start:
    """What was allocated before the first entry of a history.

    reserved: bytes. mismatches: entries that do not lead to the final state, for example because the recording was
    interrupted.
    """

    segments: list[Held] = field(default_factory=list)
    live: dict[int, Request] = field(default_factory=dict)
    reserved: int = 0
    mismatches: int = 0

    @property
    def warm(self) -> bool:
        return bool(self.reserved or self.live)


def start_of(device: DeviceHistory) -> Start:
    """The state before a history: the final one, with all entries undone."""
    held = {item.address: Held(item.address, item.size, item.stream, item.small) for item in device.segments}
    live = {
        block.address: Request(block.address, block.requested, item.stream, block.frames, block.size)
        for item in device.segments
        for block in item.blocks
        if block.live
    }
    start = Start(live=live, reserved=device.reserved)
    expandable = any(item.expandable for item in device.segments)
    for entry in reversed(device.entries):
        match entry.action:
            case "alloc":
                start.mismatches += live.pop(entry.address, None) is None
            case "free_completed":
                start.mismatches += entry.address in live
                live[entry.address] = Request(entry.address, entry.size, entry.stream)
            case "segment_alloc":
                start.mismatches += held.pop(entry.address, None) is None
            case "segment_free":
                small = entry.size <= 2 << 20
                held[entry.address] = Held(entry.address, entry.size, entry.stream, small)
        start.reserved += _change(entry, -1)
    start.segments = [] if expandable else sorted(held.values(), key=lambda item: item.address)
    start.mismatches += start.reserved < 0 or any(item.size < 0 for item in held.values())
    return start


def _change(entry: Entry, sign: int = 1) -> int:
    """The change of the reserved bytes."""
    return sign * (entry.size if entry.action in GROWS else -entry.size if entry.action in SHRINKS else 0)


def states(start: Start, entries: list[Entry]) -> Iterator[tuple[int, int]]:
    """(reserved, requested) bytes after each entry."""
    reserved, requested = start.reserved, sum(request.requested for request in start.live.values())
    sizes = {address: request.requested for address, request in start.live.items()}
    for entry in entries:
        reserved += _change(entry)
        if entry.action == ALLOC:
            sizes[entry.address] = entry.size
            requested += entry.size
        elif entry.action == FREED:
            requested -= sizes.pop(entry.address, 0)
        yield reserved, requested


def live_at(start: Start, entries: list[Entry], count: int) -> list[Request]:
    """What is in use after the first `count` entries."""
    live = dict(start.live)
    for entry in entries[:count]:
        if entry.action == ALLOC:
            live[entry.address] = Request(entry.address, entry.size, entry.stream, entry.frames)
        elif entry.action == FREED:
            live.pop(entry.address, None)
    return list(live.values())


@dataclass
class Replayed:
    """A replay. peak: bytes reserved at most. wrong: segment allocations that differ from the recorded ones.

    active: bytes in blocks in use after each entry. retries, collections: of the simulated allocator. failed: an
    allocation does not fit under the limit.
    """

    peak: int = 0
    wrong: int = 0
    decisions: int = 0
    active: list[int] = field(default_factory=list)
    retries: int = 0
    collections: int = 0
    failed: bool = False


def replay(
    start: Start,
    entries: list[Entry],
    rules: Rules,
    descending: bool = False,
    fraction_bytes: int | None = None,
    as_it_was: bool = False,
    releases: frozenset[int] = frozenset(),
    full: bool = False,
) -> Replayed:
    """Replay a history in the simulated allocator, one pool for each stream.

    as_it_was: begin with the segments of the recording, with the same free blocks; otherwise the memory in use before
    the history is allocated first, which is all that is known for other settings. releases: entries before which the
    cached memory is released, as in the recording. fraction_bytes: limit of set_per_process_memory_fraction, for the
    garbage collection only unless `full`: then allocations beyond it fail.
    """
    allocator = Allocator(rules, fraction_bytes if full else None, fraction_bytes, descending)
    keys = {address: key for key, address in enumerate(start.live)}
    count = len(keys)
    if as_it_was:
        _adopt(allocator, start, entries, rules, keys)
    else:
        for address, request in sorted(start.live.items()):
            allocator.allocate(keys[address], request.requested, request.stream)
    found = Replayed(allocator.reserved)
    grown = 0
    for place, entry in enumerate(entries):
        if place in releases:
            allocator.released()
        if entry.action in GROWS:
            grown += entry.size
        elif entry.action == ALLOC:
            before, released = allocator.reserved, allocator.retries
            keys[entry.address] = count
            try:
                allocator.allocate(count, entry.size, entry.stream)
            except SimulatedOutOfMemoryError:
                found.failed = True
                break
            count += 1
            found.decisions += 1
            found.wrong += released == allocator.retries and allocator.reserved - before != grown
            found.peak = max(found.peak, allocator.reserved)
            grown = 0
        elif entry.action == FREED and (key := keys.pop(entry.address, None)) is not None:
            allocator.free(key)
        found.active.append(allocator.active)
    found.retries, found.collections = allocator.retries, allocator.collections
    return found


def _adopt(
    allocator: Allocator, start: Start, entries: list[Entry], rules: Rules, keys: dict[int, int]
) -> None:
    """Put the segments of the recording into the allocator.

    Bytes of blocks that were freed during the history are not recorded. They follow from the rounding of the request,
    and from blocks that were allocated after them in the same segment.
    """
    addresses = sorted(start.live)
    later = sorted({entry.address for entry in entries if entry.action == ALLOC})
    for held in start.segments:
        end, place = held.address + held.size, held.address
        inside = addresses[bisect_right(addresses, place - 1) : bisect_right(addresses, end - 1)]
        blocks: list[tuple[int, int | None, int]] = []
        for index, address in enumerate(inside):
            following = inside[index + 1] if index + 1 < len(inside) else end
            if address > place:
                blocks.append((address - place, None, 0))
            request = start.live[address]
            size = request.block_bytes or _size(
                request.requested, address, following, held.small, later, rules
            )
            size = min(size, following - address)
            blocks.append((size, keys[address], request.requested))
            place = address + size
        if place < end:
            blocks.append((end - place, None, 0))
        allocator.adopt(held.address, (held.stream, held.small), blocks)


def _size(requested: int, address: int, following: int, small: bool, later: list[int], rules: Rules) -> int:
    """Bytes of a block of unknown size: its rounded request, or more if the remainder was too small to be split off."""
    size = rules.rounded(requested)
    rest = following - address - size
    if 0 < rest <= (0 if small else _LARGE_REST):
        return following - address
    if not small:
        place = bisect_right(later, address + size)
        if place < len(later) and later[place] < min(address + size + _LARGE_REST, following):
            return later[place] - address
    return size
