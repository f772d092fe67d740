"""What the measuring commands share: stopping on a signal, storing a result, and writing an output file."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from ndd_engine.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_TERMINATED, UsageError
from ndd_engine.files import write_problem, write_text
from ndd_engine.processes import SignalEvent
from ndd_engine.record.events import TrialEvent
from ndd_engine.record.rundir import RunDir
from ndd_engine.text import printable

from .printing import say


class Stop(SignalEvent):
    """Set by Ctrl-C and SIGTERM. exit_status: 130 or 143 once set, 0 before."""

    exit_status = EXIT_DONE


@contextlib.contextmanager
def stoppable(what: str) -> Iterator[Stop]:
    """Ctrl-C and SIGTERM set the event; a second one raises KeyboardInterrupt. what: "the trial", for the message."""
    stop = Stop()

    def handle(number: int, _frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.exit_status = EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_TERMINATED
        stop.set()
        text = f"stopping {what}; results so far will be printed (Ctrl-C again to quit now)\n"
        with contextlib.suppress(OSError):
            os.write(2, text.encode())  # a signal may arrive within a write to the buffer of standard error

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def record(run: RunDir | None, trial: TrialEvent, tell: Callable[[str], None]) -> None:
    """Store the result of a trial with its run, if there is one; tell why it cannot be."""
    from ndd_engine.trial.trial import record_trial

    try:
        if run is not None:
            record_trial(run, trial)
    except UsageError as error:
        tell(f"warning: the result is not recorded: {error}")


def check_writable(path: Path | None) -> None:
    """Check the output file before minutes of measuring. Raises UsageError when it cannot be written."""
    if path is not None and (why := write_problem(path)):
        raise UsageError(f"-o {printable(str(path))}: {why}")


def write(path: Path, text: str) -> None:
    """Write the output file. Raises UsageError when it cannot be written."""
    write_text(path, text, "-o ")
    say(f"wrote {path}")
