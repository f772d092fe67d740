"""Runs of the first checks and of `tests/gpu`, and what is read from their records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from benchmarks.engine import Json as Json
from benchmarks.engine import Trained as Trained
from benchmarks.engine import trained

# Every step's loss is written, each in a window of its own.
EVERY_STEP = ("log.every_steps=1", "log.window_s=0")
# Where losses are compared: TF32 and mixed precision round differently in a graph and in eager steps.
EXACT = (*EVERY_STEP, "workload.size=small", "precision.amp=off", "precision.tf32=false")


def train(folder: Path, workload: str, sets: Iterable[str], device: str, steps: int) -> Trained:
    """Train in this process, in a run of its own in `folder`."""
    base = (f"run.device={device}", "evaluate.batches=4", "checkpoint.every_minutes=0")
    return trained(workload, [*base, *sets, f"run.max_steps={steps}", "run.name=gpu"], folder)


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
