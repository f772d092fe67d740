"""Fake sources for the screens, and a clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ndd_console.jobs.folder import StartRow
from ndd_console.jobs.run_sources import Action, RunRow
from ndd_console.words.blocks import Block, NamedValues, Table
from ndd_engine.errors import UsageError
from ndd_engine.record.events import (
    TrialEvent,
)
from ndd_engine.record.snapshot import Snapshot
from ndd_engine.trial.outcome import Progress

from .fakes import T0, snapshot


class Clock:
    """A clock that a test sets."""

    def __init__(self, t: float = T0) -> None:
        self.t = t

    def __call__(self) -> float:
        return self.t


@dataclass
class FakeJob:
    """A trial whose state a test sets."""

    sets: tuple[str, ...] = ()
    progress: Progress | None = None
    result: TrialEvent | None = None
    error: str = ""
    done: bool = False
    stopped: int = 0

    def failed(self) -> str:
        return self.error

    def stop(self) -> None:
        self.stopped += 1


@dataclass
class FakeTrials:
    """A trial source whose jobs a test controls."""

    base: str = "run charlm-001"
    edits: bool = False
    budgets: list[float] = field(default_factory=list)
    paused: str = "charlm-001"
    refused: str = ""
    jobs: list[FakeJob] = field(default_factory=list)
    causes: list[str | None] = field(default_factory=list)
    full_disk: bool = False

    def pauses(self) -> str:
        return self.paused

    def refusal(self) -> str:
        return self.refused

    def check(self, sets: Sequence[str]) -> str:
        bad = [item for item in sets if "workers" not in item and "cache" not in item and "pin" not in item]
        return "\n".join(f"--set: {item}: unknown key; allowed: workers, cache" for item in bad)

    def start(self, sets: Sequence[str], cause: str | None, budget_s: float) -> FakeJob:
        self.budgets.append(budget_s)
        self.jobs.append(FakeJob(tuple(sets)))
        self.causes.append(cause)
        return self.jobs[-1]

    def diff(self, sets: Sequence[str]) -> str:
        return "\n".join(f"+{item}" for item in sets)

    def write(self, trial: TrialEvent) -> Path:
        if self.full_disk:
            raise UsageError("charlm-001-changed.toml cannot be written: No space left on device")
        return Path("charlm-001-changed.toml")


@dataclass
class FakeLog:
    """The output of a fake source, read as it grows."""

    source: FakeSource
    unfinished: str = ""
    count: int = 0

    def read(self) -> list[str]:
        new, self.count = self.source.output[self.count :], len(self.source.output)
        return new


@dataclass
class FakeSource:
    """A run source that records its commands."""

    value: Snapshot = field(default_factory=snapshot)
    name: str = "charlm-001"
    live: bool = True
    owned: bool = True
    script: bool = False
    said: str | None = None
    output: list[str] = field(default_factory=lambda: [f"line {i} of the output" for i in range(40)])
    commands: list[str] = field(default_factory=list)
    closed: bool = False
    asked: int = 0
    tries: FakeTrials | None = None

    def snapshot(self) -> Snapshot:
        self.asked += 1
        return self.value

    def command(self, action: Action) -> None:
        self.commands.append(action)

    def notice(self) -> str | None:
        return self.said

    def log(self) -> FakeLog:
        return FakeLog(self)

    def trials(self) -> FakeTrials | None:
        return self.tries

    def close(self) -> None:
        self.closed = True


@dataclass
class FakeHome:
    """A runs folder."""

    def machine(self) -> list[Block]:
        rows = (
            ("GPU", "NVIDIA GeForce RTX 4080 SUPER"),
            ("memory", "16.0 GiB, 14.9 GiB free"),
            ("compute", "capability 8.9"),
        )
        return [NamedValues(rows)]

    def runs(self) -> list[RunRow]:
        return [
            RunRow("charlm-003", "chartext", "training", 4_218, 6_900, T0, "loss 1.498", True),
            RunRow("charlm-002", "chartext", "done", 6_900, 6_900, T0 - 8_000, "loss 1.402", False),
            RunRow("eeg-lstm", "eeg", "failed", 120, 2_440, T0 - 90_000, "", False),
            RunRow("charlm-001", "chartext", "lost", 77, 6_900, T0 - 100_000, "loss 2.310", False),
        ]

    def compare(self, a: str, b: str) -> tuple[list[Block], Path | None]:
        facts = NamedValues(
            (("A", a), ("B", b), ("speed", "B/A 1.214x, 95 % CI 1.180 to 1.251: B is faster"))
        )
        rows = (("step time", "12.4 ms", "10.2 ms", "0.82"), ("data_wait", "3.1 ms", "0.9 ms", "0.29"))
        return [facts, Table("", ("", "A", "B", "B / A"), rows, frozenset({1, 2, 3}))], None

    def report(self, name: str) -> Path:
        return Path("runs") / name / "report.html"

    def workloads(self) -> list[StartRow]:
        return [
            StartRow("chartext", "character-level text model", "sizes tiny, mini, small, medium, guide"),
            StartRow("eeg", "EEG forecasters", "sizes guide, large, lstm, gru"),
        ]
