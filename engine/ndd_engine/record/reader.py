"""Reads the events of a run: opens long logs fast and follows them as they grow."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from .events import Event, MarkEvent
from .log import FOLD_MARK, EventLog, open_log
from .rundir import RunDir
from .snapshot import FINAL, Snapshot
from .state import RunState

BLOCK = 256 * 1024
# Maximum distance to search back for a fold event; they are written every 512 KB.
SEARCH_BYTES = 8 * 1024 * 1024
MAX_HANG = 65_536
_DAMAGED = (OSError, ValueError, TypeError, KeyError, RecursionError)


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
                    self._log.replaced, self.state = False, RunState()  # the run began anew
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
