"""Real runs of the engine for the benchmarks, each in a temporary folder, driven block by block."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from ndd_engine.config import read
from ndd_engine.record.events import Event, WindowEvent, parse
from ndd_engine.train.loop import Loop
from ndd_engine.train.prepare import Prepared, prepare_run
from ndd_engine.train.run import Run, RunRequest

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
        run = Run.open(RunRequest(read(sets=sets, workload=workload), Path(folder)))
        try:
            prepared = prepare_run(run)
            try:
                yield Engine(run, prepared)
            finally:
                prepared.close()
        finally:
            run.close()


def read_windows(events: Path) -> list[tuple[float, WindowEvent]]:
    """(unix seconds, window) pairs of a record; a window ends at about that time and lasts wall_ns."""
    return [(t, event) for t, event in read_events(events) if isinstance(event, WindowEvent)]


def read_events(events: Path) -> Iterator[tuple[float, Event]]:
    """(unix seconds, event) pairs of a record."""
    with events.open("rb") as file:
        yield from filter(None, map(parse, file))
