"""Reads a run's events: opens a log of any length at once, then follows it as it grows."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from .events import Event, FoldEvent, parse
from .fold import from_event
from .rundir import RunDir
from .snapshot import FINAL, Snapshot
from .state import RunState

BLOCK = 256 * 1024
# How far back a fold event is looked for; they are written every 512 KB.
SEARCH_BYTES = 8 * 1024 * 1024
_FOLD_MARK = b'"type":"fold"'


class RunReader:
    """Follows one run's log. `poll` folds what is new and is cheap when nothing is; `snapshot` is the result.

    listener: called with each event after it was folded; on opening, only with those since the newest fold event.
    """

    def __init__(self, run: RunDir, listener: Callable[[float, Event], None] | None = None) -> None:
        self.run = run
        self._listener = listener
        self.state = RunState()
        self._offset = 0
        self.skipped = 0
        self._snapshot = self.state.snapshot()
        self._open()

    def poll(self) -> bool:
        """Fold the lines that came since the last call; True when there were any."""
        changed = False
        if self._fold_new():
            changed = True
        if changed:
            self._snapshot = self.state.snapshot()
        # A process that died without a word leaves no event: the lock tells.
        if self._snapshot.status not in FINAL and self.run.live_owner() is None:
            # Its end may have been written between the read and the look at the lock.
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
        """Fold what is new; a line that is valid JSON but not what its type promises is left out like a torn one."""
        found = False
        for t, event in self._new_events():
            found = True
            try:
                self.state.fold(t, event)
            except (KeyError, TypeError, ValueError, AttributeError):
                self.skipped += 1
                continue
            if self._listener is not None:
                self._listener(t, event)
        return found

    def _open(self) -> None:
        """Start from the newest fold event, or from the beginning when there is none."""
        try:
            with self.run.events.open("rb") as file:
                found = _newest_fold(file.fileno())
        except OSError:
            return
        if found is not None:
            try:
                self.state = from_event(found[1])
                self._offset = found[0]
            except (KeyError, TypeError, IndexError, ValueError):
                self.state = RunState()  # written by another version: read it all

    def _new_events(self) -> Iterator[tuple[float, Event]]:
        try:
            with self.run.events.open("rb") as file:
                file.seek(self._offset)
                for line in file:
                    if not line.endswith(b"\n"):
                        break  # torn, or being written: next time
                    self._offset += len(line)
                    if _FOLD_MARK in line[:40]:
                        continue
                    if (item := parse(line)) is not None:
                        yield item
        except OSError:
            return


def load_state(run: RunDir) -> RunState:
    """The folded state of a log, for a run that goes on with it."""
    reader = RunReader(run)
    reader._fold_new()
    return reader.state


def truncate_torn_line(path: Path) -> None:
    """Cut a last line without its newline, which a killed process may leave."""
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


def _newest_fold(handle: int) -> tuple[int, FoldEvent] | None:
    """(offset behind it, event) of the last whole fold event, looking back at most SEARCH_BYTES."""
    size = os.fstat(handle).st_size
    tail = b""
    start = size
    while start > 0 and size - start < SEARCH_BYTES:
        step = min(BLOCK, start)
        start -= step
        tail = os.pread(handle, step, start) + tail
        index = tail.rfind(_FOLD_MARK)
        while index >= 0:
            begin = tail.rfind(b"\n", 0, index) + 1
            end = tail.find(b"\n", index)
            whole = begin > 0 or start == 0
            if whole and end >= 0:
                item = parse(tail[begin:end])
                if item is not None and isinstance(item[1], FoldEvent):
                    return start + end + 1, item[1]
            if not whole:
                break  # its beginning lies further back
            index = tail.rfind(_FOLD_MARK, 0, index)
    return None
