"""A run of the engine in a child process, which trains block by block on command.

In one process, two runs would share process-wide settings (deterministic algorithms, TF32, compiled graphs, threads),
and a setting that crashes the process would end the benchmark. Between blocks the child waits for its pipe, and its
sampler is stopped.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from ndd_engine.child import ChildError, ChildProcess, ChildServer, Json, Pipe
from ndd_engine.record.events import MarkEvent, SettingEvent

from .common import ignore
from .engine import Engine, StepTimer, engine, read_events

READY_S = 300.0  # preparing, with a compiler on few cores
BLOCK_S = 120.0


@dataclass(frozen=True)
class Ready:
    """What is known of a run once it trains.

    items: of an optimizer step. losses: of the first steps. step_s: their mean time without the first one. compile_s:
    of the compiler. not_in_effect: requested settings that are not in effect.
    """

    items: int
    losses: tuple[float, ...]
    step_s: float
    compile_s: float | None
    not_in_effect: tuple[str, ...]
    threads: int


class Subject(ChildProcess):
    """The process with the run, seen from the benchmark. Its methods raise ChildError."""

    def __init__(self, workload: str, sets: Sequence[str], losses: int) -> None:
        super().__init__("benchmarks.subject")
        command = {"do": "open", "workload": workload, "sets": list(sets), "losses": losses}
        try:
            body = self.ask(command, READY_S, ignore)
        except ChildError:
            self.close()
            raise
        self.ready = Ready(
            **{**body, "losses": tuple(body["losses"]), "not_in_effect": tuple(body["not_in_effect"])}
        )

    def train(self, steps: int) -> float:
        """Seconds of that many steps, after some untimed ones."""
        return float(self.ask({"do": "train", "count": steps}, BLOCK_S, ignore)["seconds"])

    def fetch(self, batches: int) -> float:
        """Seconds to make that many batches, without training on them."""
        return float(self.ask({"do": "fetch", "count": batches}, BLOCK_S, ignore)["seconds"])


def compiler_cache(folder: str) -> None:
    """Store compiled code of this process's runs here, so that they start with a cold cache."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder


# In the process of the run.


class _Run(ChildServer):
    """Trains blocks; `Steps` replaces the stepper's step."""

    def __init__(self, pipe: Pipe, folder: Path) -> None:
        super().__init__(pipe, folder)
        tempfile.tempdir = str(folder)  # removed with it
        self._stack = ExitStack()
        self.commands = {
            "open": self.open,
            "train": lambda command: {"seconds": self.train(command["count"])},
            "fetch": lambda command: {"seconds": self.fetch(command["count"])},
        }

    def open(self, command: Json) -> Json:
        """Prepare the run and train its first steps (2 or more). Answers the fields of Ready."""
        import torch

        from .loop import keep_memory

        keep_memory()
        self.subject = subject = self._stack.enter_context(engine(command["workload"], command["sets"]))
        self.sampler = subject.prepared.sampler
        self.sampler.stop()
        loop = subject.loop
        self.steps = Steps(loop.stepper)
        vars(loop.stepper)["step"] = self.steps
        loader = loop.config.loader
        # Workers start loading when an iteration begins: the timed steps begin after they have caught up.
        self.warm_up = 1 + loader.workers * (loader.prefetch or 2)
        count = command["losses"]
        subject.train(self.steps.expect(1, count - 1, note=True))
        losses, step_s = tuple(self.steps.losses[:count]), self.steps.seconds / (count - 1)
        compile_s, missing = _settings(subject)
        return asdict(
            Ready(loop.config.batch.items, losses, step_s, compile_s, missing, torch.get_num_threads())
        )

    def train(self, steps: int) -> float:
        """Seconds of that many steps."""
        count = self.steps.expect(self.warm_up, steps)
        with self._sampled():
            self.subject.train(count)
        return self.steps.seconds

    def fetch(self, batches: int) -> float:
        """Seconds of that many batches, without training on them."""
        loop = self.subject.loop
        epoch = loop.step // loop.steps_per_epoch + 1
        endless = (batch for more in range(1_000_000) for batch in loop.batches.epoch(epoch + more))
        for _ in islice(endless, self.warm_up):
            pass
        begin = time.perf_counter()
        for _ in islice(endless, batches):
            pass
        return time.perf_counter() - begin

    @contextmanager
    def _sampled(self) -> Iterator[None]:
        self.sampler.start()
        try:
            yield
        finally:
            self.sampler.stop()


class Steps(StepTimer):
    """Replaces Stepper.step."""

    def __init__(self, stepper: Any) -> None:
        super().__init__(stepper.device)
        self._step = stepper.step

    def __call__(self, *arguments: Any) -> Any:
        self.tick()
        loss = self._step(*arguments)
        self.note(loss)
        return loss


def _settings(subject: Engine) -> tuple[float | None, tuple[str, ...]]:
    """(seconds of the compiler, settings not in effect), from the run's own record."""
    subject.run.recorder.flush()
    newest: dict[str, SettingEvent] = {}
    compile_s = None
    for _, event in read_events(subject.run.directory.events):
        if isinstance(event, SettingEvent):
            newest[event.name] = event
        elif isinstance(event, MarkEvent) and event.kind == "compile":
            compile_s = float(event.data["seconds"])
    missing = [event for event in newest.values() if event.in_effect is False]
    return compile_s, tuple(
        f"{event.name} is {event.applied} instead of {event.requested} ({event.verified})"
        for event in missing
    )


if __name__ == "__main__":
    _Run.main(sys.argv[1:])
