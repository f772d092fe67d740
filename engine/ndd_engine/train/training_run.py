"""What a run executes that trains in this process: it prepares, trains, and explains how that ended.

`check` finds every mistake that needs no torch before the folder is created.
"""

from __future__ import annotations

import contextlib
import gc
import traceback
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from ndd_engine.errors import EXIT_FAILED, CaptureError, NddError, TrainingError, message_of, said, text_of
from ndd_engine.measure import memory
from ndd_engine.record.events import EndEvent, Event, MarkEvent, StageEvent
from ndd_engine.record.figures import death_figures
from ndd_engine.record.file import load_state
from ndd_engine.record.rundir import RunDir, bare, new_run_dir, resume_text, set_aside
from ndd_engine.record.state import RunState
from ndd_engine.run.control import StopNow
from ndd_engine.run.run import Executor
from ndd_engine.train.parallel.rank_place import Cause, leave_cause, other_over, others

from .loggers import Loggers
from .parallel.rank_place import OtherRankError
from .request import OpenRun, RunRequest, check_resume, preflight

if TYPE_CHECKING:
    from .parallel.rank_place import OtherRanks
    from .prepare import Prepared

# Options of a command that resumes a run without CUDA graphs.
_EAGERLY = ("--set", "speed.cuda_graph=false")


class TrainingRun(Executor):
    """ranks: the other ranks of a run with several, None for one process. cause: why this rank ended before the others.

    goes_on: arguments of `train` with which a new process can continue where this one cannot.
    """

    def __init__(self, request: RunRequest, ranks: OtherRanks | None = None) -> None:
        self.request, self.ranks = request, ranks
        self.watched = request.probes
        if ranks is not None:
            # The console that started the ranks sends its requests this way, too.
            self.on_request = "stopped on request"
        self.cause: Cause | None = None
        self.goes_on: tuple[str, ...] = ()
        self._prepared: Prepared | None = None
        self._loggers: Loggers | None = None

    @property
    def opened(self) -> OpenRun:
        """What preparation uses of the open run."""
        run = self.run
        return OpenRun(self.request, self.ranks, run.directory, run.control, run.put)

    @property
    def restarts(self) -> bool:
        """Whether a new process continues the run with `goes_on`: nobody has requested a stop."""
        return bool(self.goes_on) and not self.run.control.stopping

    def check(self) -> RunDir | None:
        self._config = preflight(self.request.draft)
        return self.request.resume or self.request.restart

    def new_folder(self) -> RunDir:
        draft = self.request.draft
        return new_run_dir(self.request.root, draft.run_name, draft.workload)

    def begin(self, directory: RunDir) -> RunState | None:
        request, config, state = self.request, self._config, None
        if request.restart is not None and not bare(directory):
            set_aside(directory)
        if request.resume is not None:
            state = load_state(directory)
            check_resume(directory.name, state, config, request.from_step)
        return state

    def execute(self) -> EndEvent:
        """Prepare and train on this thread; returns the end. Never raises an Exception."""
        self.interruptible = True
        try:
            end = self._attempt()
            self.interruptible = False
        except StopNow:  # also while a failure was being explained
            self.interruptible = False
            end = self._stopped()
        if (gone := self.run.recorder.deleted()) is not None:
            reason = f"{gone}: its record and its checkpoints are lost; {end.reason}"
            end = replace(end, status="failed", reason=reason, exit_status=EXIT_FAILED)
        return end

    def last_events(self, end: EndEvent) -> Iterable[Event]:
        """The end, or that the ranks are restarted: the record then continues."""
        again = self._restart
        if again is None:
            return (end,)
        return (
            MarkEvent("warning", end.step, f"{end.reason}; {again} follows"),
            StageEvent("resume", f"{again}: starting the ranks"),
        )

    def close(self) -> None:
        memory.stop()
        if self._loggers is not None:
            self._loggers.close()  # they may still report a problem

    @property
    def _restart(self) -> str | None:
        """ "restart 1 of 3" if the ranks start again after the cause of the end, else None."""
        here = None if self.ranks is None else self.ranks.place
        if here is None or self.cause is None or not self.cause.curable or here.restart >= here.restarts:
            return None
        return f"restart {here.restart + 1} of {here.restarts}"

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
                self._log(error.__cause__)
                reason += _traced(None)
            if isinstance(error, CaptureError):
                reason += self._resumable(*_EAGERLY)
                if self._prepared is not None and self._prepared.loop.saved:
                    self.goes_on = ("--resume", self.run.directory.name, *_EAGERLY)
            return self._ended("failed", reason, error.exit_status)
        except BaseException as error:  # noqa: BLE001  every kind of end is reported, even sys.exit in a dataset
            try:
                return self._failed(error)
            except Exception:  # noqa: BLE001  e.g. no file descriptor is left to import the explanation
                return self._ended("failed", f"{type(error).__name__}: {message_of(error)}{_traced(None)}")

    def _execute(self) -> EndEvent:
        run = self.opened
        if self.request.probes and (self.ranks is None or self.ranks.place.first):
            log, project = self._config.log, self._config.workload.name.partition(":")[0]
            self._loggers = Loggers(log, run.directory, project, self.run.recorder)
        run.stage("importing torch", "resume" if self.request.resume is not None else "prepare")
        from ndd_engine.measure.trainer_watch import PreparationWatch

        from .prepare import prepare_run  # torch comes with it

        ranked = self.ranks is not None
        with PreparationWatch(run.put, lambda: run.control.stopping, ranked) as watch:
            prepared = self._prepared = prepare_run(replace(run, put=watch.put))
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
                return self._ended("done", f"ended early at step {loop.step:,}: {early}")
            return self._ended("done", f"finished all {loop.step:,} steps")
        return self._ended(status, f"{self.run.control.stop_reason}; checkpoint at step {loop.step:,}")

    def _failed(self, error: BaseException) -> EndEvent:
        """Explain an error in one message, after saving a checkpoint if the state is complete."""
        if self.run.control.kill and self.ranks is not None:
            raise StopNow  # other ranks were stopped as well, and are gone
        self._log(error)
        prepared = self._prepared
        from ndd_engine.workloads.interface import place

        from .failures import explain, unprepared

        if prepared is None:
            self.run.recorder.settle()  # the snapshot has to contain the stage that failed
            stage = self.run.recorder.snapshot().stage or "preparing"
            text = unprepared(error, stage) + _traced(place(error))
            if self.ranks is not None:
                return self._of_ranks(others(self.ranks, error, text, f"while {stage}"))
            return self._ended("failed", text)

        loop = prepared.loop
        phase = prepared.clock.current
        failure = explain(error, loop.step + 1, phase, prepared.config, prepared.device, loop.stepper)
        text = failure.text + (_traced(failure.where) if failure.kind == "error" else "")
        found = loop.reporter.children.told_by(text_of(error), loop.step)
        if found is not None and self.run.control.stop_status is None:
            death, new = found
            if new:
                self.run.put(death)
            text = "; ".join((text, *death_figures(death)))
        if self.ranks is not None:
            return self._of_ranks(others(self.ranks, error, text, f"at step {loop.step + 1:,} in {phase}"))
        # Between steps, and while waiting for a step's first batch, the state is complete.
        whole = loop.boundary or (phase == "data_wait" and prepared.config.batch.accumulation == 1)
        if loop.step and whole:
            try:
                loop.save()
            except Exception as second:  # noqa: BLE001  the first failure is the one to report
                text += f"; cannot save a checkpoint of this step: {message_of(second)}"
        stopped, saved = self.run.control.stop_status, loop.saved
        if stopped is not None and failure.kind in ("worker", "killed") and saved and saved.step == loop.step:
            # A signal to the process group also kills the workers: this is the requested stop, not a failure.
            return self._ended(stopped, f"{self.run.control.stop_reason}; checkpoint at step {loop.step:,}")
        return self._ended("failed", text + self._resumable())

    def _stopped(self) -> EndEvent:
        """The end of a run that was stopped immediately, or before its first step."""
        status = self.run.control.stop_status or "stopped"
        # When a rank fails or is killed, its launcher sends the others SIGTERM.
        cause = other_over(self.ranks) if self.ranks is not None and status == "terminated" else None
        if cause is not None and cause.status == "failed":
            return self._of_ranks(cause)
        self._tell(Cause(status, self.run.control.stop_reason, of_this_rank=True, curable=False))
        return self._ended(status, f"{self.run.control.stop_reason}, immediately")

    def _of_ranks(self, cause: Cause) -> EndEvent:
        """The end of a rank that cannot continue. A rank alone cannot save a checkpoint."""
        self.cause = cause
        more = self._resumable() if cause.status == "failed" else ""
        return self._ended(cause.status, cause.text + more, cause.exit_status)

    def _resumable(self, *options: str) -> str:
        """Which checkpoint a failed run can continue from. options: of the command that resumes it."""
        if self._prepared is None:
            return ""
        if (saved := self._prepared.loop.saved) is None:
            return "; there is no checkpoint"
        text = f"; the last checkpoint is step {saved.step:,}"
        if self._restart is not None:
            return text  # nobody has to resume
        return f"{text}; {resume_text(self.run.directory.name, *options)}"

    def _tell(self, cause: Cause) -> None:
        """Tell the other ranks, if there are some, why this one ends."""
        if self.ranks is not None:
            self.cause = leave_cause(self.ranks, cause) if cause.of_this_rank else cause

    def _ended(self, status: str, reason: str, exit_status: int | None = None) -> EndEvent:
        loop = self._prepared.loop if self._prepared else None
        saved = loop.saved if loop else None
        checkpoint = saved.path.name if saved else None
        return self.run.ended(status, reason, loop.step if loop else 0, exit_status, checkpoint)

    def _log(self, error: BaseException) -> None:
        """Append the traceback to console.log. A full disk must not hide the failure that is reported."""
        try:
            text = "".join(traceback.format_exception(error))
        except Exception:  # noqa: BLE001  a user's exception may be broken in any way
            text = f"{said(error)}\n"
        log = self.run.directory.console_log
        with contextlib.suppress(OSError), log.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)


def _traced(where: str | None) -> str:
    """Where to find the traceback. where: file and line in a user's own workload."""
    return f" ({f'{where}; ' if where else ''}full traceback in console.log)"
