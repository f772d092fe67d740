"""What the screens need of a run and of the runs folder; who provides it stays outside the screens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from ndd_engine.record.snapshot import Snapshot

# "interrupt" is a stop by Ctrl-C: the run ends as interrupted, with that exit status.
Action = Literal["pause", "resume", "checkpoint", "evaluate", "stop", "interrupt", "kill"]


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

    def close(self) -> None:
        """Give up what the source holds. A run that is trained here is not stopped by it."""


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

    def card_lines(self) -> list[str]:
        """What was detected, one fact a line."""

    def runs(self) -> list[RunRow]:
        """The runs here, newest first."""

    def workloads(self) -> list[StartRow]:
        """What can be started."""
