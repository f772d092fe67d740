"""The scalars of a run, for the loggers: what its events say, by name, and how they are handed over.

A `Scalars` turns events into named values and gives them to a sink: TensorBoard's files, or the process of another
logger. `Aside` calls it on a thread of its own, so that neither training nor the screen waits for a logger.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Protocol

from ndd_engine.errors import said
from ndd_engine.record.events import (
    EndEvent,
    Event,
    MarkEvent,
    MemoryEvent,
    RunEvent,
    SampleEvent,
    ScalarsEvent,
    WindowEvent,
)
from ndd_engine.record.figures import idle, memory_bytes, phase_shares
from ndd_engine.record.file import Listener

# Events that may wait for a logger; later ones are dropped.
MOST_WAITING = 10_000
_ALLOCATOR = ("allocated_bytes", "reserved_bytes", "peak_allocated_bytes", "free_bytes")


class LoggerError(Exception):
    """A logger failed; the message says all of it."""


class Sink(Protocol):
    """Where scalars go. Each method may raise anything, which ends this logger and not the run.

    name: of the logger, for messages.
    """

    name: str

    def prepare(self) -> None:
        """Import what takes seconds. Called on the training thread, before training."""

    def open(self, run: RunEvent) -> None:
        """Begin a run, or continue it if `run.resumed_step` is set: steps after that one are repeated."""

    def add(self, t: float, step: int, values: dict[str, float]) -> None:
        """Write finite values of a step. t: Unix time in seconds."""

    def close(self, status: str | None) -> None:
        """Finish. status: of the run, such as "done"; None if it is not known. Called at most once after `open`."""

    def abandon(self) -> None:
        """End at once what `add` or `close` waits for, from another thread. Never raises."""


class Scalars:
    """A listener. The first failure is reported through `put` and ends writing.

    Call `prepare` before training. Nothing is written before it.
    """

    def __init__(self, sink: Sink, put: Callable[[Event], None]) -> None:
        self.sink = sink
        self._put = put
        self._ready = False
        self._failed = False
        self._open = False
        self._run: RunEvent | None = None
        self._sample: SampleEvent | None = None
        self._step = 0

    def prepare(self) -> None:
        """Prepare the sink; call it after torch is imported. Never raises an Exception."""
        try:
            self.sink.prepare()
            self._ready = True
        except Exception as error:  # noqa: BLE001  a broken installation must not prevent training
            self._fail(error)

    def __call__(self, t: float, event: Event) -> None:
        """Handle one recorded event."""
        if not self._ready or self._failed:
            return
        try:
            self._take(t, event)
        except Exception as error:  # noqa: BLE001  writing scalars must never disturb the run
            self._fail(error)

    def _take(self, t: float, event: Event) -> None:
        if isinstance(event, RunEvent):
            self._run = event
            self._step = event.resumed_step or 0
            self._open = True
            self.sink.open(event)
        elif isinstance(event, SampleEvent):
            self._sample = event
            self._add(t, self._step, _sampled(self._run, event))
        elif isinstance(event, WindowEvent):
            self._step = event.step
            if not event.profiled:
                self._add(t, event.step, _window(self._run, event, self._sample))
        elif isinstance(event, ScalarsEvent):
            self._add(t, event.step, ((f"own/{name}", value) for name, value in event.values.items()))
        elif isinstance(event, MemoryEvent):
            self._add(t, self._step, ((f"memory/{name}", getattr(event, name)) for name in _ALLOCATOR))
        elif isinstance(event, MarkEvent) and event.kind == "evaluation":
            metrics = event.data.get("metrics") or {}
            self._add(t, event.step, ((f"evaluation/{name}", value) for name, value in metrics.items()))
        elif isinstance(event, EndEvent):
            self.close(event.status)

    def close(self, status: str | None = None) -> None:
        """Finish the sink; safe to call twice."""
        if self._open:
            self._open = False
            self.sink.close(status)

    def _add(self, t: float, step: int, values: Iterator[tuple[str, float | None]]) -> None:
        if not self._open:
            return
        found = {tag: float(value) for tag, value in values if value is not None and math.isfinite(value)}
        if found:
            self.sink.add(t, step, found)

    def _fail(self, error: Exception) -> None:
        self._failed = True
        with contextlib.suppress(Exception):
            self.close()
        why = str(error) if isinstance(error, LoggerError) else said(error)
        text = f"writing to {self.sink.name} failed and stops: {why}; training continues"
        self._put(MarkEvent("warning", self._step, text))


class Aside:
    """Calls a listener on a thread of its own: a logger may be slow, and its file system or server may hang."""

    def __init__(self, scalars: Scalars) -> None:
        self._scalars = scalars
        self._queue: queue.SimpleQueue[tuple[float, Event] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="ndd-scalars", daemon=True)
        self._thread.start()

    def __call__(self, t: float, event: Event) -> None:
        # If the thread hangs, nothing but the run's end limits the queue: drop what a viewer would miss least.
        if self._queue.qsize() < MOST_WAITING or isinstance(event, EndEvent):
            self._queue.put((t, event))

    def finish(self) -> None:
        """Let the thread end after the events that wait."""
        self._queue.put(None)

    def close(self, timeout_s: float = 5.0) -> None:
        """Handle the events that wait and end the thread; gives up after the timeout. Safe to call twice."""
        self.finish()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._scalars.sink.abandon()
            self._thread.join(1.0)

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            self._scalars(*item)


def _window(
    run: RunEvent | None, event: WindowEvent, sample: SampleEvent | None
) -> Iterator[tuple[str, float | None]]:
    for name in ("loss", "lr", "grad_norm", "loss_scale"):
        yield f"train/{name}", getattr(event, name)
    if not event.steps or not event.wall_ns:
        return
    aside = sum(event.phases.get(name, {}).get("host_ns", 0) for name in ("evaluate", "checkpoint"))
    if event.wall_ns > aside:
        yield "speed/items_per_s", event.items / ((event.wall_ns - aside) * 1e-9)
        yield "speed/step_ms", (event.wall_ns - aside) * 1e-6 / event.steps
    for name, figures in event.phases.items():
        yield f"phase_ms/{name}", figures["host_ns"] * 1e-6 / event.steps
    yield "idle/share", idle(run, [event], phase_shares([event]), sample).share


def _sampled(run: RunEvent | None, event: SampleEvent) -> Iterator[tuple[str, float | None]]:
    yield "memory/resident_bytes", memory_bytes(run, event)
    gpu = event.gpu or {}
    for key in ("util_percent", "memory_free_bytes", "temperature_c", "power_w"):
        yield f"gpu/{key}", gpu.get(key)


def both(first: Listener | None, second: Listener | None) -> Listener | None:
    """Combine two listeners; the second receives every event even if the first fails."""
    if first is None or second is None:
        return first or second

    def tell(t: float, event: Event) -> None:
        try:
            first(t, event)
        finally:
            second(t, event)

    return tell
