"""A sweep over settings, in a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ndd_console.process.thread import ThreadJob
from ndd_engine.errors import UsageError
from ndd_engine.files import write_text

from .saving import save_new

if TYPE_CHECKING:
    from ndd_engine.trial.tuning import TuningState

Sweep = Callable[[Callable[["TuningState"], None], threading.Event], "TuningState"]


class TuningJob(ThreadJob):
    """A sweep in a thread. output: file for the result at the end; None: only on request."""

    problem = property(ThreadJob.failed)

    def __init__(self, name: str, sweep: Sweep, output: Path | None = None) -> None:
        super().__init__("ndd-tuning")
        self.name = name  # the baseline as text
        self.state: TuningState | None = None  # None before the first report
        self.saved = ""  # path of the written configuration; "" until then
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
        state = self._sweep(self._report, self.stopping)
        if self._output is not None:
            write_text(self._output, state.toml, "-o ")
            self.saved = str(self._output)
        self.state = state

    def _report(self, state: TuningState) -> None:
        self.state = state
