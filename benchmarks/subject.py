"""A run of the engine in a process of its own, which trains block by block when it is told to.

In one process two runs would share what settings change for the whole of it (deterministic algorithms, TF32, compiled
graphs, threads); and a setting that ends a process must not end the benchmark. Between blocks the process sleeps in a
read of its pipe, and its sampler is stopped.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from multiprocessing.connection import Connection
from typing import Any

from ndd_engine.errors import NddError

READY_S = 300.0  # preparing with a compiler at work on few cores
BLOCK_S = 120.0


class SubjectError(Exception):
    """The run could not be made, or its process ended; the message says why."""


@dataclass(frozen=True)
class Ready:
    """What a run is like once it trains.

    items: of one optimizer step. losses: of the first steps. step_s: their mean without the first, roughly what a
    step takes. compile_s: of the compiler. not_in_effect: settings that were asked for and are not.
    """

    items: int
    losses: tuple[float, ...]
    step_s: float
    compile_s: float | None
    not_in_effect: tuple[str, ...]
    threads: int


class Subject:
    """The process with the run, seen from the benchmark. Use `opened`."""

    def __init__(self, process: Any, pipe: Connection) -> None:
        self._process, self._pipe = process, pipe
        self.ready: Ready = self._answer(READY_S)

    def train(self, steps: int) -> float:
        """Seconds of that many steps, after some that do not count."""
        return self._ask(("train", steps))

    def fetch(self, batches: int) -> float:
        """Seconds to make that many batches, without training on them."""
        return self._ask(("fetch", batches))

    def close(self) -> None:
        """End the process; safe to call twice."""
        try:
            self._pipe.send(("end", 0))
        except OSError:
            pass
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._pipe.close()

    def _ask(self, what: tuple[str, int]) -> float:
        try:
            self._pipe.send(what)
        except OSError:
            raise SubjectError("the process of the run ended") from None
        return float(self._answer(BLOCK_S))

    def _answer(self, timeout_s: float) -> Any:
        try:
            if not self._pipe.poll(timeout_s):
                raise SubjectError(f"no answer within {timeout_s:.0f} s")
            answer = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(5)
            raise SubjectError(f"the process of the run ended with {self._process.exitcode}") from None
        if isinstance(answer, str):
            raise SubjectError(answer)
        return answer


def opened(workload: str, sets: Sequence[str], losses: int) -> Subject:
    """A run of this workload, ready to train. Raises SubjectError."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there, workload, tuple(sets), losses))
    process.start()
    there.close()
    try:
        return Subject(process, here)
    except SubjectError:
        process.kill()
        process.join()
        here.close()
        raise


def compiler_cache(folder: str) -> None:
    """Compiled code of this process's runs goes here: a cold cache at first, whatever was compiled on the machine."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder


# In the process of the run.


def _serve(pipe: Connection, workload: str, sets: Sequence[str], losses: int) -> None:
    from .engine import engine
    from .loop import keep_memory

    keep_memory()
    try:
        with engine(workload, sets) as subject:
            run = _Run(subject)
            run.sampler.stop()
            pipe.send(run.ready(losses))
            for what, count in _commands(pipe):
                pipe.send(run.train(count) if what == "train" else run.fetch(count))
    except NddError as error:
        pipe.send(str(error))
    except Exception as error:  # noqa: BLE001  told to the benchmark, which goes on with another
        pipe.send(f"{type(error).__name__}: {(str(error).splitlines() or ['no message'])[0]}")


def _commands(pipe: Connection) -> Iterator[tuple[str, int]]:
    while True:
        try:
            what, count = pipe.recv()
        except EOFError:
            return
        if what == "end":
            return
        yield what, count


class _Run:
    """Trains blocks; `Steps` stands in the place of the stepper's step."""

    def __init__(self, subject: Any) -> None:
        self.subject = subject
        self.sampler = subject.prepared.sampler
        loop = subject.loop
        self.steps = Steps(loop.stepper)
        vars(loop.stepper)["step"] = self.steps
        loader = loop.config.loader
        # Workers start to load when an iteration begins: the timed steps begin when they have caught up.
        self.warm_up = 1 + loader.workers * (loader.prefetch or 2)

    def ready(self, count: int) -> Ready:
        """Train the first steps (2 or more) and look at what became of the settings."""
        import torch

        self.subject.train(self.steps.expect(1, count - 1, note=True))
        losses, step_s = self.steps.losses[:count], self.steps.seconds / (count - 1)
        compile_s, missing = _told(self.subject)
        items = self.subject.loop.config.batch.items
        return Ready(items, losses, step_s, compile_s, missing, torch.get_num_threads())

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


class Steps:
    """In the place of Stepper.step: notes when the first and the last timed step begin, and losses on demand."""

    def __init__(self, stepper: Any) -> None:
        self._step, self._device = stepper.step, stepper.device
        self._calls = 0
        self._first = self._last = -1
        self._begin = self._end = 0.0
        self._noted: list[Any] | None = None

    def expect(self, warm_up: int, steps: int, note: bool = False) -> int:
        """Prepare for a block; returns how many steps it takes: one more, whose beginning ends the timed ones."""
        self._calls, self._first, self._last = 0, warm_up, warm_up + steps
        self._noted = [] if note else None
        return warm_up + steps + 1

    def __call__(self, *arguments: Any) -> Any:
        if self._calls == self._first:
            self._begin = self._now()
        elif self._calls == self._last:
            self._end = self._now()
        self._calls += 1
        loss = self._step(*arguments)
        if self._noted is not None and loss is not None:
            self._noted.append(loss.clone())
        return loss

    @property
    def seconds(self) -> float:
        """Of the timed steps."""
        return self._end - self._begin

    @property
    def losses(self) -> tuple[float, ...]:
        """The noted ones."""
        return tuple(map(float, self._noted or ()))

    def _now(self) -> float:
        if self._device.type == "cuda":
            import torch

            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def _told(subject: Any) -> tuple[float | None, tuple[str, ...]]:
    """(seconds of the compiler, settings that are not in effect), from the run's own record."""
    from ndd_engine.record.events import MarkEvent, SettingEvent, parse

    subject.run.recorder.flush()
    newest: dict[str, SettingEvent] = {}
    compile_s = None
    for line in subject.run.directory.events.read_bytes().splitlines():
        item = parse(line)
        event = item[1] if item is not None else None
        if isinstance(event, SettingEvent):
            newest[event.name] = event
        elif isinstance(event, MarkEvent) and event.kind == "compile":
            compile_s = float(event.data["seconds"])
    missing = [event for event in newest.values() if event.in_effect is False]
    return compile_s, tuple(
        f"{event.name} = {event.requested} is {event.applied}: {event.verified}" for event in missing
    )
