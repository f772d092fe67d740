"""What the screens need of a run and of the runs folder; who provides it stays outside the screens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from ndd_engine.record.events import TrialEvent
from ndd_engine.record.snapshot import Snapshot

if TYPE_CHECKING:
    from ndd_engine.trial.request import Progress

# "interrupt" is a stop by Ctrl-C: the run ends as interrupted, with that exit status.
Action = Literal["pause", "resume", "checkpoint", "evaluate", "kernels", "stop", "interrupt", "kill"]


class RunSource(Protocol):
    """A run that is watched: trained in this process, attached, or read back from its record."""

    @property
    def name(self) -> str:
        """The run's name, as `ndd-console attach` takes it."""

    @property
    def live(self) -> bool:
        """Whether commands reach the run."""

    @property
    def owned(self) -> bool:
        """Whether the run is trained by this process, so that leaving the screen needs a decision."""

    def snapshot(self) -> Snapshot:
        """The newest state, at once; the same object while nothing changed."""

    def command(self, action: Action) -> None:
        """Ask the run for something. Never blocks and never raises; a failure shows up in `notice`."""

    def notice(self) -> str | None:
        """A short message for the user, such as "the run did not answer"."""

    def log_lines(self, count: int) -> list[str]:
        """The last lines of the captured output, made printable."""

    def trials(self) -> TrialSource | None:
        """Where changes to this run are measured, None where that cannot be done."""

    def close(self) -> None:
        """Give up what the source holds. A run that is trained here is not stopped by it."""


class TrialJob(Protocol):
    """A trial that goes on by itself; the screen asks how far it is."""

    @property
    def done(self) -> bool:
        """Whether it is over, with the run going on again."""

    @property
    def progress(self) -> Progress | None:
        """How far it is; None before anything was told."""

    @property
    def result(self) -> TrialEvent | None:
        """What came out; None before the end, and where there is a problem instead."""

    @property
    def problem(self) -> str:
        """Why there is no result, or what went wrong with keeping it; "" otherwise."""

    def stop(self) -> None:
        """End it soon. Returns at once; `done` tells when its processes are gone and the run goes on."""


class TrialSource(Protocol):
    """Measures changes against one run. Only one trial at a time."""

    @property
    def base(self) -> str:
        """What is compared with, for people: "run chartext-001"."""

    def pauses(self) -> str:
        """The run that has to stand still meanwhile, for people; "" where none does."""

    def refusal(self) -> str:
        """Why nothing can be measured now; "" where it can."""

    def check(self, sets: Sequence[str]) -> str:
        """What is wrong with these edits, a mistake a line; "" where they can be tried."""

    def start(self, sets: Sequence[str], cause: str | None, budget_s: float) -> TrialJob:
        """Begin to measure edits that were checked, for at most so many seconds."""

    def write(self, trial: TrialEvent) -> Path:
        """Write the configuration with the change of a trial into a new file. Raises UsageError."""


@dataclass(frozen=True, slots=True)
class RunRow:
    """One run in the list. started_t: unix seconds. best: "loss 1.482", empty without an evaluation."""

    name: str
    workload: str
    status: str
    step: int
    total_steps: int
    started_t: float | None
    best: str
    live: bool


@dataclass(frozen=True, slots=True)
class StartRow:
    """Something that can be trained."""

    name: str
    title: str
    text: str


class HomeSource(Protocol):
    """What the home screen lists. Each call may be slow and is made in a thread."""

    def gpu_lines(self) -> list[str]:
        """What was detected, one fact a line."""

    def runs(self) -> list[RunRow]:
        """The runs here, newest first."""

    def workloads(self) -> list[StartRow]:
        """What can be started."""
