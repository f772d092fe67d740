"""`ndd-console memory`."""

from __future__ import annotations

from pathlib import Path

import click

from ndd_console.words.trace import memory_blocks
from ndd_engine.errors import EXIT_DONE, EXIT_USAGE
from ndd_engine.recordings import snapshots

from .options import FiniteNumber, command, json_option
from .printing import show, tell_reading


@command(
    "0 explained, 2 usage error, damaged file, or a history that does not lead to the final memory",
    "memory snapshot.pickle",
    "memory snapshot.pickle.gz --json",
    "memory snapshot.pickle --setting max_split_size_mb:64",
)
@click.argument("snapshot_file", metavar="SNAPSHOT", type=click.Path(path_type=Path))
@click.option(
    "--setting", "settings", multiple=True, metavar="NAME:VALUE",
    help="Allocator setting to try, as in PYTORCH_ALLOC_CONF; repeatable (default: a few common ones).",
)  # fmt: skip
@click.option(
    "--limit", type=FiniteNumber(min=1), metavar="MiB",
    help="Memory limit of the process (default: what the recording proves).",
)  # fmt: skip
@json_option
def memory(snapshot_file: Path, settings: tuple[str, ...], limit: float | None, as_json: bool) -> int:
    """SNAPSHOT is a file of torch.cuda.memory._dump_snapshot(): pickle or .gz, from torch 2.0 and later.

    Shows for each GPU which lines of the program filled the memory at its peak, how much was fragmentation, retries and
    out-of-memory errors, and what other allocator settings would have reserved. Nothing in the file is executed.
    """
    tell_reading(snapshot_file)
    limit_bytes = None if limit is None else int(limit * (1 << 20))
    use = snapshots.examine(snapshot_file, settings or snapshots.SETTINGS, limit_bytes)
    show(snapshots.to_json(use) if as_json else memory_blocks(use))
    return EXIT_USAGE if any(device.broken for device in use.devices) else EXIT_DONE
