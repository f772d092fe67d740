"""Trials started from the screen, in a thread. The run is paused during a trial and always resumed."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from ndd_console.process.thread import ThreadJob
from ndd_console.words.trial import trial_text
from ndd_engine.config import changed_toml, read
from ndd_engine.errors import NddError, UsageError
from ndd_engine.record.events import RunEvent, TrialEvent
from ndd_engine.record.rundir import RunDir
from ndd_engine.text import printable
from ndd_engine.trial.trial_request import Base, Progress, TrialRequest

from .saving import save_new

if TYPE_CHECKING:
    from ndd_console.screens.interfaces import TrialJob

Measure = Callable[[TrialRequest, Callable[[Progress], None], threading.Event], TrialEvent]
# Pauses the run inside the context. Arguments: reports what is waited for; set to stop waiting.
Paused = Callable[[Callable[[str], None], threading.Event], AbstractContextManager[None]]
# Time limit for a trial's processes to end and for the run to resume when the screen is closed.
PATIENCE_S = 20.0


class TrialThread(ThreadJob):
    """One trial."""

    problem = property(ThreadJob.failed)

    def __init__(self, request: TrialRequest) -> None:
        super().__init__("ndd-trial")
        self.request = request
        self.progress: Progress | None = None
        self.result: TrialEvent | None = None

    @property
    def done(self) -> bool:
        return not self.working()

    def run(self, paused: Paused, measure: Measure) -> TrialEvent:
        """Measure while the run is paused."""
        with paused(lambda text: self._report(Progress(text, 0.0, self.request.budget_s)), self._stop):
            self.result = measure(self.request, self._report, self._stop)
        return self.result

    def _report(self, progress: Progress) -> None:
        self.progress = progress


class RunTrials:
    """Trials against the configuration of one run, one at a time.

    paused: pauses the run during a trial. live: whether the run is training. keep: records a result.
    """

    edits = False

    def __init__(
        self,
        directory: RunDir,
        paused: Paused,
        live: Callable[[], bool],
        keep: Callable[[TrialEvent], None],
        measure: Measure | None = None,
    ) -> None:
        self._run = directory
        self._of = Base.of_run(directory)
        self.base = self._of.name
        self._paused = paused
        self._live = live
        self._keep = keep
        self._measure = measure or _run_trial
        self._job: TrialThread | None = None

    def pauses(self) -> str:
        return self._run.name if self._live() else ""

    def refusal(self) -> str:
        if self._job is not None and not self._job.done:
            return "the previous trial is still shutting down"
        if not self._run.config.exists():
            return f"run {self._run.name} has no config.toml yet; wait until training starts"
        return ""

    def check(self, sets: Sequence[str]) -> str:
        from ndd_engine.trial.trial import check

        try:
            check(TrialRequest(self._of, tuple(sets)))
        except NddError as error:
            return str(error)
        return ""

    def start(self, sets: Sequence[str], cause: str | None, budget_s: float) -> TrialJob:
        request = TrialRequest(self._of, tuple(sets), budget_s, cause)
        job = self._job = TrialThread(request)
        job.begin(lambda: self._keep(job.run(self._paused, self._measure)))
        return job

    def diff(self, sets: Sequence[str]) -> str:
        """The keys of the configuration that change."""
        from ndd_engine.trial.trial import check

        changed = check(TrialRequest(self._of, tuple(sets)))
        lines = []
        for key, (before, after) in changed.items():
            lines += [
                f"-{key} = {json.dumps(before, default=str)}",
                f"+{key} = {json.dumps(after, default=str)}",
            ]
        return "\n".join(lines)

    def write(self, trial: TrialEvent) -> Path:
        of = self._of
        config = read(of.config, (*of.sets, *trial.sets), of.workload).resolve()
        # A new run cannot have the name of this one.
        config = config.model_copy(update={"run": config.run.model_copy(update={"name": None})})
        reason = f"measured: {trial_text(trial)} vs. {trial.against}"
        reasons = {item.partition("=")[0]: reason for item in trial.sets}
        heading = f"Configuration of {of.name} with {', '.join(trial.sets)}\n{trial.text}"
        lines = "\n".join(printable(line) for line in heading.splitlines())
        return save_new(f"{self._run.name}-changed", changed_toml(config, lines, reasons))

    def close(self, timeout_s: float = PATIENCE_S) -> bool:
        """Stop a running trial and wait until the run resumes. Returns False after the timeout."""
        if self._job is None:
            return True
        self._job.stop()
        return self._job.join(timeout_s)


def _run_trial(request: TrialRequest, tell: Callable[[Progress], None], stop: threading.Event) -> TrialEvent:
    from ndd_engine.trial.trial import run_trial

    return run_trial(request, tell, stop)


class ScriptTrials(RunTrials):
    """Trials of an observed script, in scratch copies. run: its recorded identity, None before its first step."""

    edits = True

    def __init__(
        self,
        directory: RunDir,
        paused: Paused,
        live: Callable[[], bool],
        keep: Callable[[TrialEvent], None],
        run: Callable[[], RunEvent | None],
    ) -> None:
        super().__init__(directory, paused, live, keep, self._measured)
        self._of = Base(f"run {directory.name}", run=directory)
        self.base = self._of.name
        self._known = run
        # By what was tried.
        self._tried: dict[tuple[str, ...], TrialEvent] = {}

    def refusal(self) -> str:
        if self._job is not None and not self._job.done:
            return "the previous trial is still shutting down"
        return "the script has not trained yet" if self._known() is None else ""

    def check(self, sets: Sequence[str]) -> str:
        from ndd_engine.script.trials import check_script

        try:
            check_script(TrialRequest(self._of, tuple(sets)), self._run_event.config)
        except NddError as error:
            return str(error)
        return ""

    def diff(self, sets: Sequence[str]) -> str:
        """The edit of the script."""
        from ndd_engine.script.trials import edit_for

        edit = edit_for(TrialRequest(self._of, tuple(sets)), self._run_event, self._tried.get(tuple(sets)))
        if not edit.diff:
            raise UsageError(f"this change is not an edit of one place: {'; '.join(edit.advice)}")
        return "\n".join(edit.diff)

    def write(self, trial: TrialEvent) -> Path:
        """Write the edit of the script as a patch."""
        self._tried[tuple(trial.sets)] = trial
        return save_new(f"{self._run.name}-change", self.diff(trial.sets) + "\n", suffix=".diff")

    @property
    def _run_event(self) -> RunEvent:
        run_event = self._known()
        if run_event is None:
            raise UsageError("the script has not trained yet")
        return run_event

    def _measured(
        self, request: TrialRequest, tell: Callable[[Progress], None], stop: threading.Event
    ) -> TrialEvent:
        from ndd_engine.script.trials import run_script_trial

        run = self._run_event
        trial = run_script_trial(request, run.config, run.device, tell, stop)
        self._tried[request.sets] = trial
        return trial
