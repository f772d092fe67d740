"""A memory snapshot in words: what filled the memory, fragmentation, retries, and other allocator settings."""

from __future__ import annotations

from collections.abc import Iterator

from ndd_engine.recordings.snapshots import ERROR, DeviceMemory, Limit, Moment, SnapshotUse
from ndd_engine.text import counted, size

from .blocks import Block, Facts, Table, Text
from .figures import share_text

_LINES = 12  # owners shown
# A moment with more in use than at the most reserved memory is shown as well, from this difference on.
TRIFLE = 0.02


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
    recorded = device.allocations and not device.broken
    peak, used = device.peak, device.most_in_use
    apart = bool(recorded) and used.requested_bytes > (1 + TRIFLE) * peak.requested_bytes
    yield Facts.of(
        (
            "history",
            f"{counted(device.allocations, 'allocation')} in {counted(device.entries, 'entry')}{streams}",
        ),
        *(("note", note) for note in device.notes),
        ("private pools", private),
        *_moment("most reserved" if apart else "peak" if recorded else "final state", peak, apart),
        *(_moment("most in use", used, apart) if apart else ()),
        *(_releases(device) if recorded else ()),
        title=f"GPU {device.index}",
    )
    yield from _owners(used if apart else peak, "Filled by, when most was in use" if apart else "Filled by")
    for failure in device.failures:
        asked = f"{size(failure.asked_bytes)} requested, {size(failure.free_bytes)} free on the GPU"
        pieces = "enough reserved memory was unused, but not in one piece (fragmentation)"
        yield Facts.of(
            ("request", asked),
            ("", pieces if failure.fragmented else ""),
            *_moment("in use", failure.moment),
            title=f"Out of memory at entry {failure.moment.entry:,}",
        )
        yield from _owners(failure.moment, "Filled by")
    yield from _what_ifs(device)


def _moment(title: str, moment: Moment, when: bool = False) -> Iterator[tuple[str, str]]:
    reserved, requested, active = moment.reserved_bytes, moment.requested_bytes, moment.active_bytes
    after = f", after {counted(moment.entry, 'entry')}" if when else ""
    yield title, f"{size(reserved)} reserved, {size(requested)} requested by the program{after}"
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


def _owners(moment: Moment, title: str) -> Iterator[Block]:
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
        f"And {len(rest):,} more lines with {size(sum(owner.requested_bytes for owner in rest))}."
        if rest
        else ""
    )
    if rows:
        yield Table(title, ("requested", "share", "blocks", "line"), rows, frozenset({0, 1, 2}), note)


def _releases(device: DeviceMemory) -> Iterator[tuple[str, str]]:
    """Retries and other releases of cached memory."""
    retried = sum(release.released_bytes for release in device.releases if release.kind == "retry")
    retries = (
        f"{device.retries:,}, which released {size(retried)} and waited for the GPU" if retried else "none"
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
        verdict = trial.verdict if trial.reserved_bytes is not None else ""
        verdict += f": {trial.retries:,}" if verdict == "with retries" else ""
        collected = counted(trial.collections, "collection") if trial.collections else ""
        rows.append((trial.setting, reserved, change, ", ".join(filter(None, (verdict, collected)))))
    note = f"Error on this recording {device.peak_error:+.1%}, {replayed}{doubt}. {_limit_text(device.limit)}"
    columns = ("setting", "reserved", "change", "outcome")
    yield Table("Replayed with other settings", columns, tuple(rows), frozenset({1, 2}), note)


def _limit_text(limit: Limit) -> str:
    """Under which limit the settings were replayed."""
    low, high = size(limit.low), size(limit.high)
    match limit.known:
        case "given":
            return f"Replayed with a limit of {low}."
        case "out of memory":
            return (
                f"Replayed with a limit of {low}: what was reserved when a request failed, and what was left."
            )
        case "retries":
            return f"Replayed with limits of {low} and {high}: retries prove that the limit is between."
    return f"Replayed without a limit, but garbage collection for one of {low}, the most that was reserved."
