"""Replays the history of a memory snapshot in the simulated allocator, also with other settings and under a limit."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from ndd_engine.predict.allocator import Allocator, Rules, SimulatedOutOfMemoryError

from .history import ALLOC, FREED, GROWS, SHRINKS, Release, Start
from .snapshot_file import Entry

_LARGE_REST = 1 << 20  # the largest remainder that is not split off a large block


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
    cap: int | None = None,
) -> Replayed:
    """Replay a history in the simulated allocator, one pool for each stream.

    as_it_was: begin with the segments of the recording, with the same free blocks; otherwise the memory in use before
    the history is allocated first, which is all that is known for other settings. releases: entries before which the
    cached memory is released, as in the recording. cap: bytes beyond which allocations have to retry, or fail.
    fraction_bytes: limit of set_per_process_memory_fraction, without which no garbage is collected.
    """
    allocator = Allocator(rules, cap, fraction_bytes, descending)
    keys = {address: key for key, address in enumerate(start.live)}
    count = len(keys)
    if as_it_was:
        _adopt(allocator, start, entries, rules, keys)
    else:
        try:
            for address, request in sorted(start.live.items()):
                allocator.allocate(keys[address], request.requested, request.stream)
        except SimulatedOutOfMemoryError:
            return Replayed(allocator.reserved, failed=True)
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


@dataclass(frozen=True)
class Limit:
    """The memory that the recorded process could have. low, high: bytes, at least and at most.

    known: how: "given" by the user, "out of memory" (what was left when a request failed), "retries" (what did not fit
    by then, and what did), or "" for a GPU that was never full.
    """

    low: int
    high: int
    known: str = ""

    @property
    def caps(self) -> tuple[int | None, ...]:
        """Limits to replay with."""
        return tuple(dict.fromkeys((self.low, self.high))) if self.known else (None,)


def limit_of(
    entries: Sequence[Entry], levels: Sequence[tuple[int, int]], found: Sequence[Release], rules: Rules
) -> Limit:
    """What a history proves of the limit. levels: (reserved, requested) before the first entry and after each."""
    most = max(reserved for reserved, _ in levels)
    beyond: list[int] = []
    for release in found:
        place = release.entry
        while place < len(entries) and entries[place].action in SHRINKS:
            place += 1
        if release.kind == "retry" and place < len(entries) and entries[place].action in GROWS:
            beyond.append(levels[release.entry][0] + entries[place].size)
    exact: list[int] = []
    for place, entry in enumerate(entries):
        if entry.action == "oom":
            reserved, wanted = levels[place][0], rules.segment(rules.rounded(entry.size))
            # With more left on the GPU than that, the process had a limit of its own.
            (beyond if entry.address >= wanted else exact).append(
                reserved + (wanted if entry.address >= wanted else entry.address)
            )
    if exact:
        value = max(most, min(exact))
        return Limit(value, value, "out of memory")
    if beyond:
        return Limit(most, max(min(beyond) - 1, most), "retries")
    return Limit(most, most)
