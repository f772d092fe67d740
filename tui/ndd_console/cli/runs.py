"""`ndd-console runs`: the runs here, newest first."""

from __future__ import annotations

import dataclasses
import json
import time

import click

from ndd_console.jobs.run_sources import HomeFolder
from ndd_engine.record.rundir import runs_root
from ndd_engine.text import MISSING, number, printable


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
@click.pass_context
def runs(ctx: click.Context, as_json: bool) -> None:
    """List the runs here, newest first."""
    root = runs_root(ctx.obj["runs"])
    rows = HomeFolder(root).runs()
    if as_json:
        click.echo(
            json.dumps({"folder": str(root), "runs": [dataclasses.asdict(row) for row in rows]}, indent=2)
        )
        return
    if not rows:
        click.echo(f"no runs in {printable(str(root))}; start one: ndd-console train", err=True)
        return
    kind = max(10, *(len(printable(row.workload)) for row in rows))
    click.echo(f"{'run':<24} {'workload':<{kind}} {'status':<13} {'step':>18}  {'started':<16}  best")
    for row in rows:
        step = f"{number(row.step)}/{number(row.total_steps)}"
        started = time.strftime("%Y-%m-%d %H:%M", time.localtime(row.started_t)) if row.started_t else MISSING
        status = row.status + (" *" if row.live else "")
        click.echo(
            f"{printable(row.name):<24} {printable(row.workload):<{kind}} {status:<13} {step:>18}  "
            f"{started:<16}  {printable(row.best)}"
        )
