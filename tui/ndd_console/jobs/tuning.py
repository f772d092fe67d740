"""Tuning in a terminal: the sweep in a thread, with the screen on the main thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ndd_console.app import TuningApp
from ndd_console.process.hosting import hosted
from ndd_console.process.launcher import Leash
from ndd_console.process.terminal import capabilities
from ndd_console.process.thread import ThreadJob
from ndd_engine.errors import UsageError
from ndd_engine.files import write_text
from ndd_engine.record.rundir import RunDir
from ndd_engine.trial.trial_request import Base

from .saving import save_new

if TYPE_CHECKING:
    from ndd_engine.trial.tuning import TuningState

Sweep = Callable[[Callable[["TuningState"], None], threading.Event], "TuningState"]


class TuningJob(ThreadJob):
    """A sweep in a thread. output: file for the result at the end; None: only on request."""

    problem = property(ThreadJob.failed)

    def __init__(self, name: str, sweep: Sweep, output: Path | None = None) -> None:
        super().__init__("ndd-tuning")
        self.name = name
        self.state: TuningState | None = None
        self.saved = ""
        self._sweep = sweep
        self._output = output

    def start(self) -> None:
        """Start the sweep."""
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
        state = self._sweep(self._report, self._stop)
        if self._output is not None:
            write_text(self._output, state.toml, "-o ")
            self.saved = str(self._output)
        self.state = state

    def _report(self, state: TuningState) -> None:
        self.state = state


def show(
    base: Base,
    budget_s: float,
    only: Sequence[str],
    output: Path | None,
    beside: Sequence[RunDir],
    ascii_only: bool,
    leash: Leash,
) -> tuple[TuningState, int, str]:
    """Tune a checked configuration with a screen.

    Returns, when it is closed, the result, the exit status so far, and the path of the configuration ("" if it was not
    written). Raises the errors of the sweep. output: the option `-o`; without it a key writes a new file. beside: live
    runs that are paused during the measurements.
    """

    def sweep(tell: Callable[[TuningState], None], stop: threading.Event) -> TuningState:
        # Imports torch: only after the first paint.
        from ndd_engine.trial.pausing import held
        from ndd_engine.trial.tuning import TuningState, run_tuning

        with held(beside, lambda text: tell(TuningState((), text)), stop):
            return run_tuning(base, budget_s, only, tell, stop)

    job = TuningJob(base.name, sweep, output)
    status = hosted(TuningApp(job, capabilities(ascii_only), job.start), job, leash)
    if job.error is not None:
        raise job.error
    assert job.state is not None
    return job.state, status, job.saved
