"""Turns measurements into events while a loop trains: windows, memory, recompilations, collections, stalls."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from ndd_engine.record.events import Event, MarkEvent, MemoryEvent, ScalarsEvent, WindowEvent
from ndd_engine.text import printable
from ndd_watch.compilers import Compilations
from ndd_watch.finite import Finite
from ndd_watch.garbage import Garbage
from ndd_watch.process import Heap, allocator

from .child_processes import Children
from .losses import LossReader
from .phase_clock import PhaseClock, Window
from .process_watch import ProcessWatch
from .spy import Frame, of_thread

PERIOD_S = 0.5


@dataclass(frozen=True)
class StepWork:
    """What one optimizer step processes, and how many steps make an epoch.

    place: the (epoch, step in it) of the run, and made: the items so far, if they do not follow from the step.
    """

    items: int
    micro_steps: int
    tokens_per_item: float
    steps_per_epoch: int
    place: Callable[[], tuple[int, int]] | None = None
    made: Callable[[], int] | None = None


class Stepping(Protocol):
    """The part of a stepper that the reporter reads: the learning rate, and events waiting to be recorded.

    kept_steps: see WindowEvent.
    """

    reports: list[Event]

    @property
    def lr(self) -> float | None: ...

    @property
    def kept_steps(self) -> int: ...


class Reporter:
    """Turns what was measured since the last window into events; `put` records one.

    steps, passes: in the current window, see WindowEvent. arrived: (step, loss) pairs that reached the host in it.
    profiled: the window contains a profiler capture or a profiled step. windowed: called with each window that ends;
    returns what is recorded of it. paced: called with the usual time of a step, 0 if it is unknown.
    """

    def __init__(
        self,
        work: StepWork,
        stepping: Stepping,
        clock: PhaseClock,
        losses: LossReader,
        put: Callable[[Event], None],
        gc_every_steps: int = 0,
    ) -> None:
        self.clock, self.losses, self.put = clock, losses, put
        self.windowed: Callable[[Window, WindowEvent], WindowEvent] = lambda _window, event: event
        self.steps = self.passes = 0
        self.paced: Callable[[int], None] = lambda step_ns: None
        self.profiled = False
        self.arrived: list[tuple[int, float]] = []
        self.garbage = Garbage()
        self._gc_every_steps = gc_every_steps
        self._work, self._stepping = work, stepping
        self._watch: TrainerWatch | None = None
        # Of this process, also after the end.
        self.children = Children()
        self._compilations, self._heap = Compilations(), Heap()
        self._finite, self._skipped = Finite(), 0
        self._made = 0  # items at the end of the last window
        self._has_gpu = losses.device.type == "cuda"
        self._told_failure = False

    def begin(self, step: Callable[[], int], paused: Callable[[], bool]) -> None:
        """Training begins on this thread; what was measured and compiled earlier belongs to no window.

        step: returns the optimizer steps done. paused: returns whether the run is paused.
        """
        self.garbage.begin()
        self.garbage.schedule(self._gc_every_steps)
        self._watch = TrainerWatch(TrainingThread(self.clock, step), self.put, paused)
        self.children = self._watch.children
        self._watch.start()
        self._compilations.take()
        self.skip()

    def switch(self, gc_every_steps: int) -> None:
        """Continue with another setting, between two steps."""
        self.garbage.schedule(gc_every_steps)

    def end(self) -> None:
        """Stop measuring; call it however the loop ended."""
        self.garbage.end()
        if self._watch is not None:
            self._watch.stop()
            # It refers to the loop: in a reference cycle with it, the loader's workers would outlive the run.
            self._watch = None

    def skip(self) -> None:
        """Drop the time since the last phase change (a pause). Call with an empty window."""
        self.clock.skip()
        self.garbage.take()

    def window(self, step: int) -> None:
        """Record the time since the last window; `step` optimizer steps are done."""
        work, window = self._work, self.clock.take()
        if not window.wall_ns:
            return
        pauses = self.garbage.take()
        steps, self.steps = self.steps, 0
        passes, self.passes = self.passes, 0
        arrived, self.arrived = self.arrived, []
        items = steps * work.items
        if work.made is not None:
            made = work.made()
            items, self._made = made - self._made, made
        epoch, epoch_step = divmod(step, work.steps_per_epoch) if work.place is None else work.place()
        extras = self.losses.extras
        for place, loss in arrived:
            self._finite.read(place, loss)
        skipped, self._skipped = int(extras.get("skipped", 0)) - self._skipped, int(extras.get("skipped", 0))
        event = WindowEvent(
            step=step,
            epoch=epoch,
            epoch_step=epoch_step,
            steps=steps,
            micro_steps=steps * work.micro_steps,
            items=items,
            tokens=round(items * work.tokens_per_item),
            **window.figures(),
            loss=sum(value for _, value in arrived) / len(arrived) if arrived else None,
            last_loss=arrived[-1] if arrived else None,
            lr=self._stepping.lr,
            grad_norm=extras.get("grad_norm"),
            loss_scale=extras.get("loss_scale"),
            skipped=skipped,
            bad_loss=self._finite.loss,
            gc_ns=pauses.ns,
            gc_count=pauses.number,
            gc_max_ns=pauses.longest_ns,
            profiled=self.profiled,
            heap_bytes=self._heap.read(),
            kept_steps=self._stepping.kept_steps,
            passes=passes,
        )
        self.put(self.windowed(window, event))
        if not self.profiled:
            self.paced(event.step_p50_ns or 0)
        if self.losses.scalars:
            self.put(ScalarsEvent(step, _means(self.losses.scalars)))
            self.losses.scalars = []
        for report in self._stepping.reports:
            self.put(report)
        self._stepping.reports.clear()
        for kind, text, data in self._compilations.take():
            self.put(MarkEvent(kind, step, printable(text), data))
        if self.clock.failed and not self._told_failure:
            self._told_failure = True
            text = f"steps are not timed on the GPU: {printable(self.clock.failed)}"
            self.put(MarkEvent("warning", step, text))
        if self._has_gpu:
            try:
                self.put(MemoryEvent(**allocator(self.losses.device)))
            except (RuntimeError, KeyError) as error:
                self._has_gpu = False
                text = f"cannot read the memory counters: {printable(str(error))}"
                self.put(MarkEvent("warning", step, text))


def _means(scalars: list[tuple[str, float]]) -> dict[str, float]:
    """The mean of the values of each name."""
    values: dict[str, list[float]] = {}
    for name, value in scalars:
        values.setdefault(name, []).append(value)
    return {name: sum(found) / len(found) for name, found in values.items()}


class TrainingThread:
    """This process and the thread that trains in it, as a watch sees them. step: returns the optimizer steps done."""

    name = "trainer"

    def __init__(self, clock: PhaseClock, step: Callable[[], int]) -> None:
        self.pid, self.thread, self._identity = os.getpid(), threading.get_native_id(), threading.get_ident()
        self._clock, self._step = clock, step

    @property
    def phase(self) -> str:
        """The current phase."""
        return self._clock.current

    @property
    def progress(self) -> tuple[int, ...]:
        """Changes with every step and phase; begins with the time of the last one."""
        return self._clock.changed_ns, self._step()

    @property
    def steps(self) -> int:
        """Optimizer steps done."""
        return self._step()

    def stack(self) -> list[Frame]:
        """The stack of the thread, the innermost frame first."""
        return of_thread(self._identity)

    def others(self) -> frozenset[int]:
        """Threads of this process that have no part in the training: the screen's and those of the engine."""
        names = (thread for thread in threading.enumerate() if thread.name.startswith(("ndd-", "MainThread")))
        return frozenset(thread.native_id for thread in names if thread.native_id) - {self.thread}


class TrainerWatch:
    """Watches this process and its loader workers from a thread. paused: whether to rest."""

    def __init__(
        self, trainer: TrainingThread, put: Callable[[Event], None], paused: Callable[[], bool]
    ) -> None:
        self._trainer, self._put, self._paused = trainer, put, paused
        self._watch = ProcessWatch(lambda _: trainer.stack(), trainer.others)
        self.children = self._watch.children
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._work, name="ndd-watch", daemon=True)

    def start(self) -> None:
        """Start watching."""
        self._thread.start()

    def stop(self) -> None:
        """Stop watching; safe to call twice."""
        self._stopping.set()
        self._thread.join(2.0)
        self._watch.close()

    def look(self) -> None:
        """Record what is new. Never raises."""
        with suppress(Exception):
            for event in self._watch.look([] if self._paused() else [self._trainer]):
                self._put(event)

    def _work(self) -> None:
        while not self._stopping.wait(PERIOD_S):
            self.look()
