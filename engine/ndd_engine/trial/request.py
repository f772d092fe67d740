"""What a trial is asked: which configuration is the present, what is changed, how long it may take."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ndd_engine.record.rundir import RunDir


@dataclass(frozen=True)
class Base:
    """The present: a configuration file or a workload, with values set on top; `run` where it is a run's own.

    name: for people, "run chartext-001" or "chartext.toml".
    """

    name: str
    config: Path | None = None
    workload: str | None = None
    sets: tuple[str, ...] = ()
    run: RunDir | None = None

    @classmethod
    def of_run(cls, run: RunDir, sets: tuple[str, ...] = ()) -> Base:
        """The configuration that a run was resolved to."""
        return cls(f"run {run.name}", run.config, None, sets, run)


@dataclass(frozen=True)
class TrialRequest:
    """One change, as "key=value" each, against the present. cause: the finding it came from, if any."""

    base: Base
    sets: tuple[str, ...]
    budget_s: float = 60.0
    cause: str | None = None


@dataclass(frozen=True)
class Progress:
    """How far a trial is. stage: what is being done, for people. ratio, low, high: so far, None before there is any."""

    stage: str
    elapsed_s: float
    budget_s: float
    quads: int = 0
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
