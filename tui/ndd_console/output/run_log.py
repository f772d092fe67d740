"""A run whose progress is written as text to its console.log and to a stream."""

from __future__ import annotations

import io
import os
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from ndd_engine.files import open_regular
from ndd_engine.record.events import Event, MarkEvent
from ndd_engine.record.recorder import Listener
from ndd_engine.train.run import Run, RunRequest

from .progress import RunProgress

# Queued lines while the reader is blocked (a pager, Ctrl-S): about half an hour of a run.
PATIENT_LINES = 5000
# Seconds to wait at the end for a reader that takes nothing.
PATIENCE_S = 10.0


class Stream:
    """Writes text to a stream in a thread of its own, so that a blocked reader blocks nothing else.

    Text that does not fit into the queue is dropped, except for the last one, which may be the end of a run; so is all
    text once the stream is broken. dropped: number of dropped texts; error: why the stream is broken, "" if it is not;
    left: whether its reader has left.
    """

    def __init__(self, stream: TextIO | None, name: str) -> None:
        self.stream, self.name = stream, name
        self.dropped, self.error, self.left = 0, "", False
        # Not a Queue: a signal handler that writes while its thread holds the lock of one would wait for ever.
        self._queue: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._drain, name=f"ndd-{name}", daemon=True)
        self._late: str | None = None
        self._written = 0
        if stream is not None:
            with suppress(RuntimeError):  # without a thread it is written directly
                self._thread.start()

    def put(self, text: str) -> None:
        """Write the text soon. Never blocks while the thread is running."""
        if self.stream is None:
            return
        if not self._thread.is_alive():
            self._write(text)
            return
        if self._queue.qsize() < PATIENT_LINES:
            self._queue.put(text)
        else:
            self.dropped += self._late is not None
            self._late = text

    def close(self, patience_s: float = PATIENCE_S) -> bool:
        """Write what is queued; gives up when the reader takes nothing for `patience_s` seconds.

        Returns False in that case; the thread then remains blocked until the process exits.
        """
        if self._late is not None:
            self._queue.put(self._late)
        self._queue.put(None)
        while self._thread.is_alive():
            before = self._written
            self._thread.join(patience_s)
            if before == self._written and self._thread.is_alive():
                self.dropped += self._queue.qsize()  # and the one that is being written, for the None
                with suppress(OSError, ValueError):
                    if self.stream is not None:
                        # Discard what others still write to it: the interpreter flushes at exit.
                        nothing = os.open(os.devnull, os.O_WRONLY)
                        os.dup2(nothing, self.stream.fileno())
                        os.close(nothing)
                return False
        return True

    def _drain(self) -> None:
        while (text := self._queue.get()) is not None:
            self._write(text)

    def _write(self, text: str) -> None:
        if self.error or self.stream is None:
            self.dropped += 1
            return
        try:
            self._send(self.stream, text)
        except (OSError, ValueError, RuntimeError) as error:
            self.error = getattr(error, "strerror", None) or str(error)
            self.left = isinstance(error, BrokenPipeError)
            self.dropped += 1

    def _send(self, stream: TextIO, text: str) -> None:
        encoding = getattr(stream, "encoding", None) or "utf-8"
        data = text.encode(encoding, "backslashreplace")
        try:
            handle = stream.fileno()
        except (OSError, ValueError):  # not a file, as in a test
            stream.write(data.decode(encoding))
            stream.flush()
            self._written += 1
            return
        # Not through the stream's buffer: a blocked write would hold its lock, and the interpreter could not exit.
        while data:
            data = data[os.write(handle, data) :]
            self._written += 1


class Output(io.TextIOBase):
    """Writes lines to a stream and to the run's console.log. A broken stream is dropped; the run continues."""

    encoding = "utf-8"

    def __init__(self, stream: TextIO | None = None, name: str = "words") -> None:
        super().__init__()
        self._stream = Stream(stream, name)
        self._log: TextIO | None = None

    def log_to(self, path: Path) -> None:
        """Write to this file as well."""
        try:
            handle = open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            self._log = os.fdopen(handle, "a", encoding="utf-8", errors="backslashreplace", buffering=1)
        except OSError:
            self._log = None

    def say(self, line: str) -> None:
        """Write a line with a time stamp."""
        self.write(f"{time.strftime('%H:%M:%S')} {line}\n")

    def data(self, line: str) -> None:
        """Write a line for programs, to the stream only."""
        self._stream.put(line + "\n")

    def write(self, text: str) -> int:
        """Also Python's warnings and prints, when this replaces standard error and standard output."""
        self._stream.put(text)
        if self._log is not None:
            try:
                self._log.write(text)
            except (OSError, ValueError, RuntimeError):
                self._log = None
        return len(text)

    def finish(self) -> str:
        """Write the rest. Returns what was lost and why; "" if nothing was, or nobody wants it any more."""
        stream = self._stream
        blocked = not stream.close()
        if not stream.dropped or stream.left:
            return ""
        why = stream.error or ("its reader stopped reading" if blocked else "its reader was too slow")
        many = "1 line was" if stream.dropped == 1 else f"{stream.dropped} lines were"
        return f"{many} not written to standard {stream.name}: {why}"

    def flush(self) -> None:
        """Every write is on its way already."""

    def isatty(self) -> bool:
        return self._stream.stream is not None and self._stream.stream.isatty()

    def fileno(self) -> int:
        if self._stream.stream is None:
            raise io.UnsupportedOperation("fileno")
        return self._stream.stream.fileno()


class RunLog:
    """Opens a run and writes its progress to `words`, in a thread.

    tap: called with every event, in that thread. Raises UsageError before anything is written.
    """

    def __init__(
        self,
        request: RunRequest,
        words: Output,
        tap: Callable[[float, Event], None] | None = None,
        opened: Callable[[RunRequest, Listener], Run] = Run.open,
    ) -> None:
        """opened: opens the run."""
        self._queue: queue.SimpleQueue[tuple[float, Event] | str | None] = queue.SimpleQueue()
        self._words = words
        self._tap = tap
        since = time.time()
        self.run = opened(request, lambda t, event: self._offer((t, event)))
        words.log_to(self.run.directory.console_log)
        every_s = request.draft.resolve().log.headless_s
        self._progress = RunProgress(words.say, every_s, self.run.recorder.snapshot().run, since)
        self._thread = threading.Thread(target=self._report, name="ndd-progress", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            self.run.put(MarkEvent("warning", 0, f"progress is not printed: {error}"))

    def say(self, line: str) -> None:
        """Write a line. Never blocks, so it is safe in a signal handler."""
        self._offer(line)

    def finish(self, timeout_s: float = PATIENCE_S) -> None:
        """Report the remaining events, for up to `timeout_s`."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join(timeout_s)

    def _offer(self, item: tuple[float, Event] | str) -> None:
        if self._queue.qsize() < PATIENT_LINES:  # else console.log is on a disk that hangs
            self._queue.put(item)

    def _report(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, str):
                self._words.say(item)
                continue
            if self._tap is not None:
                self._tap(*item)
            self._progress.hear(*item)
            self._progress.look(self.run.recorder.snapshot())
