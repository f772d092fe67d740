"""Writes scalars for TensorBoard on a thread of its own, so that neither training nor the screen waits for it."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import math
import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ndd_engine.record.derive import idle, memory_bytes, phase_shares
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
from ndd_engine.record.recorder import Listener
from ndd_engine.text import printable

FOLDER = "tensorboard"
MISSING = "needs the package tensorboard: pip install 'ndd-console[tensorboard]', or set it to false"
# Seconds until a scalar is flushed to the file.
FLUSH_S = 15
# Events that may wait for the file system; later ones are dropped.
MOST_WAITING = 10_000
_ALLOCATOR = ("allocated_bytes", "reserved_bytes", "peak_allocated_bytes", "free_bytes")


# Creates a torch.utils.tensorboard.SummaryWriter from (folder, first step that is repeated, or None).
Open = Callable[[Path, int | None], Any]


def available() -> bool:
    """Whether the package is installed; does not import it."""
    return importlib.util.find_spec("tensorboard") is not None


def summary_writer(folder: Path, purge_step: int | None) -> Any:
    """Create torch's writer. Raises whatever a broken installation or a full disk raises."""
    module = importlib.import_module("torch.utils.tensorboard")
    return module.SummaryWriter(str(folder), purge_step=purge_step, flush_secs=FLUSH_S)


class Scalars:
    """A listener. The first failure is reported through `put` and ends writing.

    Call `prepare` before training: importing the packages takes seconds. Nothing is written before it.
    """

    def __init__(self, folder: Path, put: Callable[[Event], None], opener: Open = summary_writer) -> None:
        self._folder = folder
        self._put = put
        self._open = opener
        self._ready = False
        self._failed = False
        self._writer: Any = None
        self._run: RunEvent | None = None
        self._sample: SampleEvent | None = None
        self._step = 0

    def prepare(self) -> None:
        """Import the packages; call it after torch is imported. Never raises an Exception."""
        try:
            if self._open is summary_writer:
                importlib.import_module("torch.utils.tensorboard")
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
            # Steps after the checkpoint are repeated: viewers drop what an earlier process wrote for them.
            again = None if event.resumed_step is None else event.resumed_step + 1
            self._writer = self._open(self._folder, again)
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
            self.close()

    def close(self) -> None:
        """Flush and close; safe to call twice."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.flush()
            writer.close()

    def _add(self, t: float, step: int, values: Iterator[tuple[str, float | None]]) -> None:
        if self._writer is None:
            return
        for tag, value in values:
            if value is not None and math.isfinite(value):
                self._writer.add_scalar(tag, float(value), step, t)

    def _fail(self, error: Exception) -> None:
        self._failed = True
        with contextlib.suppress(Exception):
            self.close()
        first = printable((str(error).splitlines() or [""])[0])
        text = f"writing TensorBoard scalars failed and stops: {type(error).__name__}: {first}; training continues"
        self._put(MarkEvent("warning", self._step, text))


class Aside:
    """Calls a listener on a thread of its own: TensorBoard's queue is short, and its file system may hang."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._queue: queue.SimpleQueue[tuple[float, Event] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="ndd-scalars", daemon=True)
        self._thread.start()

    def __call__(self, t: float, event: Event) -> None:
        # If the thread hangs, nothing but the run's end limits the queue: drop what a viewer would miss least.
        if self._queue.qsize() < MOST_WAITING or isinstance(event, EndEvent):
            self._queue.put((t, event))

    def close(self, timeout_s: float = 5.0) -> None:
        """Handle the events that wait and end the thread; gives up after the timeout. Safe to call twice."""
        self._queue.put(None)
        self._thread.join(timeout_s)

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            self._listener(*item)


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
    gpu = event.card or {}
    for key in ("util_percent", "memory_free_bytes", "temperature_c", "power_w"):
        yield f"card/{key}", gpu.get(key)


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
