"""The file of a record, events.jsonl: reading it, following it as it grows, and writing it.

A `Recorder` never blocks training and never raises into it. `put` appends to a queue. The recorder's thread updates the
state, calls the listener and makes the lines, which another thread writes. A slow or full disk, or a network file
system that hangs, delays or loses lines, never a training step or what a screen shows.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import BinaryIO

from ndd_engine.files import open_regular
from ndd_engine.text import printable

from .event import other_version
from .events import EndEvent, Event, MarkEvent, decode
from .rundir import RunDir
from .snapshot import FINAL, Snapshot
from .state import RunState

FOLD_MARK = b'"type":"fold"'
# Maximum bytes of a line. An event has a few hundred, a fold event up to 100 KiB.
MAX_LINE = 8 * 1024 * 1024
BLOCK = 256 * 1024
# Maximum distance to search back for a fold event; they are written every 512 KiB.
SEARCH_BYTES = 8 * 1024 * 1024
MAX_HANG = 65_536
# Minimum seconds between two looks at whether the file is still in its folder.
LOOK_EVERY_S = 1.0
# Seconds until a write that has not returned is reported.
STUCK_S = 5.0
# Bytes that may wait for the file system; more lines are dropped.
MOST_WAITING_BYTES = 64 << 20
NO_ANSWER = "the file system does not answer"
# Bytes of log between two fold events: opening a log reads about this much.
FOLD_EVERY_BYTES = 512 * 1024

# Minimum seconds between calls of `derive`.
DERIVE_EVERY_S = 2.0

Listener = Callable[[float, Event], None]
# Returns events derived from the state; called with the Snapshot and whether it is the last call.
Derive = Callable[[Snapshot, bool], Iterable[Event]]


def open_log(path: Path) -> BinaryIO:
    """Open for reading. Raises OSError, also for anything but a regular file."""
    return os.fdopen(open_regular(path), "rb")


class EventLog:
    """The events of a log from `offset` on.

    damaged: number of lines that were skipped so far because they are no event, or one with values of the wrong type.
    replaced: set when another file has taken the place of the one that was read; it is read from its beginning.
    refused: why a record of another version is not read, or "".
    """

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path, self.offset = path, offset
        self.damaged = 0
        self.replaced = False
        self.refused = ""
        self._file: tuple[int, int] | None = None
        self._too_long = False  # the line at `offset` began before it

    def new(self) -> Iterator[tuple[float, Event]]:
        """(Unix time in seconds, event) of each line since the last call, without folded states and unknown types.

        A line that is incomplete is read next time. Raises OSError if the file cannot be read.
        """
        with open_log(self.path) as file:
            status = os.fstat(file.fileno())
            if self._file is not None and self._file != (status.st_dev, status.st_ino):
                self.offset, self._too_long, self.replaced = 0, False, True
            self._file = status.st_dev, status.st_ino
            file.seek(self.offset)
            while line := file.readline(MAX_LINE):
                if self.offset == 0 and (found := other_version(line)):
                    self.refused = found
                    return
                whole = line.endswith(b"\n")
                if not whole and len(line) < MAX_LINE and not self._too_long:
                    return
                self.offset += len(line)
                if self._too_long or not whole:
                    self.damaged += not self._too_long
                    self._too_long = not whole
                elif FOLD_MARK not in line[:40]:
                    try:
                        item = decode(line)
                    except ValueError:
                        self.damaged += 1
                        continue
                    if item is not None:
                        yield item


def damage_text(count: int) -> str:
    """ "3 lines of events.jsonl are damaged and were skipped"; "" without damage."""
    if not count:
        return ""
    lines, were = (
        ("1 line", "is damaged and was") if count == 1 else (f"{count:,} lines", "are damaged and were")
    )
    return f"{lines} of events.jsonl {were} skipped"


class RunReader:
    """Follows the log of a run: `poll` reads new events, `snapshot` returns the state.

    listener: called with each event after it was read; initially only with those after the newest fold event.
    trouble: why the log cannot be read, or "".
    """

    def __init__(self, run: RunDir, listener: Callable[[float, Event], None] | None = None) -> None:
        self.run = run
        self._listener = listener
        self.state = RunState()
        self._log = EventLog(run.events)
        self._skipped = 0
        self._hang: tuple[float, int, str] | None = None
        self.trouble = ""
        self._snapshot = self.state.snapshot()
        self._open()

    @property
    def damaged(self) -> int:
        """Number of lines that were read and skipped."""
        return self._log.damaged + self._skipped

    def poll(self) -> bool:
        """Read the lines added since the last call; True if there were any or the process was lost."""
        changed = self._fold_new() | self._fold_hang()
        if changed:
            self._snapshot = self.state.snapshot()
        # A killed process writes no end event, but its lock is released.
        if self._snapshot.status not in FINAL and self.run.live_owner() is None:
            # The end may have been written after reading and before checking the lock.
            self._fold_new()
            self._snapshot = self.state.snapshot()
            if self._snapshot.status not in FINAL:
                self._snapshot = replace(self._snapshot, status="lost")
                changed = True
        return changed

    def snapshot(self) -> Snapshot:
        """The state as of the last `poll`."""
        return self._snapshot

    def _fold_new(self) -> bool:
        """Fold new events. True if there were any."""
        found = False
        try:
            for t, event in self._log.new():
                if self._log.replaced:
                    self._log.replaced, self.state = False, RunState()  # the run began again
                found = True
                self._fold(t, event)
            self.trouble = self._log.refused
        except FileNotFoundError:
            self.trouble = ""  # not written yet
        except OSError as error:
            self.trouble = error.strerror or str(error)
        return found

    def _fold(self, t: float, event: Event) -> None:
        try:
            self.state.fold(t, event)
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError):
            self._skipped += 1
            return
        if self._listener is not None:
            self._listener(t, event)

    def _fold_hang(self) -> bool:
        """Fold what other ranks found out while rank 0, which writes the log, does not answer; True if it is new."""
        found = None
        with (
            contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError),
            open_log(self.run.hang) as file,
        ):
            body = json.loads(file.read(MAX_HANG))
            found = float(body["t"]), int(body["step"]), str(body["text"])
        if found == self._hang:
            return False
        self._hang = found
        if found is not None:
            self._fold(found[0], MarkEvent("warning", found[1], found[2]))
        return found is not None

    def _open(self) -> None:
        """Start after the newest fold event, or from the beginning if there is none."""
        with contextlib.suppress(OSError), open_log(self.run.events) as file:
            self._log.offset, self.state = _newest_fold(file.fileno()) or (0, self.state)


def load_state(run: RunDir) -> RunState:
    """The state after all events of a log, to resume the run."""
    reader = RunReader(run)
    reader._fold_new()
    return reader.state


def truncate_torn_line(path: Path) -> None:
    """Remove an incomplete last line, which a killed process may leave."""
    try:
        with path.open("rb+") as file:
            size = file.seek(0, os.SEEK_END)
            position = size
            while position > 0:
                start = max(position - BLOCK, 0)
                file.seek(start)
                block = file.read(position - start)
                if (index := block.rfind(b"\n")) >= 0:
                    end = start + index + 1
                    break
                position = start
            else:
                end = 0
            if end != size:
                file.truncate(end)
    except FileNotFoundError:
        return


def _newest_fold(handle: int) -> tuple[int, RunState] | None:
    """(offset after it, state) of the last fold event within SEARCH_BYTES from the end that can be read, or None."""
    size = os.fstat(handle).st_size
    tail = b""
    start = size
    while start > 0 and size - start < SEARCH_BYTES:
        step = min(BLOCK, start)
        start -= step
        tail = os.pread(handle, step, start) + tail
        index = tail.rfind(FOLD_MARK)
        while index >= 0:
            begin = tail.rfind(b"\n", 0, index) + 1
            end = tail.find(b"\n", index)
            whole = begin > 0 or start == 0
            if whole and end >= 0:
                with contextlib.suppress(ValueError):  # damaged, or of another version
                    return start + end + 1, RunState.from_line(tail[begin:end])
            if not whole:
                break  # it begins in an earlier block
            index = tail.rfind(FOLD_MARK, 0, index)
    return None


class LogWriter:
    """Appends lines to a file. Call `start`, `put` lines from one thread, then `close`.

    note: called on the writer's thread with each new problem. step: returns the newest step, for the warning about
    lines that were not written. dropped: lines of events that were not written.
    """

    def __init__(self, path: Path, note: Callable[[str], None], step: Callable[[], int]) -> None:
        self._path, self._note, self._step = path, note, step
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
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
        self._queue.put(partial(self._append, line, event))

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
        while (call := self._queue.get()) is not None:
            self._busy_since = time.monotonic()
            call()
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

    def _append(self, line: bytes, event: bool) -> None:
        assert self._handle is not None
        with self._lock:
            self._waiting_bytes -= len(line)
        self._look()
        # Retry every second; write nothing in between, so that no line is incomplete.
        if self.error is not None and time.monotonic() < self._next_retry:
            self._drop(event)
            return
        with self._lock:
            overflowed, self._overflowed = self._overflowed, False
        data = line
        if self.error is not None or overflowed:
            text = f"{self.dropped:,} events were not written: {self.error or NO_ANSWER}"
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
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._writer = None if path is None else LogWriter(path, self._noted, lambda: self._state.step)
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
        self._queue.put(partial(self._event, _now(), event))

    def _noted(self, text: str) -> None:
        self._queue.put(partial(self._note, text))

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
                if (call := self._queue.get()) is not None:
                    call()  # what was found while the last lines were written

    def _work(self) -> None:
        while (call := self._queue.get()) is not None:
            call()
        self._derived(_now(), True)

    def _event(self, t: float, event: Event) -> None:
        # The end event must be the last one: derive before it.
        last = isinstance(event, EndEvent)
        if last:
            self._derived(t, True)
        self._take(t, event)
        if not last and time.monotonic() >= self._next_derive:
            self._derived(t, False)

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
