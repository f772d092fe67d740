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

# A longer record takes seconds to read: worth a word.
LONG_BYTES = 64 << 20


@click.command()
@click.argument("run", required=False, shell_complete=run_names)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write it there (default: report.html in the run's folder).",
)
@click.option("--text", "as_text", is_flag=True, help="Plain text of 100 columns on standard output.")
@click.option("--json", "as_json", is_flag=True, help="The figures as one JSON document on standard output.")
@click.pass_context
def report(ctx: click.Context, run: str | None, output: Path | None, as_text: bool, as_json: bool) -> None:
    """Write RUN (default: the newest, a live one first) as one HTML page: verdict, plots, trials, settings.

    RUN is a name in the runs folder or the path of a run's folder. The page needs no network and holds no script.
    """
    if as_text and as_json:
        raise UsageError("--text and --json exclude each other: each is the whole of standard output")
    directory = find_run(runs_root(ctx.obj["runs"]), run)
    if (length := _length(directory.events)) > LONG_BYTES:
        click.echo(f"reading {size(length)} of record", err=True)
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
    """Bytes of a file; 0 where there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def write(path: Path, content: str) -> None:
    """A file whole or not at all. Raises UsageError that says why it cannot be written."""
    if path.is_dir():
        raise UsageError(f"-o {printable(str(path))}: is a folder; name a file in it")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(content, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UsageError(
            f"-o {printable(str(path))}: cannot be written: {error.strerror}; choose another file with -o"
        ) from None
