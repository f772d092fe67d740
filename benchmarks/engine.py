"""Real runs of the engine for the benchmarks, each in a temporary folder, driven block by block."""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ndd_engine.config import read
from ndd_engine.record.events import EndEvent, Event, TrialEvent, WindowEvent, parse
from ndd_engine.record.rundir import RunDir
from ndd_engine.run.run import Run
from ndd_engine.train.loop import Loop
from ndd_engine.train.prepare import Prepared, prepare_run
from ndd_engine.train.request import RunRequest
from ndd_engine.train.training_run import TrainingRun
from ndd_engine.trial.outcome import Base, TrialRequest
from ndd_engine.trial.sides import SideProcess
from ndd_engine.trial.trial import run_trial
from ndd_engine.wizard.session import PATIENCE_S, WARM_UP

from .common import ignore

Json = dict[str, Any]
# A step takes 1-3 ms on one core, mostly in the interpreter, so overhead is most visible here.
TINY_WORKLOAD = "chartext"
TINY = ("workload.size=tiny", "batch.micro=4", "batch.sequence=16", "run.threads=1")
# Steps only: hand-written loops have no evaluation and no checkpoints to compare with.
ONLY_STEPS = (
    "run.epochs=1000000",
    "evaluate.every_epochs=0",
    "evaluate.at_end=false",
    "checkpoint.every_epochs=0",
    "checkpoint.every_minutes=0.0",
    "checkpoint.at_end=false",
)


@dataclass
class Engine:
    """A prepared run with its recorder and sampler running."""

    run: Run
    prepared: Prepared

    @property
    def loop(self) -> Loop:
        return self.prepared.loop

    def train(self, steps: int) -> None:
        """Run that many steps of the loop on this thread."""
        loop = self.loop
        loop.total_steps = loop.step + steps
        loop.run()

    def windows(self) -> list[tuple[float, WindowEvent]]:
        """The windows recorded on disk so far."""
        self.run.recorder.flush()
        return read_windows(self.run.directory.events)


def now(device: torch.device) -> float:
    """perf_counter, after all work queued on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@contextmanager
def engine(workload: str, sets: Sequence[str]) -> Iterator[Engine]:
    """A run of this workload on this thread; everything it writes is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="ndd-bench-") as folder:
        training = TrainingRun(RunRequest(read(sets=sets, workload=workload), Path(folder)))
        run = Run.open(training)
        try:
            prepared = prepare_run(training.opened)
            try:
                yield Engine(run, prepared)
            finally:
                prepared.sampler.stop()
        finally:
            run.close()


# Runs in processes of their own, which train block by block: the sides of a trial, driven by hand.
BLOCK_S = 1.5
ENDLESS = 1 << 40


def warm_up(side: SideProcess, block_s: float = BLOCK_S) -> None:
    """Prepare the run, and train the slower first steps. Raises ChildError."""
    side.prepare(PATIENCE_S, ignore)
    side.train(WARM_UP, PATIENCE_S, ignore, lead=0, until_s=block_s, least=2)


def step_s(side: SideProcess, block_s: float = BLOCK_S) -> float:
    """Seconds of a step in a block of this length. Raises ChildError."""
    seconds, steps = side.train(ENDLESS, PATIENCE_S, ignore, until_s=block_s, least=2)
    return seconds / steps


def tried(
    workload: str, sets: Sequence[str], change: Sequence[str], budget_s: float, restarts: bool, **more: Any
) -> TrialEvent:
    """A trial as `ndd-console try` makes it. more: cause, and an event that stops it. Raises NddError."""
    stop = more.pop("stop", None) or threading.Event()
    base = Base(workload, None, workload, tuple(sets))
    request = TrialRequest(base, tuple(change), budget_s, restarts=restarts, **more)
    return run_trial(request, lambda _: None, stop)


def read_windows(events: Path) -> list[tuple[float, WindowEvent]]:
    """(unix seconds, window) pairs of a record; a window ends at about that time and lasts wall_ns."""
    return [(t, event) for t, event in read_events(events) if isinstance(event, WindowEvent)]


def read_events(events: Path) -> Iterator[tuple[float, Event]]:
    """(unix seconds, event) pairs of a record."""
    with events.open("rb") as file:
        yield from filter(None, map(parse, file))


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


def trained(workload: str, sets: Sequence[str], folder: Path) -> Trained:
    """Train in this process, in a run of its own in `folder`."""
    run = Run.open(TrainingRun(RunRequest(read(sets=sets, workload=workload), folder)))
    try:
        end = run.execute()
    finally:
        run.close()
    return Trained(end, events_of(run.directory), run.directory)


def events_of(directory: RunDir) -> list[Json]:
    """The events of a record."""
    return [json.loads(line) for line in directory.events.read_text(encoding="utf-8").splitlines()]
