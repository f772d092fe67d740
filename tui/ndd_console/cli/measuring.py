"""What the measuring commands share: stopping on a signal, and writing an output file."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from ndd_engine.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_TERMINATED, UsageError
from ndd_engine.text import printable

from .printing import say


class Stop(threading.Event):
    """Set by Ctrl-C and SIGTERM. exit_status: 130 or 143 once set, 0 before."""

    exit_status = EXIT_DONE


@contextmanager
def stoppable(what: str) -> Iterator[Stop]:
    """Ctrl-C and SIGTERM set the event; a second one raises KeyboardInterrupt. what: "the trial", for the message."""
    stop = Stop()

    def handle(number: int, _frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.exit_status = EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_TERMINATED
        stop.set()
        say(f"stopping {what}; results so far will be printed (Ctrl-C again to quit now)")

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def check_writable(path: Path | None) -> None:
    """Check the output file before minutes of measuring. Raises UsageError when it cannot be written."""
    if path is None:
        return
    if path.is_dir():
        raise _refused(path, "is a folder; name a file in it")
    if path.exists() and not path.is_file():
        raise _refused(path, "is not a regular file")
    if not path.absolute().parent.is_dir():
        raise _refused(path, "its folder does not exist")
    try:
        if path.exists():
            path.open("ab").close()
        else:
            tempfile.TemporaryFile(dir=path.absolute().parent).close()
    except OSError as error:
        raise _refused(path, f"cannot be written: {error.strerror or error}") from None


def write(path: Path, text: str) -> None:
    """Write the output file in place. Raises UsageError when it cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise _refused(path, f"cannot be written: {error.strerror}") from None
    say(f"wrote {path}")


def save(path: Path, text: str) -> None:
    """The same atomically, without a message. Raises UsageError when it cannot be written."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise _refused(path, f"cannot be written: {error.strerror}; choose another file with -o") from None


def _refused(path: Path, why: str) -> UsageError:
    return UsageError(f"-o {printable(str(path))}: {why}")
