"""What a memory snapshot's history tells: the state before it, each state in it, and releases of cached memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ndd_engine.measure.memory_owners import Frames

from .snapshot_file import DeviceHistory, Entry

ALLOC, FREED = "alloc", "free_completed"
GROWS, SHRINKS = ("segment_alloc", "segment_map"), ("segment_free", "segment_unmap")


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


@dataclass(frozen=True)
class Release:
    """Cached memory that was returned to the driver. kind: "retry", "empty_cache" or "other"."""

    entry: int
    kind: str
    released_bytes: int


def releases(
    entries: Sequence[Entry], levels: Sequence[tuple[int, int]], collects: bool = False
) -> list[Release]:
    """Runs of released segments. levels: (reserved, requested) before the first entry and after each.

    Kinds of runs:
    - "retry": an allocation released them because memory was full. It needed a new segment right after, and reserving
      it without the release would have been more than was ever reserved.
    - "empty_cache": the program called it, or it could not have been a retry.
    - "other": no segment is allocated after it, or the garbage collection is on (`collects`).
    """
    found = []
    most = max(level[0] for level in levels)
    place = 0
    while place < len(entries):
        if entries[place].action not in SHRINKS:
            place += 1
            continue
        first = place
        while place < len(entries) and entries[place].action in SHRINKS:
            place += 1
        before, after = levels[first][0], levels[place][0]
        following = entries[place] if place < len(entries) else None
        kind = "other"
        if _calls(entries[first], "empty_cache"):
            kind = "empty_cache"
        elif following is not None and following.action == "oom":
            kind = "retry"
        elif following is not None and following.action in GROWS and not collects:
            kind = "retry" if before + following.size > most else "empty_cache"
        found.append(Release(first, kind, before - after))
    return found


def _calls(entry: Entry, function: str) -> bool:
    frames = entry.frames if isinstance(entry.frames, (list, tuple)) else ()
    return any(isinstance(frame, dict) and frame.get("name") == function for frame in frames)
