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


class StepTimer:
    """Times a block of steps, and records losses on demand. calls: of `tick` and `note` per step."""

    def __init__(self, device: torch.device, calls: int = 1) -> None:
        self._device, self._per_step = device, calls
        self._calls = 0
        self._first = self._last = -1
        self._begin: float | None = None
        self._end: float | None = None
        self._noted: list[torch.Tensor] | None = None

    def expect(self, warm_up: int, steps: int, note: bool = False) -> int:
        """Prepare for a block; returns its number of steps, including the one whose start ends the timed ones."""
        self._calls = 0
        self._first, self._last = warm_up * self._per_step, (warm_up + steps) * self._per_step
        self._begin = self._end = None
        self._noted = [] if note else None
        return warm_up + steps + 1

    def tick(self) -> None:
        """Call this at the start of each (part of a) step."""
        if self._calls == self._first:
            self._begin = now(self._device)
        elif self._calls == self._last:
            self._end = now(self._device)
        self._calls += 1

    def note(self, loss: torch.Tensor | None) -> None:
        """Record a loss, if losses are wanted."""
        if self._noted is not None and loss is not None:
            self._noted.append(loss.detach().clone())

    @property
    def seconds(self) -> float:
        """Seconds of the timed steps. Raises RuntimeError if the loop ended before them."""
        if self._begin is None or self._end is None:
            raise RuntimeError(f"the block ended after {self._calls} forward passes, before its last step")
        return self._end - self._begin

    @property
    def losses(self) -> list[float]:
        """The recorded ones, averaged per step."""
        noted, width = [float(loss) for loss in self._noted or ()], self._per_step
        return [sum(noted[at : at + width]) / width for at in range(0, len(noted), width)]


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
                prepared.sampler.stop()
        finally:
            run.close()


def read_windows(events: Path) -> list[tuple[float, WindowEvent]]:
    """(unix seconds, window) pairs of a record; a window ends at about that time and lasts wall_ns."""
    return [(t, event) for t, event in read_events(events) if isinstance(event, WindowEvent)]


def read_events(events: Path) -> Iterator[tuple[float, Event]]:
    """(unix seconds, event) pairs of a record."""
    with events.open("rb") as file:
        yield from filter(None, map(parse, file))
