"""What several commands share: output, progress lines on standard error, stopping on a signal, output files."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import click

from ndd_console.words.blocks import Block
from ndd_console.words.stopping import command_stopping
from ndd_engine.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_TERMINATED, UsageError
from ndd_engine.files import write_problem, write_text
from ndd_engine.processes import SignalEvent
from ndd_engine.record.events import TrialEvent
from ndd_engine.record.rundir import RunDir
from ndd_engine.text import printable

# Reading a longer file takes seconds; a message explains the wait.
LONG_BYTES = 20 << 20


def say(line: str) -> None:
    """One line to standard error, with control characters escaped."""
    click.echo(printable(line), err=True)


def show(result: dict[str, Any] | Iterable[str] | Iterable[Block]) -> None:
    """A result on standard output: a dict as one JSON document, lines with control characters escaped, or blocks.

    Blocks are as wide as the terminal, and wrap nowhere if there is none. Raises ValueError for NaN and infinities in a
    dict.
    """
    if isinstance(result, dict):
        click.echo(json.dumps(result, indent=2, allow_nan=False))
        return
    parts = list(result)
    texts = [printable(part) for part in parts if isinstance(part, str)]
    blocks = [part for part in parts if not isinstance(part, str)]
    if blocks:
        from ndd_console.render.text import lines

        width = terminal_width()
        plain = width is None or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
        texts = lines(blocks, width, colour=not plain)
    for text in texts:
        click.echo(text)


def tell_reading(path: Path, several: bool = False) -> None:
    """Say which file is read, if it is long or one of several."""
    if several or (path.is_file() and path.stat().st_size > LONG_BYTES):
        say(f"reading {path}")


def terminal_width() -> int | None:
    """Columns of the terminal; None if standard output is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


class ProgressLines:
    """Progress in lines: `news` prints at once, `update` only when nothing was printed for `interval_s` seconds."""

    _key: object = ""

    def __init__(
        self,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        interval_s: float = 10.0,
    ) -> None:
        self._say, self._clock, self._interval_s = say, clock, interval_s
        self._next_s, self._last, self._printed = 0.0, "", 0

    def results(self, texts: Sequence[str]) -> None:
        """`news` of those that were not there at the last call."""
        for text in texts[self._printed :]:
            self.news(text)
        self._printed = max(self._printed, len(texts))

    def news(self, text: str) -> None:
        self._next_s, self._last = self._clock() + self._interval_s, text
        self._say(printable(text))

    def stage(self, key: object, text: str) -> None:
        """`news` if the key differs from the last call's, otherwise `update`."""
        before, self._key = self._key, key
        (self.update if before == key else self.news)(text)

    def update(self, text: str) -> None:
        if text != self._last and self._clock() >= self._next_s:
            self.news(text)


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
        with contextlib.suppress(OSError):
            # Directly: a signal may arrive within a write to the buffer of standard error.
            os.write(2, f"{command_stopping(what)}\n".encode())

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
