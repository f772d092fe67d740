"""Explains a memory snapshot: what filled the GPU at its peak, fragmentation, retries, and other allocator settings.

The history is replayed in the simulated allocator.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ndd_engine.errors import UsageError
from ndd_engine.measure.memory import Frames, Owner, owners
from ndd_engine.predict.allocator import UNLIMITED, Allocator, Rules, SimulatedOutOfMemoryError, problem_of
from ndd_engine.text import printable, size

from .recorded_files import DeviceHistory, HistoryEntry, Segment, read_snapshot

ALLOC, FREED, OOM = "alloc", "free_completed", "oom"
GROWS, SHRINKS = ("segment_alloc", "segment_map"), ("segment_free", "segment_unmap")


@dataclass(frozen=True, slots=True)
class Request:
    """Memory in use. block_bytes: of its block, None if the snapshot does not tell."""

    address: int
    requested: int
    stream: int
    frames: Frames = ()
    block_bytes: int | None = None


@dataclass
class AllocatedBefore:
    """What was allocated before the first entry of a history.

    reserved: bytes. mismatches: entries that do not lead to the final state, for example because the recording was
    interrupted.
    """

    segments: list[Segment] = field(default_factory=list)
    live: dict[int, Request] = field(default_factory=dict)
    reserved: int = 0
    mismatches: int = 0

    @property
    def warm(self) -> bool:
        return bool(self.reserved or self.live)


def start_of(device: DeviceHistory) -> AllocatedBefore:
    """The state before a history: the final one, with all entries undone."""
    held = {item.address: item for item in device.segments}
    live = {
        block.address: Request(block.address, block.requested, item.stream, block.frames, block.size)
        for item in device.segments
        for block in item.blocks
        if block.live
    }
    start = AllocatedBefore(live=live, reserved=device.reserved)
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
                held[entry.address] = Segment(entry.address, entry.size, entry.stream, small)
        start.reserved += _change(entry, -1)
    start.segments = [] if expandable else sorted(held.values(), key=lambda item: item.address)
    start.mismatches += start.reserved < 0 or any(item.size < 0 for item in held.values())
    return start


def _change(entry: HistoryEntry, sign: int = 1) -> int:
    """The change of the reserved bytes."""
    return sign * (entry.size if entry.action in GROWS else -entry.size if entry.action in SHRINKS else 0)


def states(start: AllocatedBefore, entries: list[HistoryEntry]) -> Iterator[tuple[int, int]]:
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


def live_at(start: AllocatedBefore, entries: list[HistoryEntry], count: int) -> list[Request]:
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
    entries: Sequence[HistoryEntry], levels: Sequence[tuple[int, int]], collects: bool = False
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
        elif following is not None and following.action == OOM:
            kind = "retry"
        elif following is not None and following.action in GROWS and not collects:
            kind = "retry" if before + following.size > most else "empty_cache"
        found.append(Release(first, kind, before - after))
    return found


def _calls(entry: HistoryEntry, function: str) -> bool:
    frames = entry.frames if isinstance(entry.frames, (list, tuple)) else ()
    return any(isinstance(frame, dict) and frame.get("name") == function for frame in frames)


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
    start: AllocatedBefore,
    entries: list[HistoryEntry],
    rules: Rules,
    descending: bool = False,
    fraction_bytes: int | None = None,
    as_it_was: bool = False,
    releases: frozenset[int] = frozenset(),
    cap: int | None = None,
    left: bool = False,
) -> Replayed:
    """Replay a history in the simulated allocator, one pool for each stream.

    as_it_was: begin with the segments of the recording, with the same free blocks; otherwise the memory in use before
    the history is allocated first, which is all that is known for other settings. releases: entries before which the
    cached memory is released, as in the recording. cap: bytes beyond which allocations have to retry, or fail.
    Under a cap, requests that failed in the recording are made again. Where one fits, it is freed at once, since what
    the program does with it is not recorded. left: they have no more than what the driver had left then, which is less
    than the cap if another process took memory. fraction_bytes: limit of set_per_process_memory_fraction, without which
    no garbage is collected.
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
    grown, recorded = 0, start.reserved
    for place, entry in enumerate(entries):
        recorded += _change(entry)
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
        elif entry.action == OOM and cap is not None:
            allocator.cap = min(cap, recorded + entry.address) if left else cap
            try:
                allocator.allocate(count, entry.size, entry.stream)
            except SimulatedOutOfMemoryError:
                found.failed = True
                break
            allocator.cap = cap
            found.peak = max(found.peak, allocator.reserved)
            allocator.free(count)
            count += 1
        elif entry.action == FREED and (key := keys.pop(entry.address, None)) is not None:
            allocator.free(key)
        found.active.append(allocator.active)
    found.retries, found.collections = allocator.retries, allocator.collections
    return found


def _adopt(
    allocator: Allocator,
    start: AllocatedBefore,
    entries: list[HistoryEntry],
    rules: Rules,
    keys: dict[int, int],
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
    entries: Sequence[HistoryEntry], levels: Sequence[tuple[int, int]], found: Sequence[Release], rules: Rules
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
        if entry.action == OOM:
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


# Allocator settings that are tried on every recording.
SETTINGS = (
    "expandable_segments:True", "expandable_segments:False", "max_split_size_mb:128", "max_split_size_mb:512",
    "garbage_collection_threshold:0.8", "garbage_collection_threshold:0.6",
)  # fmt: skip
# Above this error on the recording itself the results for other settings have low confidence.
ERROR = 0.05
# Out-of-memory errors that are explained.
FAILURES = 20


@dataclass(frozen=True)
class Moment:
    """The memory of a GPU at one entry of the history.

    reserved_bytes: from the driver. active_bytes: of blocks in use, None if the replay is not exact. requested_bytes:
    what the program asked for. owners: who holds it, largest first.
    """

    entry: int
    reserved_bytes: int
    active_bytes: int | None
    requested_bytes: int
    owners: tuple[Owner, ...]


@dataclass(frozen=True)
class Failed:
    """An out-of-memory error. free_bytes: what the driver had left. At that moment the request did not fit."""

    asked_bytes: int
    free_bytes: int
    moment: Moment

    @property
    def fragmented(self) -> bool:
        """Whether enough reserved memory was unused, but not in one piece."""
        return self.moment.reserved_bytes - self.moment.requested_bytes >= self.asked_bytes


@dataclass(frozen=True)
class WhatIf:
    """What another allocator setting would have reserved. reserved_bytes: None if an allocation would have failed.

    retries, collections: at most, within the limit. fails: an allocation fails at the lower end of a limit that is not
    known exactly.
    """

    setting: str
    reserved_bytes: int | None
    retries: int
    collections: int
    fails: bool = False

    @property
    def verdict(self) -> str:
        """ "fits", "with retries", "out of memory", or "perhaps out of memory"."""
        if self.reserved_bytes is None:
            return "out of memory"
        if self.fails:
            return "perhaps out of memory"
        return "with retries" if self.retries else "fits"


@dataclass
class DeviceMemory:
    """What is known about one GPU.

    entries, allocations: of the history. streams: that allocate. start_bytes: reserved before the history. peak: the
    moment with the most reserved bytes, and then the most in use; most_in_use: the reverse. Without an allocation in
    the history both are the final state. private_bytes: of private pools. refused: why the history is not replayed, or
    "". peak_error: signed relative error of the replay on the recording itself. wrong_decisions: segment allocations
    that differ. limit: what the process could have. what_ifs: see `WhatIf`, under that limit. broken: the history does
    not lead to the final state. notes: everything else.
    """

    index: int
    entries: int
    allocations: int
    streams: int
    start_bytes: int
    peak: Moment
    most_in_use: Moment
    end: Moment
    limit: Limit
    private_bytes: int = 0
    refused: str = ""
    wrong_decisions: int | None = None
    peak_error: float | None = None
    what_ifs: list[WhatIf] = field(default_factory=list)
    releases: list[Release] = field(default_factory=list)
    failures: list[Failed] = field(default_factory=list)
    broken: bool = False
    notes: list[str] = field(default_factory=list)

    @property
    def retries(self) -> int:
        """Allocations that had to release cached memory first."""
        return sum(release.kind == "retry" for release in self.releases)


@dataclass
class SnapshotUse:
    """A snapshot. settings: of the recorded allocator, in words."""

    path: Path
    settings: str
    devices: list[DeviceMemory]


def examine(path: Path, settings: Sequence[str] = SETTINGS, limit_bytes: int | None = None) -> SnapshotUse:
    """Explain a snapshot.

    settings: allocator settings to try, as in PYTORCH_ALLOC_CONF. limit_bytes: what the process could have (default:
    what the history proves). Raises UsageError.
    """
    file = read_snapshot(path)
    rules = Rules.of_snapshot(file.settings)
    if any(segment.expandable for device in file.devices for segment in device.segments):
        rules = replace(rules, expandable=True)
    for setting in () if tuple(settings) == SETTINGS else settings:
        same = "the recording was made with this setting" if _with(rules, setting) == rules else ""
        if problem := problem_of(setting) or same:
            raise UsageError(f"--setting '{printable(setting)}': {problem}")
    return SnapshotUse(
        path,
        in_words(rules),
        [_device(device, rules, settings, limit_bytes) for device in file.devices],
    )


def in_words(rules: Rules) -> str:
    """Allocator settings that are not the defaults, as in PYTORCH_ALLOC_CONF; "default" if all are."""
    plain = Rules()
    words = []
    if rules.expandable:
        words.append("expandable_segments:True")
    if rules.max_split < UNLIMITED:
        words.append(f"max_split_size_mb:{rules.max_split >> 20}")
    if rules.gc_threshold:
        words.append(f"garbage_collection_threshold:{rules.gc_threshold:g}")
    if rules.divisions:
        words.append(f"roundup_power2_divisions:{rules.divisions}")
    if rules.large_segment != plain.large_segment:
        words.append(f"large_segment_size_mb:{rules.large_segment >> 20}")
    return ",".join(words) or "default"


def _device(
    device: DeviceHistory, rules: Rules, settings: Sequence[str], limit_bytes: int | None
) -> DeviceMemory:
    start, entries = start_of(device), device.entries
    refused = _refused(device, start)
    broken = bool(start.mismatches)
    if broken:  # only the final state is known
        start, entries = start_of(DeviceHistory(device.index, device.segments)), []
    levels = list(states(start, entries))
    start_level = start.reserved, sum(request.requested for request in start.live.values())
    every = [start_level, *levels]
    at = max(range(len(every)), key=lambda place: (every[place], -place))
    used = max(range(len(every)), key=lambda place: (every[place][::-1], -place))
    if not _allocates(entries):
        at = used = len(entries)
    both: list[Replayed] = []
    found_releases = releases(entries, every, bool(rules.gc_threshold))
    places = frozenset(release.entry for release in found_releases)
    limit = limit_of(entries, every, found_releases, rules)
    if limit_bytes is not None:
        limit = Limit(limit_bytes, limit_bytes, "given")
    if not refused:
        # Which order the driver returned addresses in is not recorded for warm histories; take the one that fits.
        whole = bool(start.segments)
        both = [replay(start, entries, rules, order, None, whole, places) for order in (False, True)]
    exact = min(both, key=lambda one: one.wrong, default=None)

    def moment(place: int) -> Moment:
        active = None
        if exact is not None and not exact.wrong and place:
            active = exact.active[place - 1]
        (reserved, requested), live = every[place], live_at(start, entries, place)
        held = owners((request.frames, request.requested) for request in live)
        return Moment(place, reserved, active, requested, held)

    found = DeviceMemory(
        device.index, len(device.entries), sum(entry.action == ALLOC for entry in device.entries),
        len({entry.stream for entry in device.entries if entry.action == ALLOC}), start.reserved,
        moment(at), moment(used), moment(len(entries)), limit,
        sum(item.size for item in device.segments if item.private), refused,
        broken=broken, releases=found_releases,
    )  # fmt: skip
    failed = [(place, entry) for place, entry in enumerate(entries) if entry.action == OOM]
    found.failures = [Failed(entry.size, entry.address, moment(place)) for place, entry in failed[:FAILURES]]
    found.notes = _notes(device, start, broken)
    if len(failed) > FAILURES:
        found.notes.append(f"{len(failed):,} out-of-memory errors; only the first {FAILURES} are shown")
    if exact is not None:
        found.wrong_decisions = exact.wrong
        if start.warm:  # other settings begin without the segments of the recording, so this has to, too
            both = [replay(start, entries, rules, order, releases=places) for order in (False, True)]
        recorded = found.peak.reserved_bytes
        found.peak_error = max(one.peak for one in both) / recorded - 1 if recorded else 0.0
        _try_settings(found, start, entries, rules, settings)
    return found


def _allocates(entries: Sequence[HistoryEntry]) -> bool:
    return any(entry.action == ALLOC for entry in entries)


def _refused(device: DeviceHistory, start: AllocatedBefore) -> str:
    private = sum(item.size for item in device.segments if item.private)
    if not device.entries:
        return "the snapshot has no history"
    if not _allocates(device.entries):
        return "the history has no allocation"
    if start.mismatches:
        return "the history does not lead to the final state"
    if private:
        return f"{size(private)} belong to private pools (CUDA graphs, torch.compile, MemPool), which are not modelled"
    if device.skipped:
        return f"{device.skipped:,} entries of the history are damaged"
    return ""


def _notes(device: DeviceHistory, start: AllocatedBefore, broken: bool) -> list[str]:
    found = []
    if broken:
        found.append(
            "the history has gaps: its entries do not lead to the final memory, so only the final state is shown. It "
            "may have been stopped and started again, or some actions were not recorded"
        )
    elif not device.entries:
        found.append(
            "no history: this is the state when the snapshot was written. Call "
            "torch.cuda.memory._record_memory_history() before the training to record one"
        )
    elif not _allocates(device.entries):
        found.append("the history has no allocation: this is the state when the snapshot was written")
    elif start.warm:
        found.append(
            f"the history begins with {size(start.reserved)} reserved; what was in use then was rebuilt from the end"
        )
    if device.skipped:
        found.append(f"{device.skipped:,} damaged entries were skipped")
    return found


def _try_settings(
    found: DeviceMemory,
    start: AllocatedBefore,
    entries: list[HistoryEntry],
    rules: Rules,
    settings: Sequence[str],
) -> None:
    """Add the replays with other settings."""
    emptied = frozenset(release.entry for release in found.releases if release.kind == "empty_cache")
    for setting in settings:
        tried = _with(rules, setting)
        if tried == rules:
            continue
        every = [
            replay(
                start, entries, tried, order, (cap or found.limit.low) if tried.gc_threshold else None,
                releases=emptied, cap=cap, left=found.limit.known != "given",
            )
            for cap in found.limit.caps
            for order in (False, True)
        ]  # fmt: skip
        ended = [one for one in every if not one.failed]
        found.what_ifs.append(
            WhatIf(
                setting, max((one.peak for one in ended), default=None), max(one.retries for one in every),
                max(one.collections for one in every), len(ended) < len(every),
            )
        )  # fmt: skip


def _with(rules: Rules, setting: str) -> Rules:
    """The settings with one of them changed."""
    base = "" if (words := in_words(rules)) == "default" else f"{words},"
    return Rules.of_environment(base + setting)


def to_json(use: SnapshotUse) -> dict[str, Any]:
    """Everything as one JSON document."""
    devices = []
    for device in use.devices:
        body = asdict(device) | {"retries": device.retries}
        for trial, known_trial in zip(body["what_ifs"], device.what_ifs, strict=True):
            trial["verdict"] = known_trial.verdict
        for failure, known in zip(body["failures"], device.failures, strict=True):
            failure["fragmented"] = known.fragmented
        devices.append(body)
    return {"file": str(use.path), "settings": use.settings, "devices": devices}
