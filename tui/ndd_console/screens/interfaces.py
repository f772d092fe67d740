"""Protocols of the data behind the screens; `jobs` implements them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from ndd_console.view.entries import RunRow, StartRow
from ndd_engine.record.events import TrialEvent
from ndd_engine.record.snapshot import Snapshot

if TYPE_CHECKING:
    from ndd_engine.trial.request import Progress
    from ndd_engine.trial.tuning import TuningState

__all__ = [
    "Action",
    "HomeSource",
    "RunRow",
    "RunSource",
    "StartRow",
    "TrialJob",
    "TrialSource",
    "TuningSource",
]

# "interrupt" is a stop by Ctrl-C: the run ends as interrupted, with that exit status.
Action = Literal["pause", "resume", "checkpoint", "evaluate", "kernels", "stop", "interrupt", "kill"]


class RunSource(Protocol):
    """A run on the screen: trained in this process, attached, or read from its record."""

    @property
    def name(self) -> str:
        """Name of the run, as for `ndd-console attach`."""

    @property
    def live(self) -> bool:
        """Whether the run accepts commands."""

    @property
    def owned(self) -> bool:
        """Whether this process trains the run. Leaving the screen then needs a decision."""

    def snapshot(self) -> Snapshot:
        """The latest state, without blocking; the same object while nothing changes."""

    def command(self, action: Action) -> None:
        """Send a command to the run. Never blocks or raises; failures are reported by `notice`."""

    def notice(self) -> str | None:
        """A short message for the user, such as "the run did not answer"."""

    def log_lines(self, count: int) -> list[str]:
        """The last lines of the captured output, with control characters escaped."""

    def trials(self) -> TrialSource | None:
        """Measures changes to this run; None if that is not possible."""

    def close(self) -> None:
        """Release resources. Does not stop a run of this process."""


class TrialJob(Protocol):
    """A running trial."""

    @property
    def done(self) -> bool:
        """Whether the trial has ended and the run has resumed."""

    @property
    def progress(self) -> Progress | None:
        """Latest progress; None before the first report."""

    @property
    def result(self) -> TrialEvent | None:
        """The result; None before the end and after a failure."""

    @property
    def problem(self) -> str:
        """Why there is no result or why it was not recorded; "" otherwise."""

    def stop(self) -> None:
        """Stop soon. Returns immediately; `done` is set once the processes have ended and the run has resumed."""


class TrialSource(Protocol):
    """Measures changes to one run, one trial at a time."""

    @property
    def base(self) -> str:
        """The baseline as text: "run chartext-001"."""

    def pauses(self) -> str:
        """Name of the run that is paused during a trial; "" for none."""

    def refusal(self) -> str:
        """Why no trial can start now; "" if one can."""

    def check(self, sets: Sequence[str]) -> str:
        """Errors in these edits, one per line; "" if they can be tried."""

    def start(self, sets: Sequence[str], cause: str | None, budget_s: float) -> TrialJob:
        """Start to measure checked edits, for up to `budget_s` seconds."""

    def write(self, trial: TrialEvent) -> Path:
        """Write the configuration with the change of a trial to a new file. Raises UsageError."""


class TuningSource(Protocol):
    """A running sweep over settings."""

    @property
    def name(self) -> str:
        """The baseline as text."""

    @property
    def state(self) -> TuningState | None:
        """Latest state; None before the first report."""

    @property
    def problem(self) -> str:
        """Why there is no result; "" otherwise."""

    @property
    def saved(self) -> str:
        """Path of the written configuration; "" until then."""

    def save(self) -> str:
        """Write the result to a new file. Returns an error message, or ""."""

    def stop(self) -> None:
        """Stop soon and keep the results so far. Returns immediately."""


class HomeSource(Protocol):
    """Data of the home screen. Every call may be slow and is made in a thread."""

    def gpu_lines(self) -> list[str]:
        """The detected hardware, one fact per line."""

    def runs(self) -> list[RunRow]:
        """The runs in the runs folder, newest first."""

    def workloads(self) -> list[StartRow]:
        """The workloads that can be trained."""
