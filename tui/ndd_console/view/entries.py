"""The entries of the home screen's list."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RunRow:
    """One run. started_t: unix seconds. best: "loss 1.482", empty without an evaluation."""

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
    """A workload that can be trained."""

    name: str
    title: str
    text: str
