"""`ndd-console memory`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from ndd_engine.errors import EXIT_DONE, EXIT_USAGE
from ndd_engine.recordings import snapshot
from ndd_engine.recordings.snapshot import DeviceMemory, Moment, SnapshotUse
from ndd_engine.text import percent, printable, size

from .options import Finite, command, json_option
from .printing import say, show, table

LINES = 12  # owners shown
# Reading a longer snapshot takes seconds; a message explains the wait.
LONG_BYTES = 20 << 20


@command(
    "0 explained, 2 usage error, damaged file, or a history that does not lead to the final memory",
    "memory snapshot.pickle",
    "memory snapshot.pickle.gz --json",
    "memory snapshot.pickle --setting max_split_size_mb:64 --limit 16384",
)
@click.argument("snapshot_file", metavar="SNAPSHOT", type=click.Path(path_type=Path))
@click.option(
    "--setting", "settings", multiple=True, metavar="NAME:VALUE",
    help="Allocator setting to try, as in PYTORCH_ALLOC_CONF; repeatable (default: a few common ones).",
)  # fmt: skip
@click.option(
    "--limit", type=Finite(min=1), metavar="MB",
    help="Memory limit assumed for garbage_collection_threshold (default: the recorded peak).",
)  # fmt: skip
@json_option
def memory(snapshot_file: Path, settings: tuple[str, ...], limit: float | None, as_json: bool) -> int:
    """Explain a snapshot of torch.cuda.memory._dump_snapshot(): pickle or .gz, from torch 2.0 and later.

    Shows for each GPU which lines of the program filled the memory at its peak, how much was fragmentation, retries and
    out-of-memory errors, and what other allocator settings would have reserved. Nothing in the file is executed.
    """
    if snapshot_file.is_file() and snapshot_file.stat().st_size > LONG_BYTES:
        say(f"reading {snapshot_file}")
    limit_bytes = None if limit is None else int(limit * (1 << 20))
    use = snapshot.examine(snapshot_file, settings or snapshot.SETTINGS, limit_bytes)
    show(snapshot.to_json(use) if as_json else _lines(use))
    return EXIT_USAGE if any(device.broken for device in use.devices) else EXIT_DONE


def _lines(use: SnapshotUse) -> Iterator[str]:
    yield f"{printable(use.path.name)}: allocator settings: {use.settings}"
    for device in use.devices:
        yield ""
        yield from _device(device)


def _device(device: DeviceMemory) -> Iterator[str]:
    streams = f" on {device.streams} streams" if device.streams > 1 else ""
    yield f"GPU {device.index}: {device.allocations:,} allocations in {device.entries:,} entries{streams}"
    yield from (f"  {note}" for note in device.notes)
    if device.private_bytes:
        yield f"  private pools (CUDA graphs, torch.compile, MemPool): {size(device.private_bytes)}"
    shown = device.peak
    recorded = device.entries and not device.broken
    yield from _moment("peak" if recorded else "final state", shown)
    yield from _owners(shown)
    for failure in device.failures:
        yield (
            f"  out of memory at entry {failure.moment.entry:,}: {size(failure.asked_bytes)} requested, "
            f"{size(failure.free_bytes)} free on the GPU"
        )
        if failure.fragmented:
            yield "    enough reserved memory was unused, but not in one piece (fragmentation)"
        yield from (f"  {line}" for line in _moment("in use", failure.moment))
        yield from (f"  {line}" for line in _owners(failure.moment))
    yield from _releases(device)
    yield from _what_ifs(device)


def _moment(title: str, moment: Moment) -> Iterator[str]:
    reserved, requested, active = moment.reserved_bytes, moment.requested_bytes, moment.active_bytes
    yield f"  {title}: {size(reserved)} reserved, {size(requested)} requested by the program"
    if not reserved:
        return
    if active is None:
        unused = reserved - requested
        yield f"    not requested: {size(unused)} ({percent(unused / reserved)}): rounding, unused, fragmented"
    else:
        idle, lost = reserved - active, active - requested
        yield (
            f"    fragmentation: {size(idle)} ({percent(idle / reserved)}) reserved but unused, "
            f"{size(lost)} ({percent(lost / reserved)}) lost to rounding"
        )


def _owners(moment: Moment) -> Iterator[str]:
    if not moment.owners:
        return
    total = max(moment.requested_bytes, 1)
    rows = [
        (
            f"    {size(owner.requested_bytes)}",
            percent(owner.requested_bytes / total),
            f"{owner.count:,}x",
            owner.place,
        )
        for owner in moment.owners[:LINES]
    ]
    yield "  filled by"
    yield from table(rows, right=(0, 1, 2))
    if len(moment.owners) > LINES:
        rest = sum(owner.requested_bytes for owner in moment.owners[LINES:])
        yield f"    and {len(moment.owners) - LINES} more lines with {size(rest)}"


def _releases(device: DeviceMemory) -> Iterator[str]:
    """Retries and other releases of cached memory."""
    if not device.entries or device.broken:
        return
    if not device.releases:
        yield "  retries: none"
        return
    retried = sum(release.released_bytes for release in device.releases if release.kind == "retry")
    words = f"{device.retries}, which released {size(retried)} and waited for the GPU" if retried else "none"
    yield f"  retries: {words}"
    other = [release for release in device.releases if release.kind != "retry"]
    if other:
        released = sum(release.released_bytes for release in other)
        yield f"  released otherwise, as by torch.cuda.empty_cache(): {len(other)} times, {size(released)}"


def _what_ifs(device: DeviceMemory) -> Iterator[str]:
    if device.refused:
        yield f"  other settings: not replayed: {device.refused}"
        return
    if device.peak_error is None:
        return
    recorded = device.peak.reserved_bytes
    wrong = "every segment as recorded" if not device.wrong_decisions else (
        f"{device.wrong_decisions:,} of {device.allocations:,} decisions differ"
    )  # fmt: skip
    low = "" if abs(device.peak_error) <= snapshot.ERROR else "; low confidence"
    yield f"  replayed with other settings (error on this recording {device.peak_error:+.1%}, {wrong}{low})"
    rows = []
    for one in device.what_ifs:
        if one.reserved_bytes is None:
            cells = ["out of memory", ""]
        else:
            change = one.reserved_bytes / recorded - 1 if recorded else 0.0
            cells = [size(one.reserved_bytes), f"{change:+.1%}" if round(change, 3) else "same"]
        limit = (
            f"memory limit {size(device.limit_bytes)}, collections: {one.collections}, retries: {one.retries}"
            if one.setting.startswith("garbage")
            else ""
        )
        rows.append((f"    {printable(one.setting)}", *cells, limit))
    yield from table(rows, right=(1, 2))
