"""What a run executes that observes a script: a command that it starts, or a process that observes itself.

Requests are passed on to the processes: to pause, save a checkpoint, evaluate, or take a profiler capture. They are
integers in the memory of each process, see `ndd_watch.emit`. Ranks obey after the same step, which is far enough ahead
for all of them to have seen the request.

`python -m ndd_engine.script.script_run FOLDER PID` records a script that called `observe()`. The events come from the
observer's records.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from ndd_engine.config.schema import LogSection
from ndd_engine.errors import EXIT_DONE, EXIT_FAILED, NddError, RunLockedError, UsageError
from ndd_engine.files import open_regular
from ndd_engine.hardware.detect import detect
from ndd_engine.hardware.sampler import Sampler
from ndd_engine.measure.memory import largest
from ndd_engine.record.events import EndEvent, Event, MarkEvent, RunEvent, StageEvent
from ndd_engine.record.figures import death_text, obeyed
from ndd_engine.record.rundir import RunDir, new_run_dir
from ndd_engine.record.snapshot import Snapshot
from ndd_engine.record.state import RunState
from ndd_engine.recordings.recorded_files import read_snapshot
from ndd_engine.run.control import Control, pause_mark, resume_mark
from ndd_engine.run.run import Executor, Run
from ndd_engine.text import counted, printable
from ndd_engine.train.loggers import Loggers, missing
from ndd_watch import CAPTURES, MEMORY, SITE, mapped
from ndd_watch.holders import NAME as SNAPSHOT

from .command import Command, FileOutput, Launched, OutputLog, command_of, environment, in_copy
from .follower import Follower
from .records import Process, Room
from .stack_samples import readable_by

# What is asked for once, in the order of the counters in the memory.
ONCE = ("kernels", "checkpoint", "evaluate", "holders")
# Those for which a process needs no other rank.
ALONE = frozenset({"kernels", "holders"})
# Seconds in which every rank sees a request, since it looks at the end of a window; and for which processes are waited.
SEEN_S, REQUEST_PATIENCE_S = 4.0, 20.0
APART = "not all processes of the script reach the end of a step"
# What the frameworks of scripts do on request, by the names of their actions.
NEEDS_FRAMEWORK = {
    "checkpoint": "save a checkpoint on request: only those of Lightning and of Hugging Face's Trainer do",
    "evaluate": "evaluate on request: only those of Hugging Face's Trainer with an eval_strategy do",
}


def refusal(run: RunEvent | None, action: str) -> str:
    """Why a script does not obey a request; "" if it does. run: None before it has trained."""
    if action not in NEEDS_FRAMEWORK or action in obeyed(run):
        return ""
    return f"this script cannot {NEEDS_FRAMEWORK[action]}"


class Steering:
    """Requests to one script. put: gets the marks of its pauses.

    kernels_every: ask for a capture after every so many steps of a script that trains on a GPU; 0: on request.
    """

    def __init__(self, control: Control, put: Callable[[Event], None], kernels_every: int = 0) -> None:
        self._control, self._put = control, put
        self._every = self._due = kernels_every
        # By process: what it was asked for so far, as in its memory. And what was requested, but not asked for yet.
        self._asked: dict[Path, list[int]] = {}
        self._once: set[str] = set()
        # On the monotonic clock: since when ranks are missing, or only some of them pause; and the begin of the present
        # pause. 0.0 otherwise.
        self._apart_t = self._began_t = 0.0
        self._told_pause = False

    def look(self, processes: Sequence[Process], snapshot: Callable[[], Snapshot], step: int) -> None:
        """Pass on what was requested, after so many steps. processes: that train on this host."""
        self._control.wait(0.0)  # forget processes that held a pause and have exited
        if not processes:
            return  # what was requested waits for them
        self._once |= self._control.take_once()
        if self._every and step >= self._due:
            self._look_for_a_capture(snapshot().run, step)
        wants = self._control.paused and not self._control.stopping
        if not wants:
            self._release(step)
        if not (wants or self._once):
            return
        now = snapshot()
        run = now.run
        parallel = {} if run is None else run.config.get("parallel") or {}
        ranks = [process for process in processes if process.name.startswith("rank-")]
        missing = int(parallel.get("ranks") or 1) - max(len(ranks), 1)
        if missing > 0 and (wants or not self._once <= ALONE):
            self._wait(f"{counted(missing, 'rank')} cannot be asked: on other hosts, or not observed", step)
            return
        at, done = 0, [process.done for process in ranks]
        if len(ranks) > 1:
            if not now.steps_per_s or min(done) < max(self._of(process)[0] for process in ranks):
                # The speed is not known, or the request before is not obeyed yet.
                if any(process.paused for process in ranks):
                    self._wait(APART, step)
                return
            at = max(done) + math.ceil(now.steps_per_s * SEEN_S) + 2
        for process in ranks or processes[:1] if self._once else ():
            for place, action in enumerate(ONCE, 2):
                self._of(process)[place] += action in self._once
            self._ask(process, at)
        self._once.clear()
        if wants:
            self._pause(processes, at, step)

    def _look_for_a_capture(self, run: RunEvent | None, step: int) -> None:
        """Ask for a periodic capture, which is due."""
        if run is None:
            return
        if not run.device.startswith("cuda"):
            self._every = 0
            text = "no periodic profiler captures: the script does not train on a GPU; key k takes one"
            self._put(MarkEvent("note", step, text))
        else:
            self._due = (step // self._every + 1) * self._every
            self._once.add("kernels")

    def _pause(self, processes: Sequence[Process], at: int, step: int) -> None:
        for process in processes:
            if not self._of(process)[1]:
                self._of(process)[1] = os.getpid()
                self._ask(process, at)
        paused = sum(process.paused for process in processes)
        if 0 < paused < len(processes):
            self._wait(APART, step)
        elif paused and not self._began_t:
            # Told at the next look: the windows that end with the pause are read before.
            self._apart_t, self._began_t = 0.0, time.monotonic()
        elif paused and not self._told_pause:
            self._told_pause = True
            self._put(MarkEvent("status", step, "", {"status": "paused"}))
            self._put(pause_mark(step, list(self._control.holders)))

    def _release(self, step: int) -> None:
        """Let all of them train on."""
        for path, asked in self._asked.items():
            if asked[1]:
                asked[1] = 0
                self._write(path, asked)
        if self._told_pause:
            self._put(MarkEvent("status", step, "", {"status": "training"}))
            self._put(resume_mark(step, time.monotonic() - self._began_t))
        self._apart_t, self._began_t, self._told_pause = 0.0, 0.0, False

    def _wait(self, why: str, step: int) -> None:
        """For some of the processes; after a while, nothing of what was requested is done."""
        self._apart_t = self._apart_t or time.monotonic()
        if time.monotonic() - self._apart_t > REQUEST_PATIENCE_S:
            what = ", ".join(sorted({*self._once, *["pause"] * self._control.paused}))
            self._put(MarkEvent("warning", step, f"no {what}: {why}"))
            self._once.clear()
            self._control.request("resume")
            self._release(step)

    def _of(self, process: Process) -> list[int]:
        return self._asked.setdefault(process.path, [0] * mapped.REQUEST)

    def _ask(self, process: Process, at: int) -> None:
        asked = self._of(process)
        asked[0] = at
        self._write(process.path, asked)

    def _write(self, path: Path, asked: list[int]) -> None:
        with contextlib.suppress(OSError):  # it has ended
            mapped.ask(str(path), asked)


POLL_S = 0.2
# From the request to stop to SIGTERM, if the script continues.
PATIENCE_S = 20.0
# Bytes at the end of the output in which its last line is looked for.
LONGEST_LINE = 500
# Name of the file that tells that a script has closed its observation.
CLOSED = "closed"


@dataclass(frozen=True)
class ScriptRequest:
    """root: the folder of all runs. name: of the run; None for the next free one of the script.

    screen: a screen occupies the terminal; the output of the command goes to the log only. folder: where the command
    runs instead of its own folder, such as a scratch copy. memory_history: record which lines allocate GPU memory.
    kernels_every: take a profiler capture every so many optimizer steps of a script on a GPU; 0: only on request.
    log: the loggers that write the figures for other viewers, too. environment: variables beside those of this process.
    """

    command: Command
    root: Path
    name: str | None = None
    screen: bool = False
    folder: Path | None = None
    memory_history: bool = False
    kernels_every: int = 0
    log: LogSection = field(default_factory=LogSection)
    environment: Mapping[str, str] = field(default_factory=dict)


class Script(Executor):
    """A command. launched: what was started, None before."""

    # The process that trains, if it is known beforehand.
    _trains: int | None = None

    def __init__(self, request: ScriptRequest) -> None:
        self.request = request
        self.launched: Launched | None = None
        self._output: OutputLog | None = None
        self._files: FileOutput | None = None
        self._loggers: Loggers | None = None
        self._follower: Follower | None = None
        # Signals that are to be passed on.
        self._signals: list[int] = []
        # When Ctrl-C was sent, and whether SIGTERM followed.
        self._sent: float | None = None
        self._pressed = False

    def check(self) -> RunDir | None:
        self.request.command.check()
        for key, value, text in missing(self.request.log):
            raise UsageError(f"log.{key} = {value} {text}")
        return None

    def new_folder(self) -> RunDir:
        return new_run_dir(self.request.root, self.request.name, self.request.command.run_name)

    def begin(self, directory: RunDir) -> RunState | None:
        self.request.command.keep(directory)
        self._output = OutputLog(directory.console_log, None if self.request.screen else 1)
        if not self.request.screen:  # which has all of its output
            self._files = FileOutput(self._output.keep)
        return None

    def pass_on(self, number: int) -> None:
        """A signal that is meant for the script. Called by signal handlers."""
        self._signals.append(number)

    def refusal(self, action: str) -> str:
        return refusal(self.run.recorder.snapshot().run, action)

    def close(self) -> None:
        if self._loggers is not None:
            self._loggers.close()  # they may still report a problem
        if self._output is not None:
            self._output.close()

    def execute(self) -> EndEvent:
        try:
            return self._execute()
        except Exception as error:  # noqa: BLE001  every kind of end is reported
            if self.launched is not None:
                self.launched.kill()
            text = f"the command cannot be observed: {type(error).__name__}: {error}"
            return self._ended("failed", text, EXIT_FAILED)

    def _execute(self) -> EndEvent:
        command, run = self.request.command, self.run
        self._loggers = Loggers(self.request.log, run.directory, command.run_name, run.recorder)
        run.put(StageEvent("prepare", f"waiting for the first step of {command.text}"))
        room = Room(run.directory.ranks)
        try:
            self.launched = launched = self._launch(room)
        except OSError as error:
            room.close()
            return self._ended("failed", f"cannot start {command.text}: {error.strerror}", EXIT_FAILED)
        status = self._follow(launched, room)
        return self._ended(*self._outcome(status), status)

    def _launch(self, room: Room) -> Launched:
        """Start the command. Raises OSError."""
        assert self._output is not None
        request, size = self.request, shutil.get_terminal_size()
        command, own = request.command, str(self.run.directory.path.absolute())
        # Where the process writes what is too long for its memory.
        folders = {CAPTURES: own, **({MEMORY: own} if request.memory_history else {})}
        copied, moved = (
            (command, {}) if request.folder is None else in_copy(command, request.folder, os.environ)
        )
        base = {**os.environ, **moved, **request.environment}
        return Launched(
            copied, {**environment(room.folder.absolute(), SITE, base), **readable_by(os.getpid()), **folders},
            self._output.write, request.screen, (size.columns, size.lines),
        )  # fmt: skip

    def _follow(self, script: Launched | Observed, room: Room) -> int:
        """Record until the script has ended; its exit status."""
        run, request = self.run, self.request
        follower = self._follower = Follower(
            run.directory, request.command, detect(use_torch=False), self.put, room.folder, script.pid
        )
        steering = Steering(run.control, run.put, request.kernels_every)
        sampler = Sampler(None, run.put, run_dir=run.directory.path, pid=self._trains)
        if self._trains is None:  # the command may be a launcher
            sampler.follow(None, None)
        sampler.start()
        status = None
        try:
            while status is None:
                status = script.wait(POLL_S)
                follower.poll(stopping=run.control.stopping)
                steering.look(follower.here, run.recorder.snapshot, follower.step)
                if follower.trains != sampler.followed:
                    sampler.follow(*follower.trains)
                room.fill()
                if self._files is not None:
                    self._files.poll()
                self._obey(script)
                script.resize(*shutil.get_terminal_size())
        finally:
            sampler.stop()
            script.close()
            if self._files is not None:
                self._files.close()
        follower.finish()
        room.close()
        return status

    def put(self, event: Event) -> None:
        """Record an event. The files of a scratch copy are named as those of the script's own folder."""
        folder = self.request.folder
        if isinstance(event, RunEvent) and folder is not None:
            scratch, own = (
                json.dumps(f"{path}{os.sep}")[:-1] for path in (folder, self.request.command.folder)
            )
            event = replace(event, config=json.loads(json.dumps(event.config).replace(scratch, own)))
        self.run.put(event)

    def _obey(self, script: Launched | Observed) -> None:
        """Pass a requested stop on: Ctrl-C first, SIGTERM if that has no effect, and SIGKILL for an immediate stop."""
        control = self.run.control
        while self._signals:
            script.pass_on(self._signals.pop(0))
        if not control.stopping:
            return
        if control.kill:
            script.kill()
        elif self._sent is None:
            self._sent = time.monotonic()
            script.signal(signal.SIGTERM if control.stop_status == "terminated" else signal.SIGINT)
        elif time.monotonic() - self._sent > PATIENCE_S and not self._pressed:
            self._pressed = True
            script.signal(signal.SIGTERM)

    # The end.

    def _outcome(self, status: int) -> tuple[str, str]:
        """(status, reason) of a command that has ended."""
        follower, control = self._follower, self.run.control
        assert follower is not None
        steps = f"after {counted(follower.step, 'step')}" if follower.trained else "and no training was seen"
        if follower.trained and not follower.step:
            steps = "and no step of an optimizer was seen"
        asked = control.stop_status
        if asked is None and status in (128 + signal.SIGINT, 128 + signal.SIGTERM):
            # Typed into its own terminal, or sent by somebody else.
            asked = "interrupted" if status == 128 + signal.SIGINT else "terminated"
            return asked, f"{killed_by(status)} {steps}"
        if asked is not None:
            return asked, f"{control.stop_reason}, {steps}; the command ended with status {status}"
        if status == 0:
            hint = "" if follower.trained else f": {UNSEEN}"
            return "done", f"the command ended {steps}{hint}"
        how = killed_by(status) or f"the command ended with status {status}"
        if snapshots := sorted(self.run.directory.path.glob(f"{SNAPSHOT}*.pickle")):
            steps += f"; {filled(snapshots[0])}"
        if follower.deaths:
            steps += f"; {death_text(follower.deaths[0])}"
        if follower.ended is not None and follower.ended[1]:
            return "failed", f"{how} {steps}: {follower.ended[1]}"
        line = "" if killed_by(status) else last_line(self.run.directory.console_log)
        return "failed", f"{how} {steps}" + (f"; last output: {line}" if line else "")

    def _ended(self, status: str, reason: str, exit_status: int) -> EndEvent:
        follower = self._follower
        step, not_shown = (0, []) if follower is None else (follower.step, follower.not_shown)
        return self.run.ended(status, reason, step, exit_status, not_shown=not_shown)


class Observed:
    """The process of a script that observes itself."""

    def __init__(self, directory: RunDir, pid: int) -> None:
        self.pid = pid
        self._process = psutil.Process(pid)
        self._closed = directory.ranks / CLOSED

    @property
    def closed(self) -> bool:
        """Whether it has closed its observation."""
        return self._closed.exists()

    def wait(self, timeout_s: float) -> int | None:
        """0 once it has ended or closed its observation, however it ended; None after the timeout."""
        time.sleep(timeout_s)
        with contextlib.suppress(psutil.Error):
            if (
                self._process.is_running()
                and self._process.status() != psutil.STATUS_ZOMBIE
                and not self.closed
            ):
                return None
        return 0

    def signal(self, number: int) -> None:
        """Send Ctrl-C, and nothing that would end the process of a notebook."""
        if number == signal.SIGINT:
            self._process.send_signal(number)

    def pass_on(self, number: int) -> None:
        """It gets its signals itself."""

    def kill(self) -> None:
        """End it at once."""
        with contextlib.suppress(psutil.Error):
            self._process.kill()

    def resize(self, columns: int, rows: int) -> None:
        """It has a terminal of its own."""

    def close(self) -> None:
        """Its output is not read."""


class ObservedScript(Script):
    """A script that observes itself: another process, which has created the folder."""

    def __init__(self, directory: RunDir, pid: int) -> None:
        super().__init__(ScriptRequest(command_of(directory), directory.path.parent))
        self._directory, self._trains, self._observed = directory, pid, Observed(directory, pid)

    def check(self) -> RunDir | None:
        return self._directory

    def begin(self, directory: RunDir) -> RunState | None:
        return None

    def _execute(self) -> EndEvent:
        self.run.put(StageEvent("prepare", "waiting for the first step"))
        self._follow(self._observed, Room(self._directory.ranks, shared=False))
        status, reason = self._outcome(0)
        return self._ended(status, reason, EXIT_FAILED if status == "failed" else EXIT_DONE)

    def _outcome(self, status: int) -> tuple[str, str]:
        follower, control = self._follower, self.run.control
        assert follower is not None
        steps = f"after {counted(follower.step, 'step')}"
        if control.stop_status is not None:
            return control.stop_status, f"{control.stop_reason}, {steps}"
        if follower.ended is not None and follower.ended[0] == "failed":
            return "failed", f"the script failed {steps}: {follower.ended[1]}"
        if self._observed.closed or follower.ended is not None:
            return "done", f"the observation ended {steps}"
        return "failed", f"the process of the script is gone {steps}, without an end"


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
    "no process of it called backward or stepped an optimizer of torch (updates by hand after torch.autograd.grad are "
    "seen where they change its tensors in place, but not through .data or as new tensors; those of torch.func are not "
    "seen), or none could be observed (python -I, -E and "
    "-S, an emptied environment and a changed PYTHONPATH keep the observer out)"
)


def killed_by(status: int) -> str:
    """ "killed by SIGKILL" for an exit status above 128; "" otherwise."""
    if status <= 128:
        return ""
    try:
        return f"the command was killed by {signal.Signals(status - 128).name}"
    except ValueError:
        return ""


if __name__ == "__main__":
    with contextlib.suppress(RunLockedError):
        observed_run = Run.open(ObservedScript(RunDir(Path(sys.argv[1])), int(sys.argv[2])))
        observed_run.execute()
        observed_run.close()
