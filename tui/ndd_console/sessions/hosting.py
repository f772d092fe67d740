"""A screen for work in a thread. Signals and a lost terminal close it; prints are discarded."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import click

from ndd_console.app import ScreenApp
from ndd_console.process.terminal import Leash, LostTerminal, captured
from ndd_console.process.thread import ThreadJob
from ndd_engine.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_TERMINATED
from ndd_engine.text import printable


@contextmanager
def captured_for(app: ScreenApp, log: Path, leash: Leash) -> Iterator[LostTerminal]:
    """Redirect all output to the log. Textual discards prints while it runs; they belong into the log as well."""
    with captured(log) as (terminal, stream):
        app.capture(stream)
        leash.screen(True)
        yield terminal
        leash.screen(False)
        for text in app.failures:
            stream.write(text)


def report_failure(app: ScreenApp, log: Path | None = None) -> int:
    """Print why a screen failed. Returns the exit status: 0 if none did. log: file with the traceback."""
    if not app.failures:
        return EXIT_DONE
    *lines, last = app.failures[0].rstrip().splitlines()
    for line in () if log else lines:
        click.echo(printable(line), err=True)
    where = f" (traceback in {log})" if log else ""
    click.echo(printable(f"ndd-console: the screen failed: {last}{where}"), err=True)
    return EXIT_FAILED


def hosted(app: ScreenApp, work: ThreadJob, leash: Leash) -> int:
    """Run the app until it is closed, then end the work. Returns the exit status so far: 0, 130 or 143 after a signal,
    1 after an error.
    """
    status = EXIT_DONE

    def handle(number: int, _frame: FrameType | None) -> None:
        nonlocal status
        status = EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_TERMINATED
        work.stop()
        app.leave()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, handle)
    # Output of child processes would damage the screen, and there is no log for it.
    with captured_for(app, Path(os.devnull), leash):
        app.run()
    work.stop()
    work.join()
    return status or report_failure(app) or app.return_code or EXIT_DONE
