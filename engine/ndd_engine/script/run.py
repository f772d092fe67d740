"""A run of somebody else's script: open it, execute it on the calling thread, close it.

The counterpart of `train.run.Run`: the same folder, record and control socket, but the training is a command in a
process of its own, and the events come from the observer's records.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from ndd_engine.config.schema import LogSection
from ndd_engine.diagnose.watch import FindingWatch
from ndd_engine.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_TERMINATED,
    NddError,
    UsageError,
)
from ndd_engine.files import open_regular, write_text
from ndd_engine.hardware.detect import detect
from ndd_engine.hardware.sampler import Sampler
from ndd_engine.measure.memory_owners import largest
from ndd_engine.record.channel import ControlServer
from ndd_engine.record.events import EndEvent, Event, RunEvent, StageEvent
from ndd_engine.record.figures import figures
from ndd_engine.record.file import Listener, Recorder
from ndd_engine.record.rundir import RunDir, RunLock, new_run_dir, opening
from ndd_engine.recordings.snapshot_file import read_snapshot
from ndd_engine.text import counted, printable
from ndd_engine.train.loggers import Loggers, missing
from ndd_watch import CAPTURES, MEMORY, SITE
from ndd_watch.allocations import NAME as SNAPSHOT

from .command import Command, environment
from .control import ScriptControl
from .follower import Follower
from .launch import Launched
from .output import OutputLog
from .progress import readable_by
from .records import Room

POLL_S = 0.2
# From the request to stop to SIGTERM, if the script goes on.
PATIENCE_S = 20.0
# Bytes at the end of the output in which its last line is looked for.
LONGEST_LINE = 500
EXIT_OF = {"stopped": EXIT_DONE, "interrupted": EXIT_INTERRUPTED, "terminated": EXIT_TERMINATED}


@dataclass(frozen=True)
class ScriptRequest:
    """root: the folder of all runs. name: of the run; None for the next free one of the script.

    screen: a screen occupies the terminal; the output of the command goes to the log only. folder: where the command
    runs instead of its own folder, such as a scratch copy. memory_history: record which lines allocate GPU memory.
    kernels_every: take a profiler capture every so many optimizer steps of a script on a GPU; 0: only on request.
    log: the loggers that write the figures for other viewers, too.
    """

    command: Command
    root: Path
    name: str | None = None
    screen: bool = False
    folder: Path | None = None
    memory_history: bool = False
    kernels_every: int = 0
    log: LogSection = field(default_factory=LogSection)


class ScriptRun:
    """An open run of a script: folder, lock, record and control. Use `ScriptRun.open`."""

    def __init__(
        self,
        request: ScriptRequest,
        directory: RunDir,
        lock: RunLock,
        recorder: Recorder,
        echo: OutputLog,
        loggers: Loggers,
    ) -> None:
        self.request, self.directory, self.recorder = request, directory, recorder
        self.control = ScriptControl()
        self.finished = threading.Event()
        self.end: EndEvent | None = None
        self.launched: Launched | None = None
        self._lock, self._output, self._loggers = lock, echo, loggers
        self._server = ControlServer(directory.control_socket, self._asked, self.put)
        self._follower: Follower | None = None

    @classmethod
    def open(cls, request: ScriptRequest, listener: Listener | None = None) -> ScriptRun:
        """Check the command, then create and lock the folder. Raises UsageError before anything is written."""
        request.command.check()
        for key, value, text in missing(request.log):
            raise UsageError(f"log.{key} = {value} {text}")
        command = request.command
        with opening(
            None,
            lambda: new_run_dir(request.root, request.name, command.run_name),
            lambda directory: directory.command,
        ) as opened:
            directory = opened.directory
            write_text(directory.command, json.dumps(command.to_dict(), indent=2) + "\n")
            recorder = Recorder(directory.events, None, listener, FindingWatch())
            opened.undo(recorder.close)
            recorder.start()
            output = OutputLog(directory.console_log, None if request.screen else 1)
            loggers = Loggers(request.log, directory, command.run_name, recorder)
            opened.undo(loggers.close)
            run = cls(request, directory, opened.lock, recorder, output, loggers)
            opened.listen(run._server, run.put)
            return run

    def execute(self) -> EndEvent:
        """Run the command to its end; records and returns the end. Never raises an Exception."""
        try:
            end = self._execute()
        except Exception as error:  # noqa: BLE001  every kind of end is reported
            if self.launched is not None:
                self.launched.kill()
            end = self._ended(
                "failed", f"the command cannot be observed: {type(error).__name__}: {error}", EXIT_FAILED
            )
        self.end = end
        self.recorder.put(end)
        self.recorder.flush()
        self.finished.set()
        return end

    def close(self) -> None:
        """Write the record to its end, close the control socket and unlock the run; safe to call twice."""
        self._server.close()
        self.recorder.flush()
        self._loggers.close()  # they may still report a problem
        self.recorder.close()
        self._output.close()
        self._lock.release()

    def put(self, event: Event) -> None:
        """Record an event. The files of a scratch copy are named as those of the script's own folder."""
        folder = self.request.folder
        if isinstance(event, RunEvent) and folder is not None:
            scratch, own = (
                json.dumps(f"{path}{os.sep}")[:-1] for path in (folder, self.request.command.folder)
            )
            event = replace(event, config=json.loads(json.dumps(event.config).replace(scratch, own)))
        self.recorder.put(event)

    def _execute(self) -> EndEvent:
        command, folder = self.request.command, self.request.folder
        self.put(StageEvent("prepare", f"waiting for the first step of {command.text}"))
        machine = detect(use_torch=False)
        room = Room(self.directory.ranks)
        every = self.request.kernels_every
        follower = self._follower = Follower(self.directory, command, machine, self.put, room.folder, every)
        sampler = Sampler(None, self.put, run_dir=self.directory.path)
        sampler.follow(None, None)
        size = shutil.get_terminal_size()
        try:
            self.launched = launched = Launched(
                command if folder is None else replace(command, folder=folder),
                {**environment(room.folder.absolute(), SITE), **readable_by(os.getpid()), **self._folders()},
                self._output.write, self.request.screen, (size.columns, size.lines),
            )  # fmt: skip
        except OSError as error:
            room.close()
            return self._ended("failed", f"cannot start {command.text}: {error.strerror}", EXIT_FAILED)
        sampler.start()
        status = None
        try:
            while status is None:
                status = launched.wait(POLL_S)
                if self.control.take_capture():
                    follower.capture()
                follower.poll()
                if follower.trains != sampler.followed:
                    sampler.follow(*follower.trains)
                room.fill()
                self._obey(launched)
                launched.resize(*shutil.get_terminal_size())
        finally:
            sampler.stop()
            launched.close()
        follower.finish()
        room.close()
        return self._ended(*self._outcome(status, follower), status)

    # Control.

    def _asked(self, action: str, holder: int | None) -> None:
        """Handle a request from the control socket. Raises UsageError for what a script cannot do."""
        self.control.request(action, "stopped from another terminal", holder=holder)

    def _folders(self) -> dict[str, str]:
        """Where the process writes what is too long for its memory."""
        folder = str(self.directory.path.absolute())
        return {CAPTURES: folder, **({MEMORY: folder} if self.request.memory_history else {})}

    def _obey(self, launched: Launched) -> None:
        """Pass a requested stop on: Ctrl-C first, SIGTERM if that has no effect, and SIGKILL for an immediate stop."""
        control = self.control
        if not control.stopping:
            return
        if control.kill:
            launched.kill()
            return
        since = control.sent
        if since is None:
            control.sent = time.monotonic()
            launched.signal(signal.SIGTERM if control.stop_status == "terminated" else signal.SIGINT)
        elif time.monotonic() - since > PATIENCE_S and not control.pressed:
            control.pressed = True
            launched.signal(signal.SIGTERM)

    # The end.

    def _outcome(self, status: int, follower: Follower) -> tuple[str, str]:
        """(status, reason) of a command that has ended."""
        steps = f"after {counted(follower.step, 'step')}" if follower.trained else "and no training was seen"
        if follower.trained and not follower.step:
            steps = "and no step of an optimizer was seen"
        asked = self.control.stop_status
        if asked is None and status in (128 + signal.SIGINT, 128 + signal.SIGTERM):
            # Typed into its own terminal, or sent by somebody else.
            asked = "interrupted" if status == 128 + signal.SIGINT else "terminated"
            return asked, f"{killed_by(status)} {steps}"
        if asked is not None:
            return asked, f"{self.control.stop_reason}, {steps}; the command ended with status {status}"
        if status == 0:
            hint = "" if follower.trained else f": {UNSEEN}"
            return "done", f"the command ended {steps}{hint}"
        how = killed_by(status) or f"the command ended with status {status}"
        if snapshots := sorted(self.directory.path.glob(f"{SNAPSHOT}*.pickle")):
            steps += f"; {filled(snapshots[0])}"
        if follower.ended is not None and follower.ended[1]:
            return "failed", f"{how} {steps}: {follower.ended[1]}"
        line = "" if killed_by(status) else last_line(self.directory.console_log)
        return "failed", f"{how} {steps}" + (f"; last output: {line}" if line else "")

    def _ended(self, status: str, reason: str, exit_status: int) -> EndEvent:
        self.recorder.settle()  # the figures include everything that was measured
        found = figures(self.recorder.snapshot())
        follower = self._follower
        data = {
            "run": self.directory.name, "dropped_events": self.recorder.dropped, "figures": found,
            "not_shown": [] if follower is None else follower.not_shown,
        }  # fmt: skip
        step = follower.step if follower is not None else 0
        return EndEvent(status, reason, step, exit_status, None, data)


def last_line(path: Path) -> str:
    """The last line in the log of the output, often the cause of exit; "" if the output went past it."""
    try:
        with os.fdopen(open_regular(path, os.O_RDONLY), "rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - LONGEST_LINE, 0))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return next((printable(line.strip()) for line in reversed(lines) if line.strip()), "")


def filled(snapshot: Path) -> str:
    """What had filled the GPU's memory, by a snapshot that the script left."""
    named = ""
    with contextlib.suppress(NddError, ValueError, OSError):
        named = largest(
            (block.frames, block.requested)
            for device in read_snapshot(snapshot).devices
            for segment in device.segments
            for block in segment.blocks
            if block.live
        )
    told = f"largest owners of GPU memory: {named}; " if named else ""
    return f"{told}explain with: ndd-console memory {printable(str(snapshot))}"


UNSEEN = (
    "no process of it called backward or stepped an optimizer of torch (parameters that are updated by hand after "
    "torch.autograd.grad are not seen), or none could be observed (python -I, -E and -S, an emptied environment and a "
    "changed PYTHONPATH keep the observer out)"
)


def killed_by(status: int) -> str:
    """ "killed by SIGKILL" for an exit status above 128; "" otherwise."""
    if status <= 128:
        return ""
    try:
        return f"the command was killed by {signal.Signals(status - 128).name}"
    except ValueError:
        return ""
