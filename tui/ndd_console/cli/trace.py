"""`ndd-console trace`."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import click

from ndd_console.render import html
from ndd_console.report.collect import collect
from ndd_console.report.model import Report
from ndd_console.report.sections import page
from ndd_console.words.trace import one_trace, several_traces
from ndd_engine.errors import UsageError
from ndd_engine.files import write_text
from ndd_engine.record.events import FindingEvent
from ndd_engine.record.rundir import RunDir
from ndd_engine.recordings import traces
from ndd_engine.recordings.traces import TraceUse
from ndd_engine.text import printable

from .measuring import check_writable
from .options import command, flag, json_option, output_option
from .printing import say, show

# Reading a longer trace takes seconds; a message explains the wait.
LONG_BYTES = 20 << 20


@command(
    "0 read, 2 usage error or damaged file",
    "trace trace.json.gz", "trace rank0.json rank1.json", "trace traces/ --json", "trace trace.json -o trace.html",
)  # fmt: skip
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@flag("--whole", help="Examine the whole trace (default: only its whole profiler steps, if it has any).")
@json_option
@output_option("Write the report of one trace as an HTML page.")
def trace(files: tuple[Path, ...], whole: bool, as_json: bool, output: Path | None) -> None:
    """FILES are traces (JSON or .json.gz) or folders of traces, of one process or of several ranks.

    They are from torch 1.8.1 and later, CUDA or ROCm. Shows for each GPU how long it was busy and idle and why, the
    exposed and hidden time of collectives, the longest kernels, and the findings. Nothing in a trace is executed.
    """
    trace_paths = traces.trace_files(files)
    if output is not None and (len(trace_paths) > 1 or as_json):
        raise UsageError("-o writes the report of one trace, and not together with --json")
    check_writable(output)
    uses = []
    for path in trace_paths:
        if len(trace_paths) > 1 or (path.is_file() and path.stat().st_size > LONG_BYTES):
            say(f"reading {path}")
        uses.append(traces.examine(path, whole))
    uses.sort(key=lambda use: (use.rank is None, use.rank or 0, str(use.path)))
    if as_json:
        show(traces.to_json(uses))
        return
    if output is not None:
        _write_report(uses[0], output)
        return
    show(several_traces(uses) if len(uses) > 1 else one_trace(uses[0]))


def _write_report(use: TraceUse, output: Path) -> None:
    device = max(use.devices, key=lambda item: item.time.busy_ns)
    findings = traces.findings(use, device)
    with tempfile.TemporaryDirectory(prefix="ndd-trace-") as folder:
        directory = RunDir(Path(folder) / printable(use.path.name))
        directory.path.mkdir()
        lines = []
        for t, event in traces.record(use, device):
            if event.type == "end":
                appeared = (
                    FindingEvent(len(use.steps), finding.cause, finding.title) for finding in findings
                )
                lines += [found.to_json(t) for found in appeared]
            lines.append(event.to_json(t))
        directory.events.write_text("\n".join(lines) + "\n", encoding="utf-8")
        report = Report(
            directory, traces.snapshot(use, device), tuple(findings), "", collect(directory), time.time()
        )
        write_text(output, html.render(page(report)))
    show([str(output)])
