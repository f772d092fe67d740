"""`ndd-console log`."""

from __future__ import annotations

import time

import click

from ndd_console.jobs.log_tail import LogTail
from ndd_engine.record.rundir import find_run

from .options import Asked, command, flag, gathered, run_argument

_POLL_S = 0.5


@command("0 printed, 2 usage error", "log", "log chartext-001", "log last --follow")
@run_argument
@flag("--follow", "-f", "follow", help="Print further lines until the run ends.")
@gathered
def log(asked: Asked) -> None:
    """Control characters are escaped. Of a long log, the last 800 KB are printed; the whole is console.log in the run's
    folder.
    """
    directory = find_run(asked.root, asked.run)
    tail = LogTail(directory.console_log)
    while True:
        live = directory.live_owner() is not None  # before reading: what it writes last is read, too
        for line in tail.read():
            click.echo(line)
        if not (live and asked.follow):
            break
        time.sleep(_POLL_S)
    if tail.unfinished:
        click.echo(tail.unfinished)
