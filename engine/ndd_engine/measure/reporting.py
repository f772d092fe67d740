"""Turns measurements into events while a loop trains: windows, memory, recompilations, collections, stalls."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from ndd_engine.record.events import Event, MarkEvent, MemoryEvent, ScalarsEvent, WindowEvent
from ndd_engine.record.figures import stalled_text
from ndd_engine.text import printable
from ndd_watch.compilers import Compilations
from ndd_watch.finite import Finite
from ndd_watch.garbage import Garbage
from ndd_watch.own import innermost, own, short
from ndd_watch.process import Heap, allocator

from .losses import LossReader
from .phase_clock import PhaseClock, Window

# Without a phase change for so long, a loop is reported as stalled; again whenever the time has doubled.
STALLED_S = 30.0
PERIOD_S = 1.0


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
        self._stalls: StallWatch | None = None
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
        self._stalls = StallWatch(threading.get_ident(), self.clock, self.put, step, paused)
        self._stalls.start()
        self._compilations.take()
        self.skip()

    def switch(self, gc_every_steps: int) -> None:
        """Continue with another setting, between two steps."""
        self.garbage.schedule(gc_every_steps)

    def end(self) -> None:
        """Stop measuring; call it however the loop ended."""
        self.garbage.end()
        if self._stalls is not None:
            self._stalls.stop()
            # It refers to the loop: in a reference cycle with it, the loader's workers would outlive the run.
            self._stalls = None

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


class StallWatch:
    """Watches a thread's phases from another one. step: returns the optimizer steps done; paused: whether to rest."""

    def __init__(
        self, thread: int, clock: PhaseClock, put: Callable[[Event], None], step: Callable[[], int],
        paused: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._watched, self._clock, self._put, self._step, self._paused = thread, clock, put, step, paused
        self._next_s = STALLED_S
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._work, name="ndd-stalls", daemon=True)

    def start(self) -> None:
        """Start watching."""
        self._thread.start()

    def stop(self) -> None:
        """Stop watching; safe to call twice."""
        self._stopping.set()
        self._thread.join(2.0)

    def look(self) -> None:
        """Report a stall, if there is one. Never raises."""
        with suppress(Exception):
            seconds = self._clock.unchanged_ns * 1e-9
            if seconds < STALLED_S or self._paused():
                self._next_s = STALLED_S
            elif seconds >= self._next_s:
                self._next_s = 2 * seconds
                text = stalled_text(seconds, self._clock.current, self._place())
                self._put(MarkEvent("warning", self._step(), text))

    def _place(self) -> tuple[str, int, str] | None:
        """The line in the user's own code, or that of a library if there is none."""
        found = innermost(self._watched, own) or innermost(self._watched, lambda code: True)
        return None if found is None else (short(found[0]), *found[1:])

    def _work(self) -> None:
        while not self._stopping.wait(PERIOD_S):
            self.look()
