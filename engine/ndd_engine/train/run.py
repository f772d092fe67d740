"""A run from its configuration to its end: open it, execute it on the calling thread, close it.

`Run.open` checks everything that needs no torch before it creates the folder. `execute` prepares and trains, and
records one `end` event however the run ends. The console calls it in a thread, a headless run on the main thread.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ndd_engine.diagnose.watch import FindingWatch
from ndd_engine.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_TERMINATED,
    CaptureError,
    NddError,
    TrainingError,
    message_of,
    said,
)
from ndd_engine.measure import memory_history
from ndd_engine.record.channel import ControlServer
from ndd_engine.record.events import EndEvent, Event, MarkEvent, StageEvent
from ndd_engine.record.figures import figures
from ndd_engine.record.file import Listener, Recorder, load_state
from ndd_engine.record.rundir import RunDir, RunLock, bare, discard, new_run_dir, opening, set_aside

from .control import Control, StopNow
from .loggers import Loggers
from .parallel.rank_ends import Cause, leave_cause, other_over, others
from .parallel.rank_place import OtherRankError
from .preflight import check_resume, preflight
from .request import RunRequest

if TYPE_CHECKING:
    from .prepare import Prepared
    from .request import Ranks

__all__ = ["Run", "RunRequest"]

EXIT_OF = {
    "done": EXIT_DONE,
    "stopped": EXIT_DONE,
    "interrupted": EXIT_INTERRUPTED,
    "terminated": EXIT_TERMINATED,
}
# Options of a command that resumes a run without CUDA graphs.
_EAGERLY = ("--set", "speed.cuda_graph=false")


class Run:
    """An open run: folder, lock, record and control. Use `Run.open`."""

    def __init__(
        self,
        request: RunRequest,
        directory: RunDir,
        lock: RunLock,
        recorder: Recorder,
        loggers: Loggers | None = None,
    ) -> None:
        self.request, self.directory, self.recorder = request, directory, recorder
        self.ranks: Ranks | None = None
        # Of a run with several ranks: why this one ended before the training did.
        self.cause: Cause | None = None
        self.control = Control()
        self.finished = threading.Event()
        self.end: EndEvent | None = None
        # Arguments of `train` with which a new process can go on where this one cannot.
        self.goes_on: tuple[str, ...] = ()
        # Whether `execute` can be ended with StopNow, e.g. by a signal handler.
        self.interruptible = False
        self._lock = lock
        self._server = ControlServer(directory.control_socket, self._asked, self.put)
        self._prepared: Prepared | None = None
        self._loggers = loggers

    @classmethod
    def open(cls, request: RunRequest, listener: Listener | None = None) -> Run:
        """Check the request, then create and lock the folder.

        Raises UsageError (ConfigError with every problem) before anything is written, and also, like MachineError,
        when the folder or a thread cannot be created; a new folder is removed again.
        """
        config = preflight(request.draft)
        directory = request.resume or request.restart
        draft = request.draft
        with opening(
            directory,
            lambda: new_run_dir(request.root, draft.run_name, draft.workload),
            lambda directory: directory.config,
        ) as opened:
            directory = opened.directory
            if request.restart is not None and not bare(directory):
                set_aside(directory)
            state = None
            if request.resume is not None:
                state = load_state(directory)
                check_resume(directory.name, state, config, request.from_step)
                # Viewers that look before the engine starts must not see the old end.
                state.fold(time.time(), StageEvent("resume", "starting"))
            watch = FindingWatch() if request.probes else None
            recorder = Recorder(directory.events, state, listener, watch)
            opened.undo(recorder.close)
            recorder.start()
            loggers = None
            if request.probes:
                loggers = Loggers(config.log, directory, config.workload.name.partition(":")[0], recorder)
                opened.undo(loggers.close)
            run = cls(request, directory, opened.lock, recorder, loggers)
            opened.listen(run._server, run.put)
            return run

    def execute(self) -> EndEvent:
        """Prepare and train on this thread; records and returns the end. Never raises an Exception."""
        self.interruptible = True
        try:
            end = self._attempt()
            self.interruptible = False
        except StopNow:  # also while a failure was being explained
            self.interruptible = False
            end = self._stopped()
        if (gone := self.recorder.deleted()) is not None:
            reason = f"{gone}: its record and its checkpoints are lost; {end.reason}"
            end = replace(end, status="failed", reason=reason, exit_status=EXIT_FAILED)
        self.end = end
        self.conclude(end)
        self.recorder.flush()
        self.finished.set()
        return end

    def conclude(self, end: EndEvent) -> None:
        """Record the end, or that the ranks are restarted: the record then goes on."""
        again = self._restart
        if again is None:
            self.put(end)
            return
        self.put(MarkEvent("warning", end.step, f"{end.reason}; {again} follows"))
        self.put(StageEvent("resume", f"{again}: starting the ranks"))

    @property
    def _restart(self) -> str | None:
        """ "restart 1 of 3" if the ranks start again after the cause of the end, else None."""
        here = None if self.ranks is None else self.ranks.place
        if here is None or self.cause is None or not self.cause.curable or here.restart >= here.restarts:
            return None
        return f"restart {here.restart + 1} of {here.restarts}"

    @property
    def restarts(self) -> bool:
        """Whether a new process continues the run with `goes_on`: nobody has requested a stop."""
        return bool(self.goes_on) and not self.control.stopping

    def close(self) -> None:
        """Write the record to its end, close the control socket and unlock the run; safe to call twice.

        A new folder to which nothing could be written (a full disk) is removed, so that its name is not taken.
        """
        memory_history.stop()
        self._server.close()
        if self._loggers is not None:
            self.recorder.flush()
            self._loggers.close()  # they may still report a problem
        self.recorder.close()
        if self.request.resume is None and self.recorder.dropped and self.end is not None:
            discard(self.directory)
        self._lock.release()

    def put(self, event: Event) -> None:
        """Record an event."""
        self.recorder.put(event)

    def stage(self, text: str, name: str = "prepare") -> None:
        """Report what is being prepared. Raises StopNow if a stop was requested."""
        self.put(StageEvent(name, text))
        if self.control.stopping:
            raise StopNow

    def _attempt(self) -> EndEvent:
        """Prepare, train and explain a failure. Raises StopNow only."""
        try:
            return self._execute()
        except StopNow:
            raise
        except NddError as error:
            reason = "; ".join(str(error).splitlines())
            own, curable = not isinstance(error, OtherRankError), getattr(error, "curable", False)
            self._tell(Cause("failed", reason, own, curable, error.exit_status))
            if error.__cause__ is not None:  # raised by the user's own code
                append(self.directory.console_log, _traceback(error.__cause__))
                reason += _traced(None)
            if isinstance(error, CaptureError):
                reason += self._resumable(*_EAGERLY)
                if self._prepared is not None and self._prepared.loop.saved:
                    self.goes_on = ("--resume", self.directory.name, *_EAGERLY)
            return self._ended("failed", reason, error.exit_status)
        except BaseException as error:  # noqa: BLE001  every kind of end is reported, even sys.exit in a dataset
            try:
                return self._failed(error)
            except Exception:  # noqa: BLE001  e.g. no file descriptor is left to import the explanation
                return self._ended("failed", f"{type(error).__name__}: {message_of(error)}{_traced(None)}")

    def _execute(self) -> EndEvent:
        self.stage("importing torch", "resume" if self.request.resume is not None else "prepare")
        from .prepare import prepare_run  # torch comes with it

        prepared = self._prepared = prepare_run(self)
        try:
            status = prepared.loop.run()
        except (StopNow, TrainingError):
            prepared.loop.record_rest()
            raise
        except Exception as error:  # noqa: BLE001
            prepared.loop.record_rest()
            return self._failed(error)
        finally:
            prepared.sampler.stop()
            gc.unfreeze()  # frozen by `prepare_run`: what the run leaves behind can be collected again
        loop = prepared.loop
        if status is None:
            if (early := loop.callbacks.early) is not None:
                return self._ended("done", f"ended early at step {loop.step}: {early}")
            return self._ended("done", f"finished all {loop.step} steps")
        return self._ended(status, f"{self.control.stop_reason}; checkpoint at step {loop.step}")

    def _failed(self, error: BaseException) -> EndEvent:
        """Explain an error in one message, after saving a checkpoint if the state is complete."""
        if self.control.kill and self.ranks is not None:
            raise StopNow  # other ranks were stopped as well, and are gone
        append(self.directory.console_log, _traceback(error))
        prepared = self._prepared
        from ndd_engine.workloads.own_module import place

        from .failures import explain, unprepared

        if prepared is None:
            self.recorder.settle()  # the snapshot has to contain the stage that failed
            stage = self.recorder.snapshot().stage or "preparing"
            text = unprepared(error, stage) + _traced(place(error))
            if self.ranks is not None:
                return self._of_ranks(others(self.ranks, error, text, f"while {stage}"))
            return self._ended("failed", text)

        loop = prepared.loop
        phase = prepared.clock.current
        failure = explain(error, loop.step + 1, phase, prepared.config, prepared.device, loop.stepper)
        text = failure.text + (_traced(failure.where) if failure.kind == "error" else "")
        if self.ranks is not None:
            return self._of_ranks(others(self.ranks, error, text, f"at step {loop.step + 1} in {phase}"))
        # Between steps, and while waiting for a step's first batch, the state is complete.
        whole = loop.boundary or (phase == "data_wait" and prepared.config.batch.accumulation == 1)
        if loop.step and whole:
            try:
                loop.save()
            except Exception as second:  # noqa: BLE001  the first failure is the one to report
                text += f"; cannot save a checkpoint of this step: {message_of(second)}"
        stopped, saved = self.control.stop_status, loop.saved
        if stopped is not None and failure.kind in ("worker", "killed") and saved and saved.step == loop.step:
            # A signal to the process group also kills the workers: this is the requested stop, not a failure.
            return self._ended(stopped, f"{self.control.stop_reason}; checkpoint at step {loop.step}")
        return self._ended("failed", text + self._resumable())

    def _stopped(self) -> EndEvent:
        """The end of a run that was stopped immediately, or before its first step."""
        status = self.control.stop_status or "stopped"
        # When a rank fails or is killed, its launcher sends the others SIGTERM.
        cause = other_over(self.ranks) if self.ranks is not None and status == "terminated" else None
        if cause is not None and cause.status == "failed":
            return self._of_ranks(cause)
        self._tell(Cause(status, self.control.stop_reason, own=True, curable=False))
        return self._ended(status, f"{self.control.stop_reason}, immediately")

    def _of_ranks(self, cause: Cause) -> EndEvent:
        """The end of a rank that cannot go on. A rank alone cannot save a checkpoint."""
        self.cause = cause
        more = self._resumable() if cause.status == "failed" else ""
        return self._ended(cause.status, cause.text + more, cause.exit_status)

    def _resumable(self, *options: str) -> str:
        """Which checkpoint a failed run can go on from. options: of the command that resumes it."""
        if self._prepared is None:
            return ""
        if (saved := self._prepared.loop.saved) is None:
            return "; there is no checkpoint"
        text = f"; the last checkpoint is step {saved.step}"
        if self._restart is not None:
            return text  # nobody has to resume
        return (
            f"{text}; resume with: {' '.join(('ndd-console train --resume', self.directory.name, *options))}"
        )

    def _tell(self, cause: Cause) -> None:
        """Tell the other ranks, if there are some, why this one ends."""
        if self.ranks is not None:
            self.cause = leave_cause(self.ranks, cause) if cause.own else cause

    def _ended(self, status: str, reason: str, exit_status: int | None = None) -> EndEvent:
        loop = self._prepared.loop if self._prepared else None
        saved = loop.saved if loop else None
        self.recorder.settle()  # the figures include everything that was measured
        found = figures(self.recorder.snapshot())
        data = {"run": self.directory.name, "dropped_events": self.recorder.dropped, "figures": found}
        if exit_status is None:
            exit_status = EXIT_OF.get(status, EXIT_FAILED)
        step, checkpoint = loop.step if loop else 0, saved.path.name if saved else None
        return EndEvent(status, reason, step, exit_status, checkpoint, data)

    def _asked(self, action: str, holder: int | None) -> None:
        """Handle a request from the control socket."""
        # Of several ranks, the console that started them sends its requests this way, too.
        reason = "stopped from another terminal" if self.ranks is None else "stopped on request"
        self.control.request(action, reason, holder=holder)


def append(path: Path, text: str) -> None:
    """Append to a log. Errors are ignored: a full disk must not hide the failure being reported."""
    with contextlib.suppress(OSError), path.open("a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)


def _traceback(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(error))
    except Exception:  # noqa: BLE001  a user's exception may be broken in any way
        return f"{said(error)}\n"


def _traced(where: str | None) -> str:
    """Where to find the traceback. where: file and line in a user's own workload."""
    return f" ({f'{where}; ' if where else ''}full traceback in console.log)"
