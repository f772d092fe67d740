"""A script without a screen: its input and output go through, and a summary follows."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import threading
import tty
from collections.abc import Iterator

import click

from ndd_console.words.run import summary
from ndd_engine.script.run import ScriptRequest, ScriptRun

from .headless import stop_on_signals


def observe_headless(request: ScriptRequest) -> int:
    """Run the command and return its exit status. Raises UsageError before anything is written."""
    run = ScriptRun.open(request)

    stop_on_signals(run)  # after a hang-up the run continues; its output goes to the log
    with typing_into(run):
        end = run.execute()
    run.close()
    with contextlib.suppress(OSError):
        for line in summary(run.recorder.snapshot(), end, str(run.directory.path)):
            click.echo(line, err=True)
    return end.exit_status


@contextlib.contextmanager
def typing_into(run: ScriptRun) -> Iterator[None]:
    """Pass what is typed on to the script: also Ctrl-C, which its terminal turns into a signal."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(0)
    done = threading.Event()

    def forward() -> None:
        while not done.is_set():
            with contextlib.suppress(OSError):
                if not select.select([0], [], [], 0.1)[0]:
                    continue
                data = os.read(0, 1024)
                if not data:  # the terminal is lost
                    return
                if run.launched is not None:
                    run.launched.type(data)

    tty.setraw(0)
    thread = threading.Thread(target=forward, name="ndd-typing", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(1)
        with contextlib.suppress(termios.error):
            termios.tcsetattr(0, termios.TCSADRAIN, before)
