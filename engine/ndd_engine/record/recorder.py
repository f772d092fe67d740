"""Writes events to events.jsonl and keeps the state of the run; never blocks training and never raises into it.

`put` appends to a queue. The recorder's thread updates the state and writes the lines. A slow or full disk delays or
loses lines, never a training step.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from ndd_engine.text import printable

from .events import EndEvent, Event, MarkEvent
from .fold import to_event
from .reader import truncate_torn_line
from .snapshot import Snapshot
from .state import RunState

# Bytes of log between two fold events: opening a log reads about this much.
FOLD_EVERY_BYTES = 512 * 1024

# Minimum seconds between two looks at whether the file is still in its folder.
LOOK_EVERY_S = 1.0

# Minimum seconds between calls of `derive`.
DERIVE_EVERY_S = 2.0

Listener = Callable[[float, Event], None]
# Returns events derived from the state; called with the Snapshot and whether it is the last call.
Derive = Callable[[Snapshot, bool], Iterable[Event]]


class Recorder:
    """The record of a run. Call `start`, `put` events from any thread, then `close`.

    state: initial state (of a resumed run). listener: called in the recorder's thread after each event. derive:
    called in the recorder's thread at most every `derive_every_s` seconds and before the end; the events that it
    returns are recorded.
    """

    def __init__(
        self,
        path: Path | None,
        state: RunState | None = None,
        listener: Listener | None = None,
        derive: Derive | None = None,
        derive_every_s: float = DERIVE_EVERY_S,
    ) -> None:
        self._path = path
        self._state = state or RunState()
        self._listener = listener
        self._derive = derive
        self._derive_every_s = derive_every_s
        self._next_derive = time.monotonic() + derive_every_s
        self._queue: queue.SimpleQueue[tuple[float, Event] | threading.Event | None] = queue.SimpleQueue()
        self._handle: int | None = None
        self._since_fold = 0
        self._write_error: str | None = None
        self._next_retry = 0.0
        self._next_look = 0.0
        self._missing = False
        self.dropped = 0
        self.errors: list[str] = []
        self._snapshot = self._state.snapshot()
        self._dirty = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._work, name="ndd-recorder", daemon=True)

    def start(self) -> None:
        """Open the file and start the thread. Raises OSError if the file cannot be opened, RuntimeError if the thread
        cannot be started."""
        if self._path is not None:
            truncate_torn_line(self._path)
            self._handle = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            self._thread.start()
        except RuntimeError:
            self.close()
            raise

    def put(self, event: Event) -> None:
        """Record an event with the current time. Never blocks."""
        self._queue.put((_now(), event))

    def snapshot(self) -> Snapshot:
        """The current state; the same object until it changes."""
        if self._dirty:
            # Built on demand by the caller, to keep the recorder's thread fast.
            with self._lock:
                self._dirty = False
                self._snapshot = self._state.snapshot(self.dropped)
        return self._snapshot

    @property
    def trouble(self) -> str | None:
        """Why events cannot be written at the moment, or None."""
        if self._missing and self._path is not None:
            return deleted(self._path)
        return f"the record cannot be written: {self._write_error}" if self._write_error else None

    def deleted(self) -> str | None:
        """That the file is no longer in its folder, because either was deleted, moved or replaced; otherwise None."""
        if self._path is None or self._handle is None:
            return None
        try:
            found = os.path.samestat(self._path.stat(), os.fstat(self._handle))
        except (FileNotFoundError, NotADirectoryError):
            found = False
        except OSError:
            return None  # a network disk that does not answer is not a deleted folder
        return None if found else deleted(self._path)

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Wait until all queued events are written; False after the timeout."""
        done = threading.Event()
        self._queue.put(done)
        return done.wait(timeout_s) if self._thread.is_alive() else True

    def close(self, timeout_s: float = 5.0) -> None:
        """Write the queued events and end the thread; gives up after the timeout if the disk hangs."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join(timeout_s)
        if self._handle is not None and not self._thread.is_alive():
            try:
                os.fsync(self._handle)
            except OSError as error:
                self.errors.append(str(error))
            with contextlib.suppress(OSError):
                os.close(self._handle)
            self._handle = None

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            # The end event must be the last one: derive before it.
            last = isinstance(item[1], EndEvent)
            if last:
                self._derived(item[0], True)
            self._take(*item)
            if not last and time.monotonic() >= self._next_derive:
                self._derived(item[0], False)
        self._derived(_now(), True)

    def _take(self, t: float, event: Event) -> None:
        # A failure in one part must not affect the others.
        for part in (self._fold, self._append, self._tell):
            self._guard(part, t, event)

    def _derived(self, t: float, last: bool) -> None:
        if self._derive is None:
            return
        self._guard(self._take_derived, self._derive, t, last)
        self._next_derive = time.monotonic() + self._derive_every_s
        if last:
            self._derive = None

    def _take_derived(self, derive: Derive, t: float, last: bool) -> None:
        for event in derive(self.snapshot(), last):
            self._take(t, event)

    def _guard(self, part: Callable[..., None], *given: object) -> None:
        try:
            part(*given)
        except Exception as error:  # noqa: BLE001  recording must never fail
            text = f"the record: {type(error).__name__}: {error}"
            if text not in self.errors:
                self._note(text)

    def _append(self, t: float, event: Event) -> None:
        self._look()
        self._write(event.to_json(t))
        if self._since_fold >= FOLD_EVERY_BYTES and self._write_error is None:
            self._write(to_event(self._state).to_json(t))
            self._since_fold = 0

    def _look(self) -> None:
        """Report once that the file was deleted. It is still written: a folder that was only moved may return."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + LOOK_EVERY_S
        gone = self.deleted()
        if gone and not self._missing:
            self._note(f"{gone}; its record and its checkpoints are lost unless the folder returns")
        self._missing = gone is not None

    def _fold(self, t: float, event: Event) -> None:
        with self._lock:
            self._state.fold(t, event)
            self._dirty = True

    def _tell(self, t: float, event: Event) -> None:
        if self._listener is not None:
            self._listener(t, event)

    def _write(self, line: str) -> None:
        if self._handle is None:
            return
        if self._write_error is not None:
            # Retry every second; write nothing in between, so that no line is incomplete.
            if time.monotonic() < self._next_retry:
                self.dropped += 1
                return
            text = f"{self.dropped} events were not written: {self._write_error}"
            line = MarkEvent("warning", self._state.step, text).to_json(time.time()) + "\n" + line
        data = (line + "\n").encode()
        try:
            write_whole(self._handle, data)
        except OSError as error:
            self.dropped += 1
            self._next_retry = time.monotonic() + 1.0
            if self._write_error is None:
                self._write_error = error.strerror or str(error)
                self._note(f"the record cannot be written: {self._write_error}; training continues")
        else:
            self._since_fold += len(data)
            self._write_error = None

    def _note(self, text: str) -> None:
        if len(self.errors) >= 20:
            return
        self.errors.append(text)
        t, mark = _now(), MarkEvent("warning", self._state.step, text)
        self._fold(t, mark)
        # Failures of the listener are noted for the event itself.
        with contextlib.suppress(Exception):
            self._tell(t, mark)


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


def _now() -> float:
    # Rounded as in the log, so that a live run and its replay are identical.
    return round(time.time(), 4)
