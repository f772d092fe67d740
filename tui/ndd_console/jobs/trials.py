"""Trials from the screen: in a thread of their own; the run stands still meanwhile, and goes on whatever happens."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ndd_console.view.interval import trial_text
from ndd_engine.config import read, to_toml
from ndd_engine.errors import NddError, UsageError
from ndd_engine.record.events import TrialEvent
from ndd_engine.record.rundir import RunDir
from ndd_engine.text import printable
from ndd_engine.trial.request import Base, Progress, TrialRequest

from .saving import save_new

if TYPE_CHECKING:
    from ndd_console.screens.interfaces import TrialJob
    from ndd_engine.train.run import Run

Tell = Callable[[Progress], None]
Measure = Callable[[TrialRequest, Tell, threading.Event], TrialEvent]
# (what is waited for, set to wait no longer): inside, the run stands still, and afterwards it goes on.
Still = Callable[[Callable[[str], None], threading.Event], AbstractContextManager[None]]
# How long whoever closes the screen waits for a trial's processes to end and for the run to go on.
PATIENCE_S = 20.0
# How long a run may take to pause: it does so after its step, or after the evaluation that it is in.
PAUSE_PATIENCE_S = 60.0


class TrialThread:
    """One trial. still: holds the run while it measures. keep: records the result, and may raise UsageError."""

    def __init__(
        self,
        request: TrialRequest,
        still: Still,
        keep: Callable[[TrialEvent], None],
        measure: Measure,
    ) -> None:
        self.request = request
        self.progress: Progress | None = None
        self.result: TrialEvent | None = None
        self.problem = ""
        self._still = still
        self._keep = keep
        self._measure = measure
        self._stop = threading.Event()
        self._over = threading.Event()
        # Not a daemon: the program may not end before the run goes on.
        self._thread = threading.Thread(target=self._work, name="ndd-trial")

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    @property
    def done(self) -> bool:
        return self._over.is_set()

    def stop(self) -> None:
        self._stop.set()

    def join(self, timeout_s: float) -> bool:
        """Wait for its end; False after the timeout."""
        return self._over.wait(timeout_s)

    def _work(self) -> None:
        try:
            with self._still(self._waits, self._stop):
                self.result = self._measure(self.request, self._told, self._stop)
            self._keep(self.result)
        except (NddError, OSError) as error:
            self.problem = str(error)
        except Exception as error:  # noqa: BLE001  a defect must be told, or the screen would wait for ever
            self.problem = f"{type(error).__name__}: {error}"
        finally:
            self._over.set()

    def _waits(self, text: str) -> None:
        self.progress = Progress(text, 0.0, self.request.budget_s)

    def _told(self, progress: Progress) -> None:
        self.progress = progress


class RunTrials:
    """Trials against the configuration of one run, one at a time.

    still: holds the run while a trial measures. live: whether it trains now. keep: records a result.
    """

    def __init__(
        self,
        directory: RunDir,
        still: Still,
        live: Callable[[], bool],
        keep: Callable[[TrialEvent], None],
        measure: Measure | None = None,
    ) -> None:
        self._of = Base.of_run(directory)
        self._still = still
        self._live = live
        self._keep = keep
        self._measure = measure or _run_trial
        self._job: TrialThread | None = None

    @property
    def base(self) -> str:
        return self._of.name

    def pauses(self) -> str:
        assert self._of.run is not None
        return self._of.run.name if self._live() else ""

    def refusal(self) -> str:
        assert self._of.run is not None
        if self._job is not None and not self._job.done:
            return "the trial before is still ending its processes"
        if not self._of.run.config.exists():
            return f"run {self._of.run.name} has no config.toml yet: wait until it trains"
        return ""

    def check(self, sets: Sequence[str]) -> str:
        from ndd_engine.trial.drafts import check

        try:
            check(TrialRequest(self._of, tuple(sets)))
        except NddError as error:
            return str(error)
        return ""

    def start(self, sets: Sequence[str], cause: str | None, budget_s: float) -> TrialJob:
        request = TrialRequest(self._of, tuple(sets), budget_s, cause)
        job = self._job = TrialThread(request, self._still, self._keep, self._measure)
        job.start()
        return job

    def write(self, trial: TrialEvent) -> Path:
        of = self._of
        assert of.run is not None
        config = read(of.config, (*of.sets, *trial.sets), of.workload).resolve()
        # The file is for another run, which cannot have the name of this one.
        config = config.model_copy(update={"run": config.run.model_copy(update={"name": None})})
        reasons = {
            item.partition("=")[0]: f"measured: {trial_text(trial)} against {trial.against}"
            for item in trial.sets
        }
        heading = f"The configuration of {of.name} with {', '.join(trial.sets)}\n{trial.text}"
        lines = "\n".join(printable(line) for line in heading.splitlines())
        return save_new(f"{of.run.name}-changed", to_toml(config, lines, reasons))

    def close(self, timeout_s: float = PATIENCE_S) -> bool:
        """Stop what is measured and wait until the run goes on; False when that takes longer."""
        job = self._job
        if job is None or job.done:
            return True
        job.stop()
        return job.join(timeout_s)


def attached_still(run: RunDir) -> Still:
    """A run of another process: asked through its socket. It watches this process, and goes on should that die."""

    @contextmanager
    def still(waits: Callable[[str], None], stop: threading.Event) -> Iterator[None]:
        from ndd_engine.trial.pausing import held, to_pause

        runs = to_pause(Base.of_run(run), run.path.parent, others=False)
        with held(runs, waits, stop):
            yield

    return still


def own_still(run: Run) -> Still:
    """The run of this process, asked directly: its folder may be one without sockets."""

    @contextmanager
    def still(waits: Callable[[str], None], stop: threading.Event) -> Iterator[None]:
        from ndd_engine.trial.pausing import to_pause

        to_pause(Base.of_run(run.directory), run.directory.path.parent, others=False)
        if run.finished.is_set():
            yield
            return
        run.control.request("pause", holder=os.getpid())
        try:
            waits("waiting for the run to pause after its step")
            deadline = time.monotonic() + PAUSE_PATIENCE_S
            while not (run.finished.is_set() or stop.is_set() or run.recorder.snapshot().status == "paused"):
                if time.monotonic() > deadline:
                    raise UsageError(f"the run did not pause within {PAUSE_PATIENCE_S:.0f} s")
                stop.wait(0.05)
            yield
        finally:
            run.control.request("resume", holder=os.getpid())

    return still


def _run_trial(request: TrialRequest, tell: Tell, stop: threading.Event) -> TrialEvent:
    from ndd_engine.trial.trial import run_trial

    return run_trial(request, tell, stop)
