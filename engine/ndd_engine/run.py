"""A run from its opening to its end: folder, lock, record, control and ends. What it executes is an argument.

The console calls `execute` in a thread, a headless run on the main thread. Requests to a run come from any thread.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import psutil

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
from ndd_engine.record.channel import ControlServer
from ndd_engine.record.events import EndEvent, Event, FindingEvent, HoldersEvent, MarkEvent, StageEvent
from ndd_engine.record.figures import figures
from ndd_engine.record.file import Listener, Recorder
from ndd_engine.record.rundir import RunDir, RunLock, check_regular, discard
from ndd_engine.record.snapshot import Snapshot
from ndd_engine.record.state import RunState
from ndd_engine.text import duration, printable


class StopNow(BaseException):
    """Stops the loop immediately, without a checkpoint. Not an Exception, so that nothing swallows it."""


# What is done once after a request, and the statuses of a run that stops.
ONCE = ("checkpoint", "evaluate", "kernels", "holders")
STOPS = ("stopped", "interrupted", "terminated", "failed")


@dataclass
class Requests:
    """once: of `ONCE`. stop: the status of a run that is to stop. kill: without a checkpoint."""

    paused: bool = False
    once: set[str] = field(default_factory=set)
    stop: str | None = None
    kill: bool = False


class Control:
    """Requests to a run. Those to one of several ranks act on it once all ranks have agreed on them, see `share`.

    pending: whether a request acts on a loop; a plain attribute, so that it can check that in each step at no cost.

    refusal: returns why an action is impossible, "" if it is not. passed_on: of a run that other processes execute,
    (action, holder) of the requests that are passed on to them; they know whether they are paused.
    """

    def __init__(self, refusal: Callable[[str], str] = lambda _: "") -> None:
        self._refusal = refusal
        self.passed_on: deque[tuple[str, int | None]] | None = None
        self.pending = False
        self.stop_reason = ""
        self._changed = threading.Condition()
        self._wanted = self._acting = Requests()
        self._meet: Callable[[], None] | None = None
        self._paused = False  # without a holder
        self._holders: dict[int, psutil.Process] = {}

    def request(
        self, action: str, reason: str = "on request", status: str = "stopped", holder: int | None = None
    ) -> None:
        """Request one of pause, resume, checkpoint, evaluate, kernels, holders, stop, kill.

        status: the run's status after a stop. holder: process id that holds a pause; the pause ends when that process
        sends resume or exits. A resume without a holder ends every pause. Raises UsageError if the holder is not a
        running process on this host, and for what the run cannot do.
        """
        if why := self._refusal(action):
            raise UsageError(why)
        if self.passed_on is not None and action not in ("stop", "kill"):
            self.passed_on.append((action, holder))
            return
        process = _process(holder) if holder is not None and action == "pause" else None
        with self._changed:
            wanted = self._wanted
            if action == "pause":
                if process is None:
                    self._paused = True
                else:
                    self._holders[process.pid] = process
            elif action == "resume":
                if holder is None:
                    self._paused = False
                    self._holders.clear()
                else:
                    self._holders.pop(holder, None)
            elif action in ONCE:
                wanted.once.add(action)
            elif action in ("stop", "kill"):
                # The first reason is kept; a second request only stops faster.
                if wanted.stop is None:
                    wanted.stop, self.stop_reason = status, reason
                wanted.kill = wanted.kill or action == "kill"
            else:
                raise ValueError(f"unknown action {action!r}")
            wanted.paused = self._paused or bool(self._holders)
            self.pending = self.pending or wanted is self._acting
            self._changed.notify_all()

    # What was requested.

    @property
    def stop_status(self) -> str | None:
        """The status of a run that is to stop; None without such a request."""
        return self._wanted.stop

    @property
    def stopping(self) -> bool:
        return self._wanted.stop is not None

    @property
    def kill(self) -> bool:
        """Whether an immediate stop was requested."""
        return self._wanted.kill

    @property
    def holders(self) -> tuple[int, ...]:
        """Ids of the processes that hold a pause."""
        return tuple(self._holders)

    # What acts on the loop.

    @property
    def paused(self) -> bool:
        return self._acting.paused

    @property
    def stops(self) -> str | None:
        """The status with which the loop has to end, or None."""
        return self._acting.stop

    def take_once(self) -> set[str]:
        """Return the one-time requests since the last call; clears `pending` unless the run is paused or stopping."""
        with self._changed:
            acting = self._acting
            once, acting.once = acting.once, set()
            self.pending = acting.paused or acting.stop is not None
            return once

    def check_kill(self, alone: bool = False) -> None:
        """Raise StopNow for an immediate stop. alone: also for one that other ranks have not agreed on."""
        if self._wanted.kill if alone else self._acting.kill:
            raise StopNow

    def wait(self, timeout_s: float) -> None:
        """While paused: sleep until a request or the timeout, drop holders that have exited, and meet other ranks."""
        with self._changed:
            wanted = self._wanted
            if wanted.paused and not wanted.once and wanted.stop is None:
                self._changed.wait(timeout_s)
            for process in [held for held in self._holders.values() if not _lives(held)]:
                del self._holders[process.pid]
            wanted.paused = self._paused or bool(self._holders)
        if self._meet is not None:
            self._meet()

    # With other ranks.

    def share(self, meet: Callable[[], None]) -> None:
        """From now on only `obey` lets requests act. meet: called again and again while all ranks pause, to agree."""
        self._acting, self._meet, self.pending = Requests(), meet, False

    def asks(self) -> set[str]:
        """What this rank wants of all of them: what is done once only once, a pause and a stop as long as they last."""
        with self._changed:
            wanted = self._wanted
            asked, wanted.once = wanted.once, set()
            lasting = {
                "pause": wanted.paused,
                "kill": wanted.kill,
                wanted.stop or "": wanted.stop is not None,
            }
            return asked | {name for name, on in lasting.items() if on}

    def obey(self, asked: Mapping[str, int]) -> None:
        """Let requests act on this rank. asked: of all ranks, with one that asks."""
        with self._changed:
            wanted, acting = self._wanted, self._acting
            acting.once |= asked.keys() & set(ONCE)
            acting.paused, acting.kill = "pause" in asked, "kill" in asked
            wanted.kill = wanted.kill or acting.kill
            for status in STOPS:
                if status in asked and acting.stop is None:
                    acting.stop = status
                    if wanted.stop is None:
                        wanted.stop, self.stop_reason = status, f"{status} at rank {asked[status]}"
            self.pending = bool(acting.once) or acting.paused or acting.stop is not None


def _process(pid: int) -> psutil.Process:
    try:
        return psutil.Process(pid)
    except (psutil.Error, ValueError, OverflowError):
        raise UsageError(f"cannot pause for process {pid}: there is no such process on this host") from None


def _lives(process: psutil.Process) -> bool:
    """Whether it is still the same running process; a zombie does not count."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def pause_mark(step: int, holders: list[int]) -> MarkEvent:
    """holders: ids of the processes that hold the pause."""
    if not holders:
        return MarkEvent("pause", step, f"paused at step {step:,}")
    who = f"process{'' if len(holders) == 1 else 'es'} {', '.join(map(str, holders))}"
    return MarkEvent("pause", step, f"paused for a trial by {who}", {"holders": holders})


def resume_mark(step: int, seconds: float) -> MarkEvent:
    """The end of a pause of so many seconds."""
    return MarkEvent("resume", step, f"resumed after {duration(seconds)}", {"seconds": seconds})


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
                raise MachineError(f"{error}: too many processes and threads (ulimit -u)") from None
            undo.pop_all()
        return run

    def execute(self) -> EndEvent:
        """Run to the end on this thread; records and returns the end. Never raises an Exception."""
        self.end = end = self.executor.execute()
        self.conclude(end)
        self.recorder.flush()
        self.finished.set()
        return end

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
