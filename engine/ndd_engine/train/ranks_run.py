"""A run of several ranks as the console sees it: starts them, follows their record, and passes requests on.

The counterpart of `run.Run` in the process of the console. The ranks do not depend on it: they go on when it ends.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from ndd_engine.errors import EXIT_FAILED, UsageError
from ndd_engine.record.channel import send
from ndd_engine.record.events import EndEvent, Event, StageEvent
from ndd_engine.record.file import Recorder, RunReader, load_state
from ndd_engine.record.rundir import RunDir, RunLock, discard, new_run_dir
from ndd_engine.record.snapshot import Snapshot
from ndd_engine.text import counted

from .parallel.rank_ends import record_end
from .preflight import check_resume, preflight
from .request import RunRequest
from .run import EXIT_OF

POLL_S = 0.1
SAID_S = 10.0
# From a request to stop, which the ranks cannot obey before they listen, to a signal for the launcher.
PATIENCE_S = 30.0
# The launcher kills ranks 3 s after a request for an immediate stop; if it does not end either, it is killed.
KILL_PATIENCE_S = 8.0
ORPHANS_S = 6.0
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
                agent = subprocess.Popen(
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
        # Ranks whose launcher was killed end by themselves.
        deadline = time.monotonic() + ORPHANS_S
        while self.directory.live_owner() is not None and time.monotonic() < deadline:
            time.sleep(POLL_S)
        self.recorder.poll(running=False)
        snapshot = self.recorder.snapshot()
        if snapshot.end is not None:
            return self._ended(snapshot.end)
        text = f"the launcher of the ranks ended with status {agent.returncode}; see console.log"
        end = EndEvent("failed", text, snapshot.step, EXIT_FAILED)
        if (status := self.control.stop_status) is not None:
            reason = f"{self.control.stop_reason} before the first step"
            end = EndEvent(status, reason, snapshot.step, EXIT_OF.get(status, EXIT_FAILED))
        record_end(self.directory, end)
        return self._ended(end)

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


class RanksControl:
    """Passes requests on: a stop to the launcher of the ranks, others to rank 0; the ranks agree on them."""

    def __init__(self, run: RanksRun) -> None:
        self._run = run
        self.stop_status: str | None = None
        self.stop_reason = ""
        self.kill = False
        self._wanted: deque[tuple[str, int | None]] = deque()
        self._asked_t = 0.0
        self._stopped = False
        self._signals = 0
        self._killed_t: float | None = None

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
        """Pass on what was requested; called again and again."""
        while self._wanted:
            action, holder = self._wanted.popleft()
            try:
                send(self._run.directory.control_socket, action, holder=holder)
            except UsageError as error:
                self._run.recorder.say(str(error))
        if self.stop_status is None:
            return
        now = time.monotonic()
        if not self._stopped:
            self._stopped = self._stop(agent, now)
        elif self.kill and self._signals < 2:
            # The launcher kills after its second signal. Each is sent in a turn of its own, or two would arrive as one.
            self._signals += 1
            self._killed_t = now
            agent.send_signal(signal.SIGINT)
        elif self._killed_t is not None and now - self._killed_t > KILL_PATIENCE_S:
            agent.kill()  # the ranks notice that, and end

    def _stop(self, agent: subprocess.Popen[bytes], now: float) -> bool:
        """Ask the ranks to stop; False if they do not listen yet."""
        if self.stop_status == "stopped" and not self.kill and now - self._asked_t < PATIENCE_S:
            try:
                send(self._run.directory.control_socket, "stop")
            except UsageError:
                return False
        else:
            agent.send_signal(signal.SIGTERM if self.stop_status == "terminated" else signal.SIGINT)
            self._signals += 1
        return True


class FollowedRecord:
    """The record of rank 0, as `Recorder` shows one of this process.

    trouble: why it cannot be read, or why a request was not passed on. polled: called with the state after each look at
    the record.
    """

    trouble: str | None = None
    dropped = 0
    _said: tuple[str, float] = "", 0.0
    polled: Callable[[Snapshot], None] = staticmethod(lambda _: None)

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
        self.polled(snapshot)


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
