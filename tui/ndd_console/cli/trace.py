"""`ndd-console trace`."""

from __future__ import annotations

import time
from pathlib import Path

import click

from ndd_console.render import html
from ndd_console.words.trace import trace_blocks, trace_page
from ndd_engine.errors import UsageError
from ndd_engine.files import write_text
from ndd_engine.recordings import traces

from .options import command, flag, json_option, output_option
from .printing import check_writable, show, tell_reading


@command(
    "0 read, 2 usage error or damaged file",
    "trace trace.json.gz", "trace rank0.json rank1.json", "trace traces/ --json", "trace traces/ -o trace.html",
)  # fmt: skip
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@flag("--whole", help="Examine the whole trace (default: only its whole profiler steps, if it has any).")
@json_option
@output_option("Write the report as an HTML page.")
def trace(files: tuple[Path, ...], whole: bool, as_json: bool, output: Path | None) -> None:
    """FILES are traces (JSON or .json.gz) or folders of traces, of one process or of several ranks.

    They are from torch 1.8.1 and later, CUDA or ROCm. Shows for each GPU how long it was busy and idle and why, the
    exposed and hidden time of collectives, the longest kernels, phases and findings. Nothing in a trace is executed.
    """
    trace_paths = traces.trace_files(files)
    if output is not None and as_json:
        raise UsageError("-o writes a page, and --json prints a document: choose one")
    check_writable(output)
    uses = []
    for path in trace_paths:
        tell_reading(path, len(trace_paths) > 1)
        uses.append(traces.examine(path, whole))
    uses.sort(key=lambda use: (use.rank is None, use.rank or 0, str(use.path)))
    if as_json:
        show(traces.to_json(uses))
        return
    if output is not None:
        write_text(output, html.render(trace_page(uses, time.time())))
        show([str(output)])
        return
    show(trace_blocks(uses))
