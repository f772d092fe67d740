"""What the commands share that measure for a while: being stopped, and an output file."""

from __future__ import annotations

import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import click

from ndd_engine.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_TERMINATED, UsageError
from ndd_engine.text import printable


class Stop(threading.Event):
    """Set by Ctrl-C and SIGTERM. exit_status: 130 or 143 once it is, else 0."""

    exit_status = EXIT_DONE


@contextmanager
def stoppable(what: str) -> Iterator[Stop]:
    """Ctrl-C and SIGTERM set the event, and a second one ends `what` at once."""
    stop = Stop()

    def handle(number: int, _frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.exit_status = EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_TERMINATED
        stop.set()
        click.echo(
            f"stopping {what}; what is known by then is printed. Ctrl-C again ends it at once", err=True
        )

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def check_writable(path: Path | None) -> None:
    """Before minutes of measuring. Raises UsageError when the file could not be written."""
    if path is None:
        return
    if path.is_dir():
        raise UsageError(f"-o {printable(str(path))}: is a folder; name a file in it")
    if path.exists() and not path.is_file():
        raise UsageError(f"-o {printable(str(path))}: is no regular file")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"-o {printable(str(path))}: the folder it should go into does not exist")
    try:
        if path.exists():
            with path.open("ab"):
                pass
        else:
            with tempfile.TemporaryFile(dir=path.absolute().parent):
                pass
    except OSError as error:
        raise UsageError(f"-o {printable(str(path))}: cannot be written: {error.strerror or error}") from None


def write(path: Path, text: str) -> None:
    """Raises UsageError when it cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"-o {printable(str(path))}: cannot be written: {error.strerror}") from None
    click.echo(f"wrote {printable(str(path))}", err=True)
