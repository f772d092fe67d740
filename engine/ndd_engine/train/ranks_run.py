"""A run of several ranks as the console sees it: starts them, follows their record, and passes requests on.

The counterpart of `run.Run` in the process of the console. The ranks do not depend on it: they go on when it ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import psutil

from ndd_engine.errors import EXIT_FAILED, UsageError
from ndd_engine.record.channel import send
from ndd_engine.record.events import EndEvent, Event, StageEvent
from ndd_engine.record.reader import RunReader, load_state
from ndd_engine.record.recorder import Recorder
from ndd_engine.record.rundir import RunDir, RunLock, discard, new_run_dir
from ndd_engine.record.snapshot import Snapshot
from ndd_engine.text import counted, printable

from .preflight import check_resume, preflight
from .request import RunRequest

POLL_S = 0.2
SAID_S = 10.0
# From a request to stop, which the ranks cannot obey before they listen, to SIGTERM for the launcher.
PATIENCE_S = 30.0
KILL_PATIENCE_S = 3.0
_AGENT = "ndd_engine.train.parallel.agent"

Listener = Callable[[float, Event], None]


class RanksRun:
    """An open run of several ranks. Use `RanksRun.open`; then as a Run: `execute`, `close`, `control`, `recorder`."""

    def __init__(
        self, request: RunRequest, directory: RunDir, command: Sequence[str], listener: Listener | None
    ) -> None:
        self.request, self.directory = request, directory
        self.finished = threading.Event()
        self.end: EndEvent | None = None
        self.control = RanksControl(self)
        self.recorder = FollowedRecord(directory, listener, request)
        self._command = command
        self._agent: subprocess.Popen[bytes] | None = None

    @classmethod
    def open(cls, request: RunRequest, command: Sequence[str], listener: Listener | None = None) -> RanksRun:
        """Check the request and create the folder. command: what each rank runs. Raises UsageError, ConfigError."""
        config = preflight(request.draft, use_torch=False)
        directory = request.resume or request.restart
        if directory is None:
            directory = new_run_dir(request.root, request.draft.run_name, request.draft.workload)
        elif request.resume is not None:
            if (owner := directory.live_owner()) is not None:
                raise UsageError(f"run {directory.name} is being written by process {owner.get('pid')}")
            check_resume(directory.name, load_state(directory), config, request.from_step)
            _reopen(directory)
        return cls(request, directory, command, listener)

    def execute(self) -> EndEvent:
        """Run the ranks to their end. Never raises an Exception."""
        section = self.request.draft.resolve().parallel
        words = [
            sys.executable, "-m", _AGENT, str(section.ranks), str(section.restarts),
            str(self.directory.path.absolute()), *self._command,
        ]  # fmt: skip
        try:
            with self.directory.console_log.open("ab") as log:
                self._agent = agent = subprocess.Popen(
                    words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                )
        except OSError as error:
            return self._ended(
                EndEvent("failed", f"cannot start the ranks: {error.strerror}", 0, EXIT_FAILED)
            )
        while agent.poll() is None:
            time.sleep(POLL_S)
            self.recorder.poll(running=True)
            self.control.obey(agent)
        self.recorder.poll(running=False)
        snapshot = self.recorder.snapshot()
        if snapshot.end is not None:
            return self._ended(snapshot.end)
        if self.control.stop_status is not None:
            status = {"interrupted": 130, "terminated": 143}.get(self.control.stop_status, 0)
            reason = f"{self.control.stop_reason} before the first step"
            return self._ended(EndEvent(self.control.stop_status, reason, snapshot.step, status))
        text = self._last_words() or f"the ranks ended with status {agent.returncode}; see console.log"
        return self._ended(EndEvent("failed", text, snapshot.step, EXIT_FAILED))

    def close(self) -> None:
        """Remove the folder of a run that recorded nothing."""
        if self.request.resume is None and self.request.restart is None:
            discard(self.directory)

    def put(self, event: Event) -> None:
        """Events of this process, such as trials, are recorded by rank 0 only."""

    def _ended(self, end: EndEvent) -> EndEvent:
        self.end = end
        self.finished.set()
        return end

    def _last_words(self) -> str:
        """The message of rank 0 if it could not open the run."""
        with contextlib.suppress(OSError):
            lines = self.directory.console_log.read_text(encoding="utf-8", errors="replace").splitlines()
            own = [line for line in lines if line.startswith("ndd-console: ")]
            if own:
                return printable(own[-1].removeprefix("ndd-console: "))
        return ""


class RanksControl:
    """Passes requests on to rank 0, which agrees on them with the other ranks."""

    def __init__(self, run: RanksRun) -> None:
        self._run = run
        self.stop_status: str | None = None
        self.stop_reason = ""
        self.kill = False
        self._asked_t: float | None = None
        self._sent = self._killed = False
        self._wanted: deque[tuple[str, int | None]] = deque()

    @property
    def stopping(self) -> bool:
        return self.stop_status is not None

    def request(
        self, action: str, reason: str = "on request", status: str = "stopped", holder: int | None = None
    ) -> None:
        """Request what Control.request takes, soon and from any thread; see FollowedRecord.trouble."""
        if action not in ("stop", "kill"):
            self._wanted.append((action, holder))
            return
        if self.stop_status is None:
            self.stop_status, self.stop_reason, self._asked_t = status, reason, time.monotonic()
        self.kill = self.kill or action == "kill"

    def obey(self, agent: subprocess.Popen[bytes]) -> None:
        """Pass on what was requested: a stop as soon as the ranks listen. End the ranks if they do not."""
        while self._wanted:
            action, holder = self._wanted.popleft()
            try:
                send(self._run.directory.control_socket, action, holder=holder)
            except UsageError as error:
                self._run.recorder.say(str(error))
        if self._asked_t is None:
            return
        if self.kill and not self._killed:
            self._killed = True
            for rank in _children(agent.pid):
                for _ in range(2):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(rank, signal.SIGINT)
        if not self._sent:
            self._sent = self._stop()
        late = time.monotonic() - self._asked_t > (KILL_PATIENCE_S if self.kill else PATIENCE_S)
        if late and (self.kill or not self._sent):
            agent.terminate()

    def _stop(self) -> bool:
        """Pass the stop on to rank 0; False if it does not listen yet."""
        number = {"interrupted": signal.SIGINT, "terminated": signal.SIGTERM}.get(self.stop_status or "")
        run = self._run.recorder.snapshot().run
        with contextlib.suppress(UsageError, ProcessLookupError):
            if number is None:
                send(self._run.directory.control_socket, "stop")
                return True
            if run is not None and run.host == socket.gethostname():
                os.kill(run.pid, number)
                return True
        return False


class FollowedRecord:
    """The record of rank 0, as `Recorder` shows one of this process.

    trouble: why it cannot be read, or why a request was not passed on.
    """

    trouble: str | None = None
    dropped = 0
    _said: tuple[str, float] = "", 0.0

    def __init__(self, directory: RunDir, listener: Listener | None, request: RunRequest) -> None:
        self._reader = RunReader(directory, listener)
        ranks = counted(request.draft.resolve().parallel.ranks, "rank")
        self._reader.state.fold(time.time(), StageEvent("prepare", f"starting {ranks}"))
        self._snapshot = self._reader.state.snapshot()

    def snapshot(self) -> Snapshot:
        """The current state."""
        return self._snapshot

    def say(self, text: str) -> None:
        """Show a message for a while."""
        self._said = text, time.monotonic() + SAID_S

    def poll(self, running: bool) -> None:
        """Read what is new. running: whether the launcher of the ranks runs, which may restart them."""
        self._reader.poll()
        said, until = self._said
        self.trouble = self._reader.trouble or (said if time.monotonic() < until else None)
        snapshot = self._reader.snapshot()
        if running and snapshot.final:
            # Between two attempts, or while the last rank leaves.
            snapshot = replace(
                snapshot, status="preparing" if snapshot.status == "lost" else "stopping", end=None
            )
        elif not running and snapshot.end is None and snapshot.status == "lost":
            snapshot = replace(snapshot, status="failed")
        self._snapshot = snapshot


def _reopen(directory: RunDir) -> None:
    """Record that the run resumes, so that viewers do not see its old end."""
    lock = RunLock(directory)
    lock.acquire()
    try:
        recorder = Recorder(directory.events, load_state(directory))
        recorder.start()
        recorder.put(StageEvent("resume", "starting the ranks"))
        recorder.close()
    finally:
        lock.release()


def _children(pid: int) -> list[int]:
    try:
        return [child.pid for child in psutil.Process(pid).children()]
    except psutil.Error:
        return []
