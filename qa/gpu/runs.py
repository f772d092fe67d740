"""Runs of the first checks and of `tests/gpu`, and what is read from their records."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ndd_engine.config import read
from ndd_engine.record.events import EndEvent
from ndd_engine.record.rundir import RunDir
from ndd_engine.train.run import Run, RunRequest

Json = dict[str, Any]
# Every step's loss is written, each in a window of its own.
EVERY_STEP = ("log.every_steps=1", "log.window_s=0")
# Where losses are compared: TF32 and mixed precision round differently in a graph and in eager steps.
EXACT = (*EVERY_STEP, "workload.size=small", "precision.amp=off", "precision.tf32=false")


@dataclass(frozen=True)
class Trained:
    """A run that has ended, and the events of its record."""

    end: EndEvent
    events: list[Json]
    directory: RunDir

    def of(self, kind: str) -> list[Json]:
        """The events of a type, in order."""
        return [event for event in self.events if event["type"] == kind]

    @property
    def settings(self) -> dict[str, Json]:
        """The newest event of each setting."""
        return {event["name"]: event for event in self.of("setting")}

    @property
    def warnings(self) -> list[str]:
        """The texts of its warnings."""
        return [event["text"] for event in self.of("mark") if event["kind"] == "warning"]


def train(folder: Path, workload: str, sets: Iterable[str], device: str, steps: int) -> Trained:
    """Train in this process, in a run of its own in `folder`."""
    base = (f"run.device={device}", "evaluate.batches=4", "checkpoint.every_minutes=0")
    draft = read(None, [*base, *sets], workload, {"run": {"max_steps": steps, "name": "gpu"}})
    run = Run.open(RunRequest(draft, folder))
    end = run.execute()
    run.close()
    return Trained(end, events_of(run.directory), run.directory)


def events_of(directory: RunDir) -> list[Json]:
    """The events of a record."""
    return [json.loads(line) for line in directory.events.read_text(encoding="utf-8").splitlines()]


def losses(events: Iterable[Json]) -> dict[int, float]:
    """The loss of each step that is known.

    Losses are read back from a GPU without waiting for it, and a window has the last one that has arrived. So two runs
    need not know those of the same steps.
    """
    found = (event["last_loss"] for event in events if event["type"] == "window" and event["last_loss"])
    return {int(step): loss for step, loss in found if loss is not None}


def difference(one: Mapping[int, float], other: Mapping[int, float]) -> tuple[float, int]:
    """(the largest relative difference between losses of the same step, the number of steps that both know)."""
    both = one.keys() & other.keys()
    return max((abs(other[step] - one[step]) / abs(one[step]) for step in both), default=0.0), len(both)
