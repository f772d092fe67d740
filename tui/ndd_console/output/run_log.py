"""A run whose progress is written as text to its console.log and to a stream."""

from __future__ import annotations

import io
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from ndd_engine.record.events import Event
from ndd_engine.train.run import Run, RunRequest

from .progress import RunProgress

# Queued events while the reader is blocked (a pager, Ctrl-S): about half an hour of a run.
PATIENT_EVENTS = 5000


class Output(io.TextIOBase):
    """Writes lines to a stream and to the run's console.log. A broken stream is dropped; the run continues."""

    encoding = "utf-8"

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__()
        self.stream = stream
        self._log: TextIO | None = None

    def log_to(self, path: Path) -> None:
        """Write to this file as well."""
        try:
            self._log = path.open("a", encoding="utf-8", buffering=1)
        except OSError:
            self._log = None

    def say(self, line: str) -> None:
        """Write a line with a time stamp."""
        self._write(f"{time.strftime('%H:%M:%S')} {line}\n")

    def data(self, line: str) -> None:
        """Write a line for programs, to the stream only."""
        self.stream = _written(self.stream, line + "\n")

    def write(self, text: str) -> int:
        """Python's warnings, when this replaces standard error."""
        self._write(text)
        return len(text)

    def flush(self) -> None:
        """Every write is flushed already."""

    def isatty(self) -> bool:
        return self.stream is not None and self.stream.isatty()

    def fileno(self) -> int:
        if self.stream is None:
            raise io.UnsupportedOperation("fileno")
        return self.stream.fileno()

    def _write(self, text: str) -> None:
        self.stream, self._log = _written(self.stream, text), _written(self._log, text)


def _written(stream: TextIO | None, text: str) -> TextIO | None:
    """Write the text. Returns the stream, or None if it is broken."""
    if stream is not None:
        try:
            stream.write(text)
            stream.flush()
        except (OSError, ValueError, RuntimeError):
            return None
    return stream


class RunLog:
    """Opens a run and writes its progress to `words`, in a thread.

    A blocked reader blocks only this thread; events that do not fit into the queue are not reported. tap: called
    with every event. Raises UsageError before anything is written.
    """

    def __init__(
        self, request: RunRequest, words: Output, tap: Callable[[float, Event], None] | None = None
    ) -> None:
        self._queue: queue.Queue[tuple[float, Event] | str | None] = queue.Queue(PATIENT_EVENTS)
        self._words = words
        self._tap = tap
        since = time.time()
        self.run = Run.open(request, lambda t, event: self._offer((t, event)))
        words.log_to(self.run.directory.console_log)
        every_s = request.draft.resolve().log.headless_s
        self._progress = RunProgress(words.say, every_s, self.run.recorder.snapshot().run, since)
        self._thread = threading.Thread(target=self._report, name="ndd-progress", daemon=True)
        self._thread.start()

    def say(self, line: str) -> None:
        """Write a line. Never blocks, so it is safe in a signal handler."""
        self._offer(line)

    def finish(self, timeout_s: float = 10.0) -> None:
        """Write the remaining events, for up to `timeout_s` if the reader is blocked."""
        self._offer(None)
        self._thread.join(timeout_s)

    def _offer(self, item: tuple[float, Event] | str | None) -> None:
        with suppress(queue.Full):
            self._queue.put_nowait(item)

    def _report(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, str):
                self._words.say(item)
                continue
            if self._tap is not None:
                self._tap(*item)
            self._progress.hear(*item)
            self._progress.look(self.run.recorder.snapshot())
