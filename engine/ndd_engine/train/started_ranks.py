"""A run of several ranks as the console sees it: starts them, follows their record, and passes requests on.

The ranks do not depend on it: they continue when it ends.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

from ndd_engine.errors import EXIT_FAILED, UsageError
from ndd_engine.record.events import EndEvent, Event, StageEvent
from ndd_engine.record.file import Listener, Recorder, RunReader, load_state
from ndd_engine.record.rundir import RunDir, RunLock, discard, new_run_dir
from ndd_engine.record.snapshot import Snapshot
from ndd_engine.run.channel import send
from ndd_engine.run.run import EXIT_OF, Executor, Run
from ndd_engine.text import counted
from ndd_engine.train.parallel.rank_place import record_end

from .request import RunRequest, check_resume, preflight

POLL_S = 0.1
SAID_S = 10.0
# From a request to stop, which the ranks cannot obey before they listen, to a signal for the launcher.
PATIENCE_S = 30.0
# The launcher kills ranks 3 s after a request for an immediate stop; if it does not end either, it is killed.
KILL_PATIENCE_S = 8.0
ORPHANS_S = 6.0
_AGENT = "ndd_engine.train.parallel.rank_place"


class StartedRanks(Executor):
    """The process that starts the ranks and restarts them. command: what each rank runs."""

    def __init__(self, request: RunRequest, command: Sequence[str]) -> None:
        self.request, self._command = request, command
        self._requests: deque[tuple[str, int | None]] = deque()
        # When a stop was requested, whether the ranks know, signals to their launcher, and when the second one was.
        self._asked_t: float | None = None
        self._stopped = False
        self._signals = 0
        self._killed_t: float | None = None

    def open(self, listener: Listener | None = None) -> Run:
        """Check the request and create the folder, which rank 0 opens. Raises UsageError, ConfigError."""
        request = self.request
        config = preflight(request.draft, use_torch=False)
        directory = request.resume or request.restart
        if directory is None:
            directory = new_run_dir(request.root, request.draft.run_name, request.draft.workload)
        elif request.resume is not None:
            if (owner := directory.live_owner()) is not None:
                raise UsageError(f"run {directory.name} is being written by process {owner.get('pid')}")
            check_resume(directory.name, load_state(directory), config, request.from_step)
            # Record that the run resumes, so that viewers do not see its old end.
            lock = RunLock(directory)
            lock.acquire()
            try:
                recorder = Recorder(directory.events, load_state(directory))
                recorder.start()
                recorder.put(StageEvent("resume", "starting the ranks"))
                recorder.close()
            finally:
                lock.release()
        self._record = FollowedRecord(directory, listener, request)
        run = Run(self, directory, self._record, RunLock(directory), listens=False)
        run.control.passed_on = self._requests
        return run

    def execute(self) -> EndEvent:
        section, directory = self.request.draft.resolve().parallel, self.run.directory
        words = [
            sys.executable, "-m", _AGENT, str(section.ranks), str(section.restarts),
            str(directory.path.absolute()), *self._command,
        ]  # fmt: skip
        try:
            with directory.console_log.open("ab") as log:
                agent = subprocess.Popen(
                    words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                )
        except OSError as error:
            return EndEvent("failed", f"cannot start the ranks: {error.strerror}", 0, EXIT_FAILED)
        while agent.poll() is None:
            time.sleep(POLL_S)
            self._record.poll(running=True)
            self._pass_on(agent)
        # Ranks whose launcher was killed end by themselves.
        deadline = time.monotonic() + ORPHANS_S
        while directory.live_owner() is not None and time.monotonic() < deadline:
            time.sleep(POLL_S)
        self._record.poll(running=False)
        snapshot, control = self._record.snapshot(), self.run.control
        if snapshot.end is not None:
            return snapshot.end
        text = f"the launcher of the ranks ended with status {agent.returncode}; see console.log"
        end = EndEvent("failed", text, snapshot.step, EXIT_FAILED)
        if (status := control.stop_status) is not None:
            reason = f"{control.stop_reason} before the first step"
            end = EndEvent(status, reason, snapshot.step, EXIT_OF.get(status, EXIT_FAILED))
        record_end(directory, end)
        return end

    def last_events(self, end: EndEvent) -> Iterable[Event]:
        """The ranks have recorded it."""
        return ()

    def close(self) -> None:
        """Remove the folder of a run that recorded nothing."""
        if self.request.resume is None and self.request.restart is None:
            discard(self.run.directory)

    def _pass_on(self, agent: subprocess.Popen[bytes]) -> None:
        """A stop goes to the launcher of the ranks, other requests to rank 0; the ranks agree on them."""
        control, now = self.run.control, time.monotonic()
        while self._requests:
            action, holder = self._requests.popleft()
            try:
                send(self.run.directory.control_socket, action, holder=holder)
            except UsageError as error:
                self._record.say(str(error))
        if not control.stopping:
            return
        if self._asked_t is None:
            self._asked_t = now
        if not self._stopped:
            self._stopped = self._stop(agent, now - self._asked_t)
        elif control.kill and self._signals < 2:
            # The launcher kills after its second signal. Each is sent in a turn of its own, or two would arrive as one.
            self._signals += 1
            self._killed_t = now
            agent.send_signal(signal.SIGINT)
        elif self._killed_t is not None and now - self._killed_t > KILL_PATIENCE_S:
            agent.kill()  # the ranks notice that, and end

    def _stop(self, agent: subprocess.Popen[bytes], asked_s: float) -> bool:
        """Ask the ranks to stop, which was requested so long ago; False if they do not listen yet."""
        control = self.run.control
        if control.stop_status == "stopped" and not control.kill and asked_s < PATIENCE_S:
            try:
                send(self.run.directory.control_socket, "stop")
            except UsageError:
                return False
        else:
            agent.send_signal(signal.SIGTERM if control.stop_status == "terminated" else signal.SIGINT)
            self._signals += 1
        return True


class FollowedRecord(Recorder):
    """The record of rank 0, which this process only reads."""

    _said: tuple[str, float] = "", 0.0

    def __init__(self, directory: RunDir, listener: Listener | None, request: RunRequest) -> None:
        super().__init__(None)
        self._reader = RunReader(directory, listener)
        ranks = counted(request.draft.resolve().parallel.ranks, "rank")
        self._reader.state.fold(time.time(), StageEvent("prepare", f"starting {ranks}"))
        self._snapshot = self._reader.state.snapshot()

    def snapshot(self) -> Snapshot:
        """The current state."""
        return self._snapshot

    @property
    def trouble(self) -> str | None:
        """Why the record cannot be read, or why a request was not passed on."""
        said, until = self._said
        return self._reader.trouble or (said if time.monotonic() < until else None)

    def say(self, text: str) -> None:
        """Show a message for a while."""
        self._said = text, time.monotonic() + SAID_S

    def poll(self, running: bool) -> None:
        """Read what is new. running: whether the launcher of the ranks runs, which may restart them."""
        self._reader.poll()
        snapshot = self._reader.snapshot()
        if running and snapshot.final:
            # Between two attempts, or while the last rank leaves.
            snapshot = replace(
                snapshot, status="preparing" if snapshot.status == "lost" else "stopping", end=None
            )
        elif not running and snapshot.end is None and snapshot.status == "lost":
            snapshot = replace(snapshot, status="failed")
        self._snapshot = snapshot
