"""`ndd-console runs`."""

from __future__ import annotations

import dataclasses
import time

import click

from ndd_console.jobs.run_sources import HomeFolder
from ndd_console.screens.interfaces import RunRow
from ndd_console.view.rows import foreign
from ndd_engine.record.log import damage_text
from ndd_engine.record.rundir import runs_root
from ndd_engine.text import MISSING, number

from .options import command, json_option
from .printing import say, show, table

_HEADINGS = ("run", "workload", "status", "step", "started", "best")


@command("0", "runs", "--runs ~/experiments runs --json")
@json_option
@click.pass_context
def runs(ctx: click.Context, as_json: bool) -> None:
    """List the runs in the runs folder, newest first. An asterisk marks a live run."""
    root = runs_root(ctx.obj["runs"])
    home = HomeFolder(root)
    rows = home.runs()
    if as_json:
        show({"folder": str(root), "runs": [dataclasses.asdict(row) for row in rows]})
    elif rows:
        show(table([_HEADINGS, *map(_cells, rows)], right={3}))
    else:
        say(f"no runs in {root}; start one with: ndd-console train")
    for name, count in home.damaged.items():
        say(f"warning: run {name}: {damage_text(count)}")


def _cells(row: RunRow) -> tuple[str, ...]:
    started = time.strftime("%Y-%m-%d %H:%M", time.localtime(row.started_t)) if row.started_t else MISSING
    return (
        foreign(row.name), foreign(row.workload), foreign(row.status) + (" *" if row.live else ""),
        number(row.step) + (f"/{number(row.total_steps)}" if row.total_steps else ""), started, foreign(row.best),
    )  # fmt: skip
