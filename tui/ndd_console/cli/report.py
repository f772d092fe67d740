"""`ndd-console report`: a run as one self-contained HTML page, or as text."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

from ndd_console.report import html, text
from ndd_console.report.model import load
from ndd_console.report.sections import page
from ndd_engine.errors import UsageError
from ndd_engine.record.events import finite
from ndd_engine.record.rundir import find_run, runs_root
from ndd_engine.text import printable, size

from .completion import run_names

# Reading a longer record takes seconds; a message explains the wait.
LONG_BYTES = 64 << 20


@click.command()
@click.argument("run", required=False, shell_complete=run_names)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Output file (default: report.html in the run's folder).",
)
@click.option("--text", "as_text", is_flag=True, help="Print plain text, 100 columns wide.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
@click.pass_context
def report(ctx: click.Context, run: str | None, output: Path | None, as_text: bool, as_json: bool) -> None:
    """Write RUN as one HTML page: verdict, measured gains, plots, settings, methods.

    RUN is a name in the runs folder or the path of a run's folder; the default is the live run, or the newest. The
    page needs no network and contains no script.
    """
    if as_text and as_json:
        raise UsageError("--text and --json exclude each other")
    directory = find_run(runs_root(ctx.obj["runs"]), run)
    if (length := _length(directory.events)) > LONG_BYTES:
        click.echo(f"reading {size(length)} of records", err=True)
    found = load(directory)
    if as_json:
        written = json.dumps(finite(found.to_json()), indent=2, allow_nan=False) + "\n"
    elif as_text:
        written = text.render(page(found), ctx.obj["ascii"])
    else:
        written = html.render(page(found))
    if output is None and (as_text or as_json):
        click.echo(written, nl=False)
        return
    path = output if output is not None else found.directory.path / "report.html"
    write(path, written)
    click.echo(printable(str(path)))


def _length(path: Path) -> int:
    """Bytes of a file; 0 if there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def write(path: Path, content: str) -> None:
    """Write a file atomically. Raises UsageError if it cannot be written."""
    if path.is_dir():
        raise UsageError(f"-o {printable(str(path))} is a folder; name a file in it")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(content, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UsageError(
            f"-o {printable(str(path))} cannot be written: {error.strerror}; choose another file with -o"
        ) from None
