"""A run from its configuration to its end: open it, execute it on the calling thread, close it.

`Run.open` checks everything that needs no torch before it creates the folder. `execute` prepares and trains, and
records one `end` event however the run ends. The console calls it in a thread, a headless run on the main thread.
"""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from ndd_engine.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_TERMINATED,
    NddError,
    TrainingError,
    UsageError,
)
from ndd_engine.measure import memory_history
from ndd_engine.record.channel import ControlServer
from ndd_engine.record.derive import figures
from ndd_engine.record.events import EndEvent, Event, MarkEvent, StageEvent
from ndd_engine.record.reader import load_state
from ndd_engine.record.recorder import Listener, Recorder
from ndd_engine.record.rundir import RunDir, RunLock, new_run_dir
from ndd_engine.text import printable

from .control import Control, StopNow
from .findings import FindingWatch
from .preflight import check_resume, preflight
from .request import RunRequest
from .scalars import FOLDER, Scalars, both

if TYPE_CHECKING:
    from .prepare import Prepared

__all__ = ["Run", "RunRequest"]

EXIT_OF = {
    "done": EXIT_DONE,
    "stopped": EXIT_DONE,
    "interrupted": EXIT_INTERRUPTED,
    "terminated": EXIT_TERMINATED,
}


class Run:
    """An open run: folder, lock, record and control. Use `Run.open`."""

    def __init__(
        self,
        request: RunRequest,
        directory: RunDir,
        lock: RunLock,
        recorder: Recorder,
        scalars: Scalars | None,
    ) -> None:
        self.request, self.directory, self.recorder = request, directory, recorder
        self.control = Control()
        self.finished = threading.Event()
        self.end: EndEvent | None = None
        self._lock = lock
        self._server = ControlServer(directory.control_socket, self._asked, self.put)
        self._prepared: Prepared | None = None
        self._scalars = scalars

    @classmethod
    def open(cls, request: RunRequest, listener: Listener | None = None) -> Run:
        """Check the request, then create and lock the folder.

        Raises UsageError (ConfigError with every problem) before anything is written.
        """
        config = preflight(request.draft)
        if request.resume is not None:
            directory = request.resume
        else:
            directory = new_run_dir(request.root, request.draft.run_name, request.draft.workload)
        lock = RunLock(directory)
        try:
            lock.acquire()
            state = None
            if request.resume is not None:
                state = load_state(directory)
                check_resume(directory.name, state, config, request.from_step)
                # Viewers that look before the engine starts must not see the old end.
                state.fold(time.time(), StageEvent("resume", "starting"))
            watch = FindingWatch() if request.probes else None
            scalars = None
            if config.log.tensorboard and request.probes:
                scalars = Scalars(directory.path / FOLDER, lambda event: recorder.put(event))
            recorder = Recorder(directory.events, state, both(listener, scalars), watch)
            recorder.start()
        except UsageError:
            lock.release()
            raise
        except OSError as error:
            lock.release()
            raise UsageError(f"cannot write to {printable(str(directory.path))}: {error.strerror}") from None
        run = cls(request, directory, lock, recorder, scalars)
        try:
            run._server.start()
        except OSError as error:
            text = f"cannot create control.sock ({error.strerror})"
            run.put(MarkEvent("warning", 0, f"{text}: attach can watch this run but not control it"))
        return run

    def execute(self) -> EndEvent:
        """Prepare and train on this thread; records and returns the end. Never raises an Exception."""
        try:
            try:
                end = self._execute()
            except (StopNow, NddError):
                raise
            except BaseException as error:  # noqa: BLE001  every kind of end is reported, even sys.exit in a dataset
                end = self._failed(error)
        except StopNow:
            status = self.control.stop_status or "stopped"
            end = self._ended(status, f"{self.control.stop_reason}, immediately")
        except NddError as error:
            reason = str(error)
            if error.__cause__ is not None:  # raised by the user's own code
                append(self.directory.console_log, "".join(traceback.format_exception(error.__cause__)))
                reason += _traced(None)
            end = self._ended("failed", reason, error.exit_status)
        self.end = end
        self.recorder.put(end)
        self.recorder.flush()
        self.finished.set()
        return end

    def close(self) -> None:
        """Write the record to its end, close the control socket and unlock the run; safe to call twice."""
        memory_history.stop()
        self._server.close()
        self.recorder.close()
        self._lock.release()

    def put(self, event: Event) -> None:
        """Record an event."""
        self.recorder.put(event)

    def stage(self, text: str, name: str = "prepare") -> None:
        """Report what is being prepared. Raises StopNow if a stop was requested."""
        self.put(StageEvent(name, text))
        if self.control.stopping:
            raise StopNow

    def _execute(self) -> EndEvent:
        self.stage("importing torch", "resume" if self.request.resume is not None else "prepare")
        from .prepare import prepare_run  # torch comes with it

        if self._scalars is not None:
            self.stage("importing tensorboard")
            self._scalars.prepare()

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
        loop = prepared.loop
        if status is None:
            return self._ended("done", f"finished all {loop.step} steps")
        return self._ended(status, f"{self.control.stop_reason}; checkpoint at step {loop.step}")

    def _failed(self, error: BaseException) -> EndEvent:
        """Explain an error in one message, after saving a checkpoint if the state is complete."""
        append(self.directory.console_log, "".join(traceback.format_exception(error)))
        prepared = self._prepared
        from ndd_engine.measure.memory import is_out_of_memory
        from ndd_engine.workloads.own_module import place

        from .failures import explain

        if prepared is None:
            what = "out of memory" if is_out_of_memory(error) else type(error).__name__
            first = printable((str(error).splitlines() or ["no message"])[0])
            self.recorder.flush()  # the snapshot has to contain the stage that failed
            stage = self.recorder.snapshot().stage or "preparing"
            return self._ended("failed", f"{what} while {stage}: {first}{_traced(place(error))}")

        loop = prepared.loop
        phase = prepared.clock.current
        failure = explain(error, loop.step + 1, phase, prepared.config, prepared.device, loop.stepper)
        text = failure.text + (_traced(failure.where) if failure.kind == "error" else "")
        # Between steps, and while waiting for a step's first batch, the state is complete.
        whole = loop.boundary or (phase == "data_wait" and prepared.config.batch.accumulation == 1)
        if loop.step and whole:
            try:
                loop.save()
            except Exception as second:  # noqa: BLE001  the first failure is the one to report
                text += f"; cannot save a checkpoint of this step: {printable(str(second))}"
        stopped, saved = self.control.stop_status, loop.saved
        if stopped is not None and failure.kind in ("worker", "killed") and saved and saved.step == loop.step:
            # A signal to the process group also kills the workers: this is the requested stop, not a failure.
            return self._ended(stopped, f"{self.control.stop_reason}; checkpoint at step {loop.step}")
        if saved is None:
            return self._ended("failed", f"{text}; there is no checkpoint")
        text += f"; the last checkpoint is step {saved.step}"
        return self._ended("failed", f"{text}; resume with: ndd-console train --resume {self.directory.name}")

    def _ended(self, status: str, reason: str, exit_status: int | None = None) -> EndEvent:
        loop = self._prepared.loop if self._prepared else None
        saved = loop.saved if loop else None
        self.recorder.flush()  # the figures include everything that was measured
        found = figures(self.recorder.snapshot())
        data = {"run": self.directory.name, "dropped_events": self.recorder.dropped, "figures": found}
        if exit_status is None:
            exit_status = EXIT_OF.get(status, EXIT_FAILED)
        step, checkpoint = loop.step if loop else 0, saved.path.name if saved else None
        return EndEvent(status, reason, step, exit_status, checkpoint, data)

    def _asked(self, action: str, holder: int | None) -> None:
        """Handle a request from the control socket."""
        self.control.request(action, "stopped from another terminal", holder=holder)


def append(path: Path, text: str) -> None:
    """Append to a log. Errors are ignored: a full disk must not hide the failure being reported."""
    with contextlib.suppress(OSError), path.open("a", encoding="utf-8") as file:
        file.write(text)


def _traced(where: str | None) -> str:
    """Where to find the traceback. where: file and line in a user's own workload."""
    return f" ({f'{where}; ' if where else ''}full traceback in console.log)"
