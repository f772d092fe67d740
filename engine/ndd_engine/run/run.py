"""A run from its opening to its end: folder, lock, record, control and ends. What it executes is an argument.

The console calls `execute` in a thread, a headless run on the main thread. Requests to a run come from any thread.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable

from ndd_engine.diagnose.memory_rules import wants_look
from ndd_engine.diagnose.rules import FindingWatch
from ndd_engine.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_TERMINATED,
    MachineError,
    RunLockedError,
    UsageError,
)
from ndd_engine.record.events import EndEvent, Event, FindingEvent, HoldersEvent, MarkEvent, StageEvent
from ndd_engine.record.figures import figures
from ndd_engine.record.file import Listener, Recorder
from ndd_engine.record.rundir import RunDir, RunLock, check_regular, discard
from ndd_engine.record.snapshot import Snapshot
from ndd_engine.record.state import RunState
from ndd_engine.text import printable

from .channel import ControlServer
from .control import Control

EXIT_OF = {
    "done": EXIT_DONE,
    "stopped": EXIT_DONE,
    "interrupted": EXIT_INTERRUPTED,
    "terminated": EXIT_TERMINATED,
}


class Executor:
    """What a run executes, and what is particular about opening and ending it.

    run: set when the run is opened. watched: whether findings are looked for. interruptible: whether StopNow can end
    `execute` at this moment, e.g. raised by a signal handler. on_request: the reason of a stop that another process has
    requested.
    """

    run: Run
    watched = True
    interruptible = False
    on_request = "stopped from another terminal"

    def check(self) -> RunDir | None:
        """The folder that is opened, None for a new one. Raises UsageError before anything is written."""
        raise NotImplementedError

    def new_folder(self) -> RunDir:
        """Create the folder of a new run. Raises UsageError."""
        raise NotImplementedError

    def begin(self, directory: RunDir) -> RunState | None:
        """The folder is locked: write into it. Returns the state of a resumed run. Raises OSError, UsageError."""
        raise NotImplementedError

    def execute(self) -> EndEvent:
        """Run to the end on this thread. Never raises an Exception."""
        raise NotImplementedError

    def last_events(self, end: EndEvent) -> Iterable[Event]:
        """What is recorded at the end."""
        return (end,)

    def refusal(self, action: str) -> str:
        """Why a request cannot be obeyed; "" if it can."""
        return ""

    def close(self) -> None:
        """Release what `begin` has made, while events can still be recorded. Safe to call twice."""


# A look that was asked for and does not come within this time is asked for again.
ANSWER_S = 30.0


class Watch:
    """Finds what is to be reported of a run, and asks for a look at what it keeps when its memory grows."""

    def __init__(self) -> None:
        self._findings = FindingWatch()
        self.control: Control | None = None
        # The newest look when the last one was asked for, and when that was.
        self._asked: HoldersEvent | None = None
        self._asked_t = -ANSWER_S

    def _due(self, snapshot: Snapshot) -> bool:
        """Whether no look that was asked for is still to come."""
        return snapshot.looked is not self._asked or time.monotonic() - self._asked_t >= ANSWER_S

    def __call__(self, snapshot: Snapshot, last: bool = False) -> list[FindingEvent]:
        """The events to record. Raises whatever a rule raises."""
        if self.control is not None and not last and self._due(snapshot) and wants_look(snapshot):
            self._asked, self._asked_t = snapshot.looked, time.monotonic()
            self.control.request("holders")
        return self._findings(snapshot, last)


class Run:
    """An open run, made by `Run.open` unless its record is written elsewhere.

    listens: whether other processes can send requests.
    """

    def __init__(
        self,
        executor: Executor,
        directory: RunDir,
        recorder: Recorder,
        lock: RunLock,
        *,
        listens: bool = True,
    ) -> None:
        self.executor, self.directory, self.recorder = executor, directory, recorder
        self.control = Control(executor.refusal)
        self.finished = threading.Event()
        self.end: EndEvent | None = None
        self._lock = lock
        self._server = ControlServer(directory.control_socket, self._asked, self.put) if listens else None
        executor.run = self

    @classmethod
    def open(cls, executor: Executor, listener: Listener | None = None) -> Run:
        """Check what is executed, then create and lock the folder, start the record and listen for requests.

        Everything is undone if that fails. Raises what `Executor.check` raises, UsageError if something cannot be
        written, and MachineError if a thread cannot be started.
        """
        directory = executor.check()
        with contextlib.ExitStack() as undo:
            if directory is None:
                directory = executor.new_folder()
                undo.callback(discard, directory)
            lock = RunLock(directory)
            undo.callback(lock.release)
            try:
                check_regular(directory.events, directory.console_log, directory.config, directory.command)
                try:
                    lock.acquire()
                except RunLockedError:
                    undo.pop_all()  # another process has taken the new folder: leave it alone
                    raise
                undo.callback(executor.close)
                state = executor.begin(directory)
                if state is not None:
                    # Viewers that look before the engine starts must not see the old end.
                    state.fold(time.time(), StageEvent("resume", "starting"))
                watch = Watch() if executor.watched else None
                recorder = Recorder(directory.events, state, listener, watch)
                undo.callback(recorder.close)
                recorder.start()
                run = cls(executor, directory, recorder, lock)
                if watch is not None:
                    watch.control = run.control
                run._listen()
            except OSError as error:
                where = printable(str(error.filename or directory.path))
                raise UsageError(f"cannot write to {where}: {error.strerror}") from None
            except RuntimeError as error:
                reason = "too many processes and threads (ulimit -u), or no memory for the stack of another (ulimit -v)"
                raise MachineError(f"{error}: {reason}") from None
            undo.pop_all()
        return run

    def execute(self) -> EndEvent:
        """Run to the end on this thread; records and returns the end. Never raises an Exception."""
        self.end = end = self.executor.execute()
        self.conclude(end)
        self.recorder.flush()
        self.finished.set()
        return end

    def execute_until(self, enough: Callable[[Snapshot], bool]) -> EndEvent:
        """Run to the end, or until `enough` holds of the state, and close. enough: asked five times a second."""

        def watch() -> None:
            while not self.finished.wait(0.2):
                if enough(self.recorder.snapshot()):
                    self.control.request("kill", "observed for long enough")
                    return

        threading.Thread(target=watch, name="ndd-watch", daemon=True).start()
        try:
            return self.execute()
        finally:
            self.finished.set()
            self.close()

    def conclude(self, end: EndEvent) -> None:
        """Record the end."""
        for event in self.executor.last_events(end):
            self.put(event)

    def close(self) -> None:
        """Write the record to its end, close the control socket and unlock the run; safe to call twice.

        A new folder to which nothing could be written (a full disk) is removed, so that its name is not taken.
        """
        if self._server is not None:
            self._server.close()
        self.recorder.flush()
        self.executor.close()
        self.recorder.close()
        if self.recorder.dropped and self.end is not None:
            discard(self.directory)
        self._lock.release()

    def put(self, event: Event) -> None:
        """Record an event."""
        self.recorder.put(event)

    def ended(
        self,
        status: str,
        reason: str,
        step: int,
        exit_status: int | None = None,
        checkpoint: str | None = None,
        **more: object,
    ) -> EndEvent:
        """The end of the run, with its figures. more: further data."""
        self.recorder.settle()  # the figures include everything that was measured
        data = {
            "run": self.directory.name, "dropped_events": self.recorder.dropped,
            "figures": figures(self.recorder.snapshot()), **more,
        }  # fmt: skip
        if exit_status is None:
            exit_status = EXIT_OF.get(status, EXIT_FAILED)
        return EndEvent(status, reason, step, exit_status, checkpoint, data)

    def _listen(self) -> None:
        """Listen for requests; a folder that supports no sockets is only a warning."""
        assert self._server is not None
        try:
            self._server.start()
        except (OSError, RuntimeError) as error:
            self._server.close()
            text = f"cannot create control.sock ({getattr(error, 'strerror', None) or error})"
            self.put(MarkEvent("warning", 0, f"{text}: attach can watch this run but not control it"))

    def _asked(self, action: str, holder: int | None) -> None:
        """Handle a request from the control socket. Raises UsageError for what cannot be obeyed."""
        self.control.request(action, self.executor.on_request, holder=holder)
