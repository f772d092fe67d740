"""`ndd-console attach`: watch a run, live or finished, and steer a live one."""

from __future__ import annotations

import queue
import time

import click

from ndd_console.jobs.run_sources import AttachedSource
from ndd_console.output.progress import RunProgress, summary
from ndd_console.process.terminal import interactive
from ndd_engine.errors import EXIT_DONE, EXIT_FAILED
from ndd_engine.record.events import Event
from ndd_engine.record.rundir import find_run, runs_root

from .completion import run_names


@click.command()
@click.argument("run", required=False, shell_complete=run_names)
@click.option("--headless", is_flag=True, help="Lines instead of the screen, until the run ends.")
@click.pass_context
def attach(ctx: click.Context, run: str | None, headless: bool) -> int:
    """Watch RUN (default: the newest, a live one first). Closing the screen leaves the run as it is."""
    directory = find_run(runs_root(ctx.obj["runs"]), run)
    if not headless and interactive():
        from ndd_console.jobs.training import watch

        return watch(AttachedSource(directory), ctx.obj["ascii"])
    heard: queue.SimpleQueue[tuple[float, Event]] = queue.SimpleQueue()
    source = AttachedSource(directory, listener=lambda t, event: heard.put((t, event)))
    progress = RunProgress(lambda line: click.echo(line, err=True))
    try:
        while True:
            snapshot = source.snapshot()
            while not heard.empty():
                progress.hear(*heard.get())
            progress.look(snapshot)
            if snapshot.final:
                break
            time.sleep(0.5)
    except KeyboardInterrupt:
        click.echo("left; the run goes on", err=True)
        return EXIT_DONE
    for line in summary(snapshot, snapshot.end, str(directory.path)):
        click.echo(line)
    return snapshot.end.exit_status if snapshot.end else EXIT_FAILED
