"""Writes lines to a log on a thread of its own, so that a file system that hangs delays nobody else."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ndd_engine.text import printable

from .events import MarkEvent
from .reader import truncate_torn_line

# Minimum seconds between two looks at whether the file is still in its folder.
LOOK_EVERY_S = 1.0
# Seconds until a write that has not returned is reported.
STUCK_S = 5.0
# Bytes that may wait for the file system; more lines are dropped.
MOST_WAITING_BYTES = 64 << 20
NO_ANSWER = "the file system does not answer"


class LogWriter:
    """Appends lines to a file. Call `start`, `put` lines from one thread, then `close`.

    note: called on the writer's thread with each new problem. step: returns the newest step, for the warning about
    lines that were not written. dropped: lines of events that were not written.
    """

    def __init__(self, path: Path, note: Callable[[str], None], step: Callable[[], int]) -> None:
        self._path, self._note, self._step = path, note, step
        self._queue: queue.SimpleQueue[tuple[bytes, bool] | Callable[[], None] | None] = queue.SimpleQueue()
        self._handle: int | None = None
        self._next_retry = self._next_look = 0.0
        self._missing = False
        self._busy_since: float | None = None
        # Changed by two threads.
        self._lock = threading.Lock()
        self._waiting_bytes = 0
        self._overflowed = False
        self.dropped = 0
        self.error: str | None = None
        self._thread = threading.Thread(target=self._work, name="ndd-record-writer", daemon=True)

    def start(self) -> None:
        """Open the file and start the thread. Raises OSError and RuntimeError."""
        truncate_torn_line(self._path)
        self._handle = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            self._thread.start()
        except RuntimeError:
            os.close(self._handle)
            raise

    def put(self, line: bytes, event: bool = True) -> None:
        """Append a line later. event: whether it counts as an event if it cannot be written. Never blocks."""
        with self._lock:
            if self._waiting_bytes + len(line) > MOST_WAITING_BYTES:
                self.dropped += event
                self._overflowed = True
                return
            self._waiting_bytes += len(line)
        self._queue.put((line, event))

    def call(self, done: Callable[[], None]) -> None:
        """Call `done` on the writer's thread after all lines so far; it must not raise."""
        self._queue.put(done)

    @property
    def trouble(self) -> str | None:
        """Why lines cannot be written at the moment, or None."""
        if self._missing:
            return deleted(self._path)
        if self.stuck:
            return f"the record cannot be written: {NO_ANSWER}"
        return f"the record cannot be written: {self.error}" if self.error else None

    @property
    def stuck(self) -> bool:
        """Whether the file system has not answered for STUCK_S seconds."""
        since = self._busy_since
        return since is not None and time.monotonic() - since > STUCK_S

    def deleted(self, timeout_s: float = STUCK_S) -> str | None:
        """That the file is no longer in its folder, because either was deleted, moved or replaced; otherwise None.

        None also if the file system does not answer in time.
        """
        found: list[str | None] = []
        if not self._thread.is_alive():
            return self._gone() if self._handle is not None else None
        if self.stuck:
            return None
        done = threading.Event()

        def look() -> None:
            found.append(self._gone())
            done.set()

        self.call(look)
        done.wait(timeout_s)
        return found[0] if found else None

    def close(self, timeout_s: float) -> None:
        """Write the lines that wait, sync and close the file; gives up after the timeout if the file system hangs."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join(timeout_s)

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            self._busy_since = time.monotonic()
            if callable(item):
                item()
            else:
                with self._lock:
                    self._waiting_bytes -= len(item[0])
                self._look()
                self._write(*item)
            self._busy_since = None
        assert self._handle is not None
        handle, self._handle = self._handle, None
        try:
            os.fsync(handle)
        except OSError as error:
            self._note(str(error))
        with contextlib.suppress(OSError):
            os.close(handle)

    def _gone(self) -> str | None:
        assert self._handle is not None
        try:
            found = os.path.samestat(self._path.stat(), os.fstat(self._handle))
        except (FileNotFoundError, NotADirectoryError):
            found = False
        except OSError:
            return None  # a network disk that does not answer is not a deleted folder
        return None if found else deleted(self._path)

    def _look(self) -> None:
        """Report once that the file was deleted. It is still written: a folder that was only moved may return."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + LOOK_EVERY_S
        gone = self._gone()
        if gone and not self._missing:
            self._note(f"{gone}; its record and its checkpoints are lost unless the folder returns")
        self._missing = gone is not None

    def _write(self, line: bytes, event: bool) -> None:
        assert self._handle is not None
        # Retry every second; write nothing in between, so that no line is incomplete.
        if self.error is not None and time.monotonic() < self._next_retry:
            self._drop(event)
            return
        with self._lock:
            overflowed, self._overflowed = self._overflowed, False
        data = line
        if self.error is not None or overflowed:
            text = f"{self.dropped} events were not written: {self.error or NO_ANSWER}"
            data = MarkEvent("warning", self._step(), text).to_json(time.time()).encode() + b"\n" + line
        try:
            write_whole(self._handle, data)
        except OSError as error:
            self._drop(event)
            self._next_retry = time.monotonic() + 1.0
            if self.error is None:
                self.error = error.strerror or str(error)
                self._note(f"the record cannot be written: {self.error}; training continues")
        else:
            self.error = None

    def _drop(self, event: bool) -> None:
        with self._lock:
            self.dropped += event


def write_whole(handle: int, data: bytes) -> None:
    """Append all of the data to a regular file, or nothing. Raises OSError."""
    end = os.lseek(handle, 0, os.SEEK_END)
    rest = data
    try:
        while rest:
            # After a part was written, the next call raises what is wrong: no space, a quota or a file-size limit.
            rest = rest[os.write(handle, rest) :]
    except OSError:
        if len(rest) < len(data):
            os.ftruncate(handle, end)
        raise


def deleted(path: Path) -> str:
    """The message about a record that is not in its folder any more."""
    return f"the run folder {printable(str(path.parent))} was deleted or moved during training"
