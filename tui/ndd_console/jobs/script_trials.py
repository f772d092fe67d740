"""Trials of an observed script from the screen. They run in scratch copies, once the script itself has ended."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ndd_engine.errors import NddError, UsageError
from ndd_engine.record.events import RunEvent, TrialEvent
from ndd_engine.record.rundir import RunDir
from ndd_engine.trial.request import Base, Progress, TrialRequest

from .saving import save_new
from .trials import RunTrials


class ScriptTrials(RunTrials):
    """run: the recorded identity of the script's run, None before its first step."""

    def __init__(
        self,
        directory: RunDir,
        live: Callable[[], bool],
        run: Callable[[], RunEvent | None],
        keep: Callable[[TrialEvent], None],
    ) -> None:
        super().__init__(directory, _nothing_to_pause, live, keep, self._measured)
        self._of = Base(f"run {directory.name}", run=directory)
        self.base = self._of.name
        self._known = run

    def pauses(self) -> str:
        """Nothing: a script cannot be paused."""
        return ""

    def refusal(self) -> str:
        if self._job is not None and not self._job.done:
            return "the previous trial is still shutting down"
        if self._known() is None:
            return "the script has not trained yet"
        if not self._live():
            return ""
        return (
            "the script is running and would disturb the measurement: stop it first (q, s), then "
            f"ndd-console try {self._run.name} --set CHANGE, or attach {self._run.name} and t"
        )

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

        edit = edit_for(TrialRequest(self._of, tuple(sets)), self._run_event)
        if not edit.diff:
            raise UsageError(f"this change is not an edit of one place: {'; '.join(edit.advice)}")
        return "\n".join(edit.diff)

    def write(self, trial: TrialEvent) -> Path:
        """Write the edit of the script as a patch."""
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
        return run_script_trial(request, run.config, run.device, tell, stop)


@contextmanager
def _nothing_to_pause(_report: Callable[[str], None], _stop: threading.Event) -> Iterator[None]:
    yield
