"""`ndd-console trace`."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import click

from ndd_console.render import html
from ndd_console.report.collect import collect
from ndd_console.report.model import Report
from ndd_console.report.sections import page
from ndd_engine.diagnose import CAUSES, Finding
from ndd_engine.errors import UsageError
from ndd_engine.files import write_text
from ndd_engine.record.derive import COLLECTIVES, IDLE_CAUSES
from ndd_engine.record.events import FindingEvent
from ndd_engine.record.rundir import RunDir
from ndd_engine.recordings import trace as traces
from ndd_engine.recordings.trace import DeviceUse, TraceUse
from ndd_engine.text import duration, percent, printable, times

from .measuring import check_writable
from .options import command, flag, json_option, output_option
from .printing import say, show, table

NAME = 70  # characters shown of a kernel's name
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
    """Diagnose traces of torch.profiler (JSON or .json.gz), of one process or of several ranks.

    FILES are traces or folders of traces, from torch 1.8.1 and later, CUDA or ROCm. Shows for each GPU how long it was
    busy and idle and why, the exposed and hidden time of collectives, the longest kernels, and the findings. Nothing in
    a trace is executed.
    """
    found = traces.trace_files(files)
    if output is not None and (len(found) > 1 or as_json):
        raise UsageError("-o writes the report of one trace, and not together with --json")
    check_writable(output)
    uses = []
    for path in found:
        if len(found) > 1 or (path.is_file() and path.stat().st_size > LONG_BYTES):
            say(f"reading {path}")
        uses.append(traces.examine(path, whole))
    uses.sort(key=lambda use: (use.rank is None, use.rank or 0, str(use.path)))
    if as_json:
        show(traces.to_json(uses))
        return
    if output is not None:
        _write_report(uses[0], output)
        return
    show(_several(uses) if len(uses) > 1 else _one(uses[0]))


def _one(use: TraceUse) -> Iterator[str]:
    yield f"{printable(use.path.name)}: {_examined(use)}"
    if use.skipped:
        yield f"{use.skipped:,} damaged events were skipped"
    for device in use.devices:
        yield ""
        yield from _device(use, device)
    yield ""
    yield from _phases(use)


def _examined(use: TraceUse) -> str:
    count = len(use.steps)
    what = f"{count} whole step{'' if count == 1 else 's'}" if count else "the whole trace"
    rank = (
        "" if use.rank is None else f", rank {use.rank}" + (f" of {use.world_size}" if use.world_size else "")
    )
    return f"{what}, {duration(use.wall_ns * 1e-9)}{rank}"


def _device(use: TraceUse, device: DeviceUse) -> Iterator[str]:
    found, wall = device.time, device.time.wall_ns
    label = "CPU" if device.index is None else f"GPU {device.index}, {device.name}"
    yield f"{label}: busy {percent(1 - device.idle)}, idle {percent(device.idle)}"
    rows = [(f"  {cause}", percent(found.idle_ns[cause] / wall), duration(found.idle_ns[cause] * 1e-9))
            for cause in IDLE_CAUSES if cause in found.idle_ns]  # fmt: skip
    if rows:
        yield "  idle by cause"
        yield from (f"  {line}" for line in table(rows, right=(1, 2)))
    if found.collective_ns:
        hidden = found.collective_ns - found.exposed_ns
        yield f"  {COLLECTIVES}: exposed {percent(found.exposed_ns / wall)}, hidden {percent(hidden / wall)}"
    if device.index is not None:
        yield f"  copies: {percent(found.copy_ns / wall)}; kernels launched: {found.launches:,}"
    yield f"  longest {'kernels' if device.index is not None else 'operators'}"
    top = [(f"  {str(name)[:NAME]}", percent(int(ns) / wall), f"{count:,}x") for name, ns, count in found.top]
    yield from (f"  {line}" for line in table(top, right=(1, 2)))
    for finding in traces.findings(use, device):
        yield from _finding(finding)


def _finding(finding: Finding) -> Iterator[str]:
    bound = f" (at most {times(finding.ceiling)} faster without it)" if finding.ceiling else ""
    yield f"  {CAUSES[finding.cause]}: {finding.title}{bound}; {finding.confidence}"
    yield from (f"    {item.text}" for item in finding.evidence)
    yield from (f"    try: {change.text}" for change in finding.changes)


def _phases(use: TraceUse) -> Iterator[str]:
    yield "phases of the training thread, inferred"
    rows = [
        (f"  {phase}", percent(ns / use.wall_ns), f"from {use.sources.get(phase, 'the rest')}")
        for phase, ns in sorted(use.phase_ns(use.begin, use.end).items(), key=lambda item: -item[1])
    ]
    yield from table(rows, right=(1,))


def _several(uses: list[TraceUse]) -> Iterator[str]:
    """One line for each rank and GPU, then the findings of the one with the most exposed idle time."""
    rows = [("rank", "file", "gpu", "wall", "busy", "idle", "exposed", "hidden", "main cause of idle time")]
    every = [(use, device) for use in uses for device in use.devices]
    for use, device in every:
        found, wall = device.time, device.time.wall_ns
        cause = max(found.idle_ns, key=found.idle_ns.__getitem__, default="none")
        rows.append((
            "-" if use.rank is None else str(use.rank), printable(use.path.name),
            "-" if device.index is None else str(device.index), duration(wall * 1e-9), percent(1 - device.idle),
            percent(device.idle), percent(found.exposed_ns / wall),
            percent((found.collective_ns - found.exposed_ns) / wall), cause,
        ))  # fmt: skip
    yield from table(rows, right=(0, 2, 3, 4, 5, 6, 7))
    if all(device.time.collective_ns for _, device in every):
        # A rank that arrives late waits least for the others.
        use, device = min(every, key=lambda item: item[1].time.exposed_ns / item[1].time.wall_ns)
        why = "waits least for other ranks"
    else:
        use, device = max(every, key=lambda item: item[1].idle)
        why = "most idle time"
    yield ""
    yield f"{why}: {printable(use.path.name)}, {_examined(use)}"
    yield from _device(use, device)


def _write_report(use: TraceUse, output: Path) -> None:
    device = max(use.devices, key=lambda item: item.time.busy_ns)
    findings = traces.findings(use, device)
    with tempfile.TemporaryDirectory(prefix="ndd-trace-") as folder:
        directory = RunDir(Path(folder) / printable(use.path.name))
        directory.path.mkdir()
        lines = []
        for t, event in traces.record(use, device):
            if event.type == "end":
                lines += [_found(finding, len(use.steps)).to_json(t) for finding in findings]
            lines.append(event.to_json(t))
        directory.events.write_text("\n".join(lines) + "\n", encoding="utf-8")
        report = Report(
            directory, traces.snapshot(use, device), tuple(findings), "", collect(directory), time.time()
        )
        write_text(output, html.render(page(report)))
    click.echo(printable(str(output)))


def _found(finding: Finding, step: int) -> FindingEvent:
    return FindingEvent(step, finding.cause, finding.title)
