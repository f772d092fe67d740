"""Protocols of the data behind the screens; `jobs` implements them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from ndd_console.words.blocks import Block
from ndd_engine.record.events import TrialEvent
from ndd_engine.record.snapshot import Snapshot

if TYPE_CHECKING:
    from ndd_engine.trial.trial_request import Progress
    from ndd_engine.trial.tuning import TuningState

# "interrupt" is a stop by Ctrl-C: the run ends as interrupted, with that exit status.
Action = Literal["pause", "resume", "checkpoint", "evaluate", "kernels", "stop", "interrupt", "kill"]


@dataclass(frozen=True, slots=True)
class RunRow:
    """One run. started_t: unix seconds. best: "loss 1.482", empty without an evaluation.

    training_s: seconds of training, evaluations and checkpoints included; None if unknown.
    """

    name: str
    workload: str
    status: str
    step: int
    total_steps: int
    started_t: float | None
    best: str
    live: bool
    training_s: float | None = None


@dataclass(frozen=True, slots=True)
class StartRow:
    """Something that can be trained: a built-in workload, or a configuration file or own workload of the folder.

    epochs: how long to train; None as configured, which an own workload is not.
    """

    name: str
    title: str
    text: str
    kind: Literal["workload", "file", "own"] = "workload"
    epochs: int | None = None


class LogSource(Protocol):
    """The captured output of a run, with control characters escaped."""

    unfinished: str  # the last line while it has no end, such as a progress bar

    def read(self) -> list[str]: ...  # the lines since the last call


class RunSource(Protocol):
    """A run on the screen: trained in this process, attached, or read from its record."""

    name: str  # as for `ndd-console attach`
    owned: bool  # whether this process trains the run; leaving the screen then needs a decision
    script: bool  # whether it is a script that is only observed

    @property
    def live(self) -> bool: ...  # whether the run accepts commands

    # The latest state, without blocking; the same object while nothing changes.
    def snapshot(self) -> Snapshot: ...

    # Send a command to the run. Never blocks or raises; failures are reported by `notice`.
    def command(self, action: Action) -> None: ...
    def notice(self) -> str | None: ...  # a short message for the user, such as "the run did not answer"

    def log(self) -> LogSource: ...  # the captured output

    # Measures changes to this run; None if that is not possible.
    def trials(self) -> TrialSource | None: ...
    def close(self) -> None: ...  # releases resources; does not stop a run of this process


class TrialJob(Protocol):
    """A running trial."""

    progress: Progress | None  # None before the first report
    result: TrialEvent | None  # None before the end and after a failure

    @property
    def done(self) -> bool: ...  # whether the trial has ended and the run has resumed
    @property
    def problem(self) -> str: ...  # why there is no result or why it was not recorded; "" otherwise

    # Stop soon. Returns immediately; `done` is set once the processes have ended and the run has resumed.
    def stop(self) -> object: ...


class TrialSource(Protocol):
    """Measures changes to one run, one trial at a time."""

    base: str  # the baseline as text: "run chartext-001"
    edits: bool  # a change is an edit of a script, not of a configuration

    def pauses(self) -> str: ...  # name of the run that is paused during a trial; "" for none
    def refusal(self) -> str: ...  # why no trial can start now; "" if one can
    def check(self, sets: Sequence[str]) -> str: ...  # errors in these edits, one per line; "" for none

    # Start to measure checked edits, for up to `budget_s` seconds.
    def start(self, sets: Sequence[str], cause: str | None, budget_s: float) -> TrialJob: ...

    def diff(self, sets: Sequence[str]) -> str: ...  # the change of a trial as a diff; raises UsageError

    # Write the configuration with the change of a trial to a new file. Raises UsageError.
    def write(self, trial: TrialEvent) -> Path: ...


class TuningSource(Protocol):
    """A running sweep over settings."""

    name: str  # the baseline as text
    state: TuningState | None  # None before the first report
    saved: str  # path of the written configuration; "" until then

    @property
    def problem(self) -> str: ...  # why there is no result; "" otherwise
    def save(self) -> str: ...  # writes the result to a new file; returns an error message, or ""
    def stop(self) -> object: ...  # stops soon and keeps the results so far; returns immediately


class HomeSource(Protocol):
    """Data of the home screen. Every call may be slow and is made in a thread."""

    def gpu_lines(self) -> list[str]: ...  # the detected hardware, one fact per line
    def runs(self) -> list[RunRow]: ...  # the runs in the runs folder, newest first
    # What can be trained: configurations and own workloads of the folder, then the built-in workloads.
    def workloads(self) -> list[StartRow]: ...
    def details(self, row: StartRow) -> Sequence[str]: ...  # a page about one of them
    def compare(self, a: str, b: str) -> Sequence[Block]: ...  # run b compared with run a
    def report(self, name: str) -> Path: ...  # writes the HTML page about a run
