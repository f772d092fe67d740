"""A memory snapshot in words: what filled the memory, fragmentation, retries, and other allocator settings."""

from __future__ import annotations

from collections.abc import Iterator

from ndd_engine.recordings.snapshots import ERROR, DeviceMemory, Moment, SnapshotUse
from ndd_engine.text import counted, size

from .blocks import Block, Facts, Table, Text
from .figures import share_text

_LINES = 12  # owners shown


def memory_blocks(use: SnapshotUse) -> Iterator[Block]:
    """The whole snapshot."""
    yield Text(f"{use.path.name}: allocator settings: {use.settings}")
    for device in use.devices:
        yield from _device(device)


def _device(device: DeviceMemory) -> Iterator[Block]:
    streams = f" on {device.streams} streams" if device.streams > 1 else ""
    private = (
        f"{size(device.private_bytes)} (CUDA graphs, torch.compile, MemPool)" if device.private_bytes else ""
    )
    recorded = device.entries and not device.broken
    yield Facts.of(
        ("history", f"{counted(device.allocations, 'allocation')} in {device.entries:,} entries{streams}"),
        *(("note", note) for note in device.notes),
        ("private pools", private),
        *_moment("peak" if recorded else "final state", device.peak),
        *(_releases(device) if recorded else ()),
        title=f"GPU {device.index}",
    )
    yield from _owners(device.peak)
    for failure in device.failures:
        asked = f"{size(failure.asked_bytes)} requested, {size(failure.free_bytes)} free on the GPU"
        pieces = "enough reserved memory was unused, but not in one piece (fragmentation)"
        yield Facts.of(
            ("request", asked),
            ("", pieces if failure.fragmented else ""),
            *_moment("in use", failure.moment),
            title=f"Out of memory at entry {failure.moment.entry:,}",
        )
        yield from _owners(failure.moment)
    yield from _what_ifs(device)


def _moment(title: str, moment: Moment) -> Iterator[tuple[str, str]]:
    reserved, requested, active = moment.reserved_bytes, moment.requested_bytes, moment.active_bytes
    yield title, f"{size(reserved)} reserved, {size(requested)} requested by the program"
    if not reserved:
        return
    if active is None:
        unused = reserved - requested
        yield (
            "not requested",
            f"{size(unused)} ({share_text(unused / reserved)}): rounding, unused, fragmented",
        )
    else:
        idle, lost = reserved - active, active - requested
        yield (
            "fragmentation",
            f"{size(idle)} ({share_text(idle / reserved)}) reserved but unused, {size(lost)} "
            f"({share_text(lost / reserved)}) lost to rounding",
        )


def _owners(moment: Moment) -> Iterator[Block]:
    total = max(moment.requested_bytes, 1)
    rows = tuple(
        (
            size(owner.requested_bytes),
            share_text(owner.requested_bytes / total),
            f"{owner.count:,}x",
            owner.place,
        )
        for owner in moment.owners[:_LINES]
    )
    rest = moment.owners[_LINES:]
    note = (
        f"And {len(rest)} more lines with {size(sum(owner.requested_bytes for owner in rest))}."
        if rest
        else ""
    )
    if rows:
        yield Table("Filled by", ("", "", "", ""), rows, frozenset({0, 1, 2}), note)


def _releases(device: DeviceMemory) -> Iterator[tuple[str, str]]:
    """Retries and other releases of cached memory."""
    retried = sum(release.released_bytes for release in device.releases if release.kind == "retry")
    retries = (
        f"{device.retries}, which released {size(retried)} and waited for the GPU" if retried else "none"
    )
    yield "retries", retries
    other = [release for release in device.releases if release.kind != "retry"]
    if other:
        released = sum(release.released_bytes for release in other)
        yield (
            "released otherwise",
            f"{counted(len(other), 'time')}, {size(released)}, as by torch.cuda.empty_cache()",
        )


def _what_ifs(device: DeviceMemory) -> Iterator[Block]:
    if device.refused:
        yield Text(f"other settings: not replayed: {device.refused}")
    if device.refused or device.peak_error is None:
        return
    recorded = device.peak.reserved_bytes
    wrong = f"{device.wrong_decisions:,} of {device.allocations:,} decisions differ"
    replayed = wrong if device.wrong_decisions else "every segment as recorded"
    doubt = "" if abs(device.peak_error) <= ERROR else "; low confidence"
    rows = []
    for trial in device.what_ifs:
        reserved, change = "out of memory", ""
        if trial.reserved_bytes is not None:
            share = trial.reserved_bytes / recorded - 1 if recorded else 0.0
            reserved, change = size(trial.reserved_bytes), f"{share:+.1%}" if round(share, 3) else "same"
        counts = f"collections: {trial.collections}, retries: {trial.retries}"
        limit = f"memory limit {size(device.limit_bytes)}, {counts}"
        rows.append((trial.setting, reserved, change, limit if trial.setting.startswith("garbage") else ""))
    note = f"Error on this recording {device.peak_error:+.1%}, {replayed}{doubt}."
    yield Table("Replayed with other settings", ("", "", "", ""), tuple(rows), frozenset({1, 2}), note)
