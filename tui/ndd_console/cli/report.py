"""`ndd-console report`."""

from __future__ import annotations

import json

import click

from ndd_console.render import html, text
from ndd_console.report.model import load
from ndd_console.report.sections import page
from ndd_engine.errors import UsageError
from ndd_engine.files import write_text
from ndd_engine.record.events import writable
from ndd_engine.record.file import damage_text
from ndd_engine.record.rundir import find_run

from .options import Asked, command, flag, gathered, output_option, run_argument
from .printing import check_writable, say, show, tell_reading


@command(
    "0 written, 2 usage error", "report", "report chartext-001 -o run.html", "report chartext-001 --text"
)
@run_argument
@output_option("Output file (default: report.html in the run's folder).")
@flag("--text", "as_text", help="Print plain text, 100 columns wide.")
@flag("--json", "as_json", help="Print the figures as one JSON document.")
@gathered
def report(asked: Asked) -> None:
    """The page has findings, measured gains, plots, settings and methods. It needs no network and contains no
    script.
    """
    as_text, as_json, output = asked.as_text, asked.as_json, asked.output
    if as_text and as_json:
        raise UsageError("--text and --json exclude each other")
    directory = find_run(asked.root, asked.run)
    check_writable(output)
    tell_reading(directory.events)
    loaded = load(directory)
    if loaded.data.skipped:
        say(f"warning: {damage_text(loaded.data.skipped)}")
    if as_json:
        written = json.dumps(writable(loaded.to_json()), indent=2, allow_nan=False) + "\n"
    elif as_text:
        written = text.page_text(page(loaded), asked.ascii)
    else:
        written = html.render(page(loaded))
    if output is None and (as_text or as_json):
        click.echo(written, nl=False)
        return
    path = output or directory.report
    try:
        write_text(path, written, "-o " if output else "")
    except UsageError as error:
        raise UsageError(f"{error}; choose another file with -o") from None
    show([str(path)])
