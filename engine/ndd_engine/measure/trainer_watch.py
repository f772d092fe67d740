"""Watches the thread that prepares and trains a run of this process, and the loader workers: a hang is told."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Self

from ndd_engine.errors import said
from ndd_engine.record.event import OVER
from ndd_engine.record.events import Event, MarkEvent, StageEvent, StallEvent
from ndd_engine.text import printable
from ndd_watch.clock import PhaseClock

from .process_watch import ProcessWatch
from .stalls import Frame, of_thread
from .worker_watch import WorkerWatch

# Seconds from one look to the next.
PERIOD_S = 0.5


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
    """Watches this process and its loader workers from a thread. paused: whether to rest. workers: their folder."""

    def __init__(
        self,
        trainer: TrainingThread,
        put: Callable[[Event], None],
        paused: Callable[[], bool],
        workers: Path | None = None,
    ) -> None:
        self._trainer, self._put, self._paused = trainer, put, paused
        told = None if workers is None else WorkerWatch(workers)
        self._watch = ProcessWatch(lambda _: trainer.stack(), trainer.others, workers=told)
        self.children = self._watch.children
        self._failed = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._work, name="ndd-watch", daemon=True)

    def start(self) -> None:
        """Start watching."""
        self._thread.start()

    def stop(self) -> None:
        """Stop watching; safe to call twice."""
        self._stopping.set()
        self._thread.join(2.0)
        self._record(lambda: self._watch.finish(self._trainer.steps))
        self._watch.close()

    def look(self) -> None:
        """Record what is new. Never raises."""
        self._record(lambda: self._watch.look([] if self._paused() else [self._trainer]))

    def _record(self, found: Callable[[], Iterable[Event]]) -> None:
        """Record these events. If that fails, say so once: hangs would not be told."""
        try:
            for event in found():
                self._put(event)
        except Exception as error:  # noqa: BLE001  the run continues without it
            if not self._failed:
                self._failed = True
                text = f"hangs and loader workers may not be told: {printable(said(error))}"
                with suppress(Exception):
                    self._put(MarkEvent("note", self._trainer.steps, text))

    def _work(self) -> None:
        while not self._stopping.wait(PERIOD_S):
            self.look()


class PreparingThread(TrainingThread):
    """The calling thread while it prepares a run: what it does is told by its processor time only."""

    phase, progress, steps = "the preparation", (), 0

    def __init__(self) -> None:
        super().__init__(PhaseClock(), lambda: 0)


class PreparationWatch:
    """Within a `with` block, tells what hangs before the first step: data, a model, a worker that does not answer.

    put: records an event, and hears of the stages of the preparation. ranked: it waits for other ranks, too, which may
    take longer.
    """

    def __init__(
        self, put: Callable[[Event], None], paused: Callable[[], bool], ranked: bool = False
    ) -> None:
        self._put, self._told = put, False
        self._no_hangs = ("computing", *(("waits", "ranks", "collective") if ranked else ()))
        self._watch = TrainerWatch(PreparingThread(), self._hang, paused)

    def __enter__(self) -> Self:
        self._watch.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._watch.stop()
        if kind is None:  # otherwise the hang is how the run has ended
            self._continues()

    def put(self, event: Event) -> None:
        """Record an event of the preparation, or of the run after it."""
        if isinstance(event, StageEvent):
            self._continues()
        self._put(event)

    def _hang(self, event: Event) -> None:
        # A preparation that computes may take long. Children and files are those of its measurements.
        if isinstance(event, StallEvent) and event.kind not in self._no_hangs:
            self._told = True
            self._put(event)
        elif isinstance(event, MarkEvent):
            self._put(event)

    def _continues(self) -> None:
        if self._told:
            self._told = False
            self._put(StallEvent(0, 0.0, OVER, "the preparation continues"))
