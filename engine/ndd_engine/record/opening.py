"""Opens the folder of a run for writing: everything that was done is undone if it fails."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from ndd_engine.errors import MachineError, RunLockedError, UsageError
from ndd_engine.text import printable

from .channel import ControlServer
from .events import Event, MarkEvent
from .rundir import RunDir, RunLock, check_regular, discard


class Opening:
    """A folder that is being opened. lock: of the run. undo: called in reverse order if the opening fails."""

    def __init__(self, directory: RunDir, lock: RunLock, undo: contextlib.ExitStack) -> None:
        self.directory, self.lock = directory, lock
        self._undo = undo

    def undo(self, call: Callable[[], object]) -> None:
        """Undo something if the opening fails."""
        self._undo.callback(call)

    def listen(self, server: ControlServer, put: Callable[[Event], None]) -> None:
        """Start to listen for requests; a folder that supports no sockets is only a warning."""
        self.undo(server.close)
        try:
            server.start()
        except (OSError, RuntimeError) as error:
            server.close()
            text = f"cannot create control.sock ({getattr(error, 'strerror', None) or error})"
            put(MarkEvent("warning", 0, f"{text}: attach can watch this run but not control it"))


@contextlib.contextmanager
def opening(
    directory: RunDir | None, new: Callable[[], RunDir], request: Callable[[RunDir], Path]
) -> Iterator[Opening]:
    """Lock the folder of a run, or that of a new one, and undo everything if the block raises.

    directory: None for a new one. new: creates it. request: the file in it that says what to run. Raises UsageError if
    something cannot be written, in the block as well, and MachineError if a thread cannot be started.
    """
    with contextlib.ExitStack() as undo:
        if directory is None:
            directory = new()
            undo.callback(discard, directory)
        lock = RunLock(directory)
        undo.callback(lock.release)
        try:
            check_regular(directory.events, directory.console_log, request(directory))
            try:
                lock.acquire()
            except RunLockedError:
                undo.pop_all()  # another process has taken the new folder: leave it alone
                raise
            yield Opening(directory, lock, undo)
        except OSError as error:
            where = printable(str(error.filename or directory.path))
            raise UsageError(f"cannot write to {where}: {error.strerror}") from None
        except RuntimeError as error:
            raise MachineError(f"{error}: too many processes and threads (ulimit -u)") from None
        undo.pop_all()
