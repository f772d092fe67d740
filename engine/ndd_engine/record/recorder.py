"""Writes events to events.jsonl and keeps the state of the run; never blocks training and never raises into it.

`put` appends to a queue. The recorder's thread updates the state, calls the listener and makes the lines, which another
thread writes. A slow or full disk, or a network file system that hangs, delays or loses lines, never a training step or
what a screen shows.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from .events import EndEvent, Event, MarkEvent
from .snapshot import Snapshot
from .state import RunState
from .writer import LogWriter

# Bytes of log between two fold events: opening a log reads about this much.
FOLD_EVERY_BYTES = 512 * 1024

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
        self._state = state or RunState()
        self._listener = listener
        self._derive = derive
        self._derive_every_s = derive_every_s
        self._next_derive = time.monotonic() + derive_every_s
        self._queue: queue.SimpleQueue[tuple[float, Event] | str | Callable[[], None] | None]
        self._queue = queue.SimpleQueue()
        self._writer = None if path is None else LogWriter(path, self._queue.put, lambda: self._state.step)
        self._since_fold = 0
        self.errors: list[str] = []
        self._snapshot = self._state.snapshot()
        self._dirty = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._work, name="ndd-recorder", daemon=True)

    def start(self) -> None:
        """Open the file and start the threads. Raises OSError if the file cannot be opened, RuntimeError if a thread
        cannot be started."""
        if self._writer is not None:
            self._writer.start()
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
        if self._dirty or self._snapshot.dropped_events != self.dropped:
            # Built on demand by the caller, to keep the recorder's thread fast.
            with self._lock:
                self._dirty = False
                self._snapshot = self._state.snapshot(self.dropped)
        return self._snapshot

    @property
    def dropped(self) -> int:
        """Events that were not written."""
        return 0 if self._writer is None else self._writer.dropped

    @property
    def trouble(self) -> str | None:
        """Why events cannot be written at the moment, or None."""
        return None if self._writer is None else self._writer.trouble

    def deleted(self) -> str | None:
        """That the file is no longer in its folder, because either was deleted, moved or replaced; otherwise None."""
        return None if self._writer is None else self._writer.deleted()

    def settle(self, timeout_s: float = 5.0) -> bool:
        """Wait until the state contains all queued events; False after the timeout. Does not wait for the disk."""
        done = threading.Event()
        self._queue.put(done.set)
        return done.wait(timeout_s) if self._thread.is_alive() else True

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Wait until all queued events are written; False after the timeout, or if the file system hangs."""
        if (writer := self._writer) is None:
            return self.settle(timeout_s)
        if not self._thread.is_alive():
            return True
        if writer.stuck:
            return False
        done = threading.Event()
        # Through both threads and back, so that the state contains what went wrong.
        self._queue.put(lambda: writer.call(lambda: self._queue.put(done.set)))
        return done.wait(timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """Write the queued events and end the threads; gives up after the timeout if the disk hangs."""
        deadline = time.monotonic() + timeout_s
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join(timeout_s)
        if self._writer is not None:
            self._writer.close(max(deadline - time.monotonic(), 0.0))
            while not self._thread.is_alive() and not self._queue.empty():
                if isinstance(item := self._queue.get(), str):
                    self._note(item)  # found while the last lines were written

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, str):
                self._note(item)
                continue
            if callable(item):
                item()
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
        if (writer := self._writer) is None:
            return
        self._line(writer, event.to_json(t))
        if self._since_fold >= FOLD_EVERY_BYTES and writer.error is None:
            self._line(writer, self._state.to_line(t), event=False)
            self._since_fold = 0

    def _line(self, writer: LogWriter, text: str, event: bool = True) -> None:
        data = (text + "\n").encode()
        self._since_fold += len(data)
        writer.put(data, event)

    def _fold(self, t: float, event: Event) -> None:
        with self._lock:
            self._state.fold(t, event)
            self._dirty = True

    def _tell(self, t: float, event: Event) -> None:
        if self._listener is not None:
            self._listener(t, event)

    def _note(self, text: str) -> None:
        if len(self.errors) >= 20:
            return
        self.errors.append(text)
        t, mark = _now(), MarkEvent("warning", self._state.step, text)
        self._fold(t, mark)
        # Failures of the listener are noted for the event itself.
        with contextlib.suppress(Exception):
            self._tell(t, mark)


def _now() -> float:
    # Rounded as in the log, so that a live run and its replay are identical.
    return round(time.time(), 4)
