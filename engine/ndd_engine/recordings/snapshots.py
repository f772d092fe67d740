"""Explains a memory snapshot: what filled the GPU at its peak, fragmentation, retries, and other allocator settings.

The history is replayed in the simulated allocator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ndd_engine.errors import UsageError
from ndd_engine.measure.memory_owners import Owner, owners
from ndd_engine.predict.allocator import UNLIMITED, Rules
from ndd_engine.text import printable, size

from .history import ALLOC, Release, Request, Start, live_at, releases, start_of, states
from .replays import Limit, Replayed, limit_of, replay
from .snapshot_file import DeviceHistory, Entry, read_snapshot

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
    for setting in settings:
        if setting not in SETTINGS and _with(rules, setting) == rules:
            raise UsageError(
                f"--setting {printable(setting)}: not different from the recorded settings, or not modelled"
            )
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
        return Moment(place, *_pair(every[place], active), _owners(live_at(start, entries, place)))

    found = DeviceMemory(
        device.index, len(device.entries), sum(entry.action == ALLOC for entry in device.entries),
        len({entry.stream for entry in device.entries if entry.action == ALLOC}), start.reserved,
        moment(at), moment(used), moment(len(entries)), limit,
        sum(item.size for item in device.segments if item.private), refused,
        broken=broken, releases=found_releases,
    )  # fmt: skip
    failed = [(place, entry) for place, entry in enumerate(entries) if entry.action == "oom"]
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


def _allocates(entries: Sequence[Entry]) -> bool:
    return any(entry.action == ALLOC for entry in entries)


def _owners(requests: list[Request]) -> tuple[Owner, ...]:
    return owners((request.frames, request.requested) for request in requests)


def _pair(level: tuple[int, int], active: int | None) -> tuple[int, int | None, int]:
    return level[0], active, level[1]


def _refused(device: DeviceHistory, start: Start) -> str:
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


def _notes(device: DeviceHistory, start: Start, broken: bool) -> list[str]:
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
    found: DeviceMemory, start: Start, entries: list[Entry], rules: Rules, settings: Sequence[str]
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
                releases=emptied, cap=cap,
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
