"""Trials and tuning that a screen starts, in a thread, and the files that it writes."""

from __future__ import annotations

import itertools
import json
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ndd_console.process.thread import ThreadJob
from ndd_console.words.trial import trial_text
from ndd_engine.config import changed_toml, read
from ndd_engine.errors import NddError, UsageError
from ndd_engine.files import create_text, write_text
from ndd_engine.record.events import RunEvent, TrialEvent
from ndd_engine.text import printable
from ndd_engine.trial.outcome import Base, Progress, TrialRequest

if TYPE_CHECKING:
    from ndd_engine.record.rundir import RunDir
    from ndd_engine.record.snapshot import Snapshot
    from ndd_engine.trial.tuning import TuningState


def new_path(stem: str, suffix: str = ".toml") -> Path:
    """The first unused name of `<stem>.toml`, `<stem>-2.toml`, … in the working directory."""
    names = (f"{stem}{f'-{number}' if number > 1 else ''}{suffix}" for number in itertools.count(1))
    return next(
        Path(name) for name in names if not os.path.lexists(name)
    )  # a broken link also occupies its name


def save_new(stem: str, text: str, suffix: str = ".toml") -> Path:
    """Write a new file, see `new_path`. Returns its path. Raises UsageError if it cannot be written."""
    while True:
        path = new_path(stem, suffix)
        try:
            create_text(path, text)
        except FileExistsError:
            continue
        return path


Tell = Callable[[Progress], None]
# Time limit for a trial's processes to end and for the run to resume when the screen is closed.
PATIENCE_S = 20.0


class TrialThread(ThreadJob):
    """One trial."""

    progress: Progress | None = None  # None before the first report
    result: TrialEvent | None = None  # None before the end and after a failure

    @property
    def done(self) -> bool:
        """Whether the trial has ended and the run has resumed."""
        return not self.working()


class BaselineRun(Protocol):
    """The run whose configuration is the baseline: it pauses during a trial, and its record keeps the result."""

    directory: RunDir
    name: str

    @property
    def live(self) -> bool: ...
    def snapshot(self) -> Snapshot: ...
    def paused(
        self, report: Callable[[str], None], stop: threading.Event
    ) -> AbstractContextManager[None]: ...
    def keep(self, trial: TrialEvent) -> None: ...


class RunTrials:
    """Trials against the configuration of one run, one at a time. base: the baseline as text."""

    edits = False  # whether a change is an edit of a script, not of a configuration

    def __init__(self, source: BaselineRun) -> None:
        self._source = source
        self._of = self._baseline()
        self.base = self._of.name
        self._job: TrialThread | None = None

    def _baseline(self) -> Base:
        return Base.of_run(self._source.directory)

    def pauses(self) -> str:
        """Name of the run that is paused during a trial; "" for none."""
        return self._source.name if self._source.live else ""

    def refusal(self) -> str:
        """Why no trial can start now; "" if one can."""
        if self._job is not None and not self._job.done:
            return "the previous trial is still shutting down"
        return self._missing()

    def _missing(self) -> str:
        if self._source.directory.config.exists():
            return ""
        return f"run {self._source.name} has no config.toml yet; wait until training starts"

    def check(self, sets: Sequence[str]) -> str:
        """Errors in these edits, one per line; "" for none."""
        try:
            self._check(TrialRequest(self._of, tuple(sets)))
        except NddError as error:
            return str(error)
        return ""

    def _check(self, request: TrialRequest) -> None:
        from ndd_engine.trial.trial import check

        check(request)

    def start(self, sets: Sequence[str], cause: str | None, budget_s: float) -> TrialThread:
        """Start to measure checked edits, for up to `budget_s` seconds, while the run is paused."""
        request = TrialRequest(self._of, tuple(sets), budget_s, cause)
        job = self._job = TrialThread("ndd-trial")

        def tell(progress: Progress) -> None:
            job.progress = progress

        def work() -> None:
            with self._source.paused(lambda text: tell(Progress(text, 0.0, budget_s)), job.stopping):
                job.result = self._measure(request, tell, job.stopping)
            self._source.keep(job.result)

        job.begin(work)
        return job

    def _measure(self, request: TrialRequest, tell: Tell, stop: threading.Event) -> TrialEvent:
        from ndd_engine.trial.trial import run_trial

        return run_trial(request, tell, stop)

    def diff(self, sets: Sequence[str]) -> str:
        """The keys of the configuration that change, as a diff. Raises UsageError."""
        from ndd_engine.trial.trial import check

        changed = check(TrialRequest(self._of, tuple(sets)))
        lines = []
        for key, (before, after) in changed.items():
            old, new = (json.dumps(value, default=str) for value in (before, after))
            lines += [f"-{key} = {old}", f"+{key} = {new}"]
        return "\n".join(lines)

    def write(self, trial: TrialEvent) -> Path:
        """Write the configuration with the change of a trial to a new file. Raises UsageError."""
        of = self._of
        config = read(of.config, (*of.sets, *trial.sets), of.workload).resolve()
        # A new run cannot have the name of this one.
        config = config.model_copy(update={"run": config.run.model_copy(update={"name": None})})
        reason = f"measured: {trial_text(trial)} vs. {trial.against}"
        reasons = {item.partition("=")[0]: reason for item in trial.sets}
        heading = f"Configuration of {of.name} with {', '.join(trial.sets)}\n{trial.text}"
        lines = "\n".join(printable(line) for line in heading.splitlines())
        return save_new(f"{self._source.name}-changed", changed_toml(config, lines, reasons))

    def close(self) -> None:
        if self._job is not None:
            self._job.stop()
            self._job.join(PATIENCE_S)


class ScriptTrials(RunTrials):
    """Trials of an observed script, in scratch copies."""

    edits = True

    def __init__(self, source: BaselineRun) -> None:
        super().__init__(source)
        # By what was tried.
        self._tried: dict[tuple[str, ...], TrialEvent] = {}

    def _baseline(self) -> Base:
        return Base(f"run {self._source.name}", run=self._source.directory)

    def _missing(self) -> str:
        return "the script has not trained yet" if self._source.snapshot().run is None else ""

    def _check(self, request: TrialRequest) -> None:
        from ndd_engine.script.trials import check_script

        check_script(request, self._run_event.config)

    def diff(self, sets: Sequence[str]) -> str:
        from ndd_engine.script.trials import edit_for

        tried = self._tried.get(tuple(sets))
        edit = edit_for(
            TrialRequest(self._of, tuple(sets)), self._run_event, *([] if tried is None else [tried])
        )
        if not edit.diff:
            raise UsageError(f"this change is not an edit of one place: {'; '.join(edit.advice)}")
        return "\n".join(edit.diff)

    def write(self, trial: TrialEvent) -> Path:
        self._tried[tuple(trial.sets)] = trial
        return save_new(f"{self._source.name}-change", self.diff(trial.sets) + "\n", suffix=".diff")

    @property
    def _run_event(self) -> RunEvent:
        run_event = self._source.snapshot().run
        if run_event is None:
            raise UsageError(self._missing())
        return run_event

    def _measure(self, request: TrialRequest, tell: Tell, stop: threading.Event) -> TrialEvent:
        from ndd_engine.script.trials import run_script_trial

        run = self._run_event
        trial = run_script_trial(request, run.config, run.device, tell, stop)
        self._tried[request.sets] = trial
        return trial


Sweep = Callable[[Callable[["TuningState"], None], threading.Event], "TuningState"]


class TuningJob(ThreadJob):
    """A sweep in a thread. output: file for the result at the end; None: only on request."""

    def __init__(self, name: str, sweep: Sweep, output: Path | None = None) -> None:
        super().__init__("ndd-tuning")
        self.name = name  # the baseline as text
        self.state: TuningState | None = None  # None before the first report
        self.saved = ""  # path of the written configuration; "" until then
        self._sweep = sweep
        self._output = output

    def start(self) -> None:
        self.begin(self._tune)

    def save(self) -> str:
        """Write the result to a new file. Returns an error message, or ""."""
        if self.state is None or self.saved:
            return ""
        try:
            self.saved = str(save_new("tuning", self.state.toml))
        except UsageError as error:
            return str(error)
        return ""

    def _tune(self) -> None:
        state = self._sweep(self._report, self.stopping)
        if self._output is not None:
            write_text(self._output, state.toml, "-o ")
            self.saved = str(self._output)
        self.state = state

    def _report(self, state: TuningState) -> None:
        self.state = state
