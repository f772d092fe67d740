"""Decides when profiler captures start and end, and records them. Nothing here raises into the training."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from ndd_engine.errors import message_of, text_of
from ndd_engine.record.events import KernelsEvent, MarkEvent
from ndd_engine.record.figures import capture_text
from ndd_engine.text import printable

from . import clock as phase
from .capture import ProfilerCapture
from .modules import runs_compiled
from .reporting import Reporter

NEVER = sys.maxsize
# With a trace file and no period there is one capture, after this many steps or before the run ends.
FIRST_TRACE = 10
# A capture of long steps ends after this much measured time.
LONG_NS = 10_000_000_000


@dataclass(frozen=True)
class CapturePlan:
    """When to capture. every_steps: 0 for only on request. steps: optimizer steps of one capture.

    trace: file for the newest capture as a Chrome trace. cuda_graphs: the steps may replay CUDA graphs.
    """

    every_steps: int = 0
    steps: int = 5
    trace: Path | None = None
    cuda_graphs: bool = False


class CaptureSchedule:
    """Captures every `plan.every_steps` steps and on request, and records them through the reporter.

    next: call `look` once this step is done. The loop compares one number a step and does nothing else.
    settled: returns False while the way the steps run may still change (a CUDA graph is not captured yet). model: to
    attribute the time to its modules, if the steps call them.
    """

    def __init__(
        self,
        reporter: Reporter,
        plan: CapturePlan,
        settled: Callable[[], bool] = lambda: True,
        model: nn.Module | None = None,
    ) -> None:
        self.next = NEVER
        self._settled, self._reporter = settled, reporter
        self._clock, self._put = reporter.clock, reporter.put
        self._every, self._steps = plan.every_steps, plan.steps
        self.trace, self._graphs = plan.trace, plan.cuda_graphs
        self._recording: ProfilerCapture | None = None
        self._model = None if model is None or runs_compiled(model) else model

    def begin(self, step: int, total_steps: int) -> None:
        """Training begins at `step` optimizer steps."""
        self._schedule(step)
        if self.next == NEVER and self.trace is not None:
            self.next = max(min(step + FIRST_TRACE, total_steps - 1 - self._steps), step + 1)

    def ask(self, step: int) -> None:
        """Request a capture as soon as possible."""
        self.next = min(self.next, step)

    def look(self, step: int, room: int) -> None:
        """Start, continue or end a capture after a step.

        room: steps left before an evaluation or a checkpoint, which stay out of captures. At 0 it happens now, and
        `look` is called again afterwards.
        """
        recording = self._recording
        if recording is None:
            if not self._settled():
                self.next = step + 1
            elif room > 0:
                self._start(step, warm=room > 1)
            return
        if recording.begin_ns is None:
            recording.begin()
        else:
            recording.measured += 1
        if room < 1 or recording.measured >= self._steps or recording.measured_ns >= LONG_NS:
            self.finish(step)

    def finish(self, step: int) -> None:
        """End the current capture, if any, with the steps it has."""
        recording = self._recording
        if recording is None:
            return
        self._schedule(step)
        try:
            if recording.measured:
                self._tell(recording, recording.end(step))
            else:
                self.next = step + 1  # interrupted before its first step: try again
        except Exception as error:  # noqa: BLE001  the run continues without the profiler
            self._give_up(step, error)
        self._drop(step)

    def close(self) -> None:
        """Drop the current capture, if any: an error may leave the loop in the middle of one."""
        recording, self._recording = self._recording, None
        if recording is not None:
            with contextlib.suppress(Exception):
                recording.stop()

    def _start(self, step: int, warm: bool) -> None:
        """warm: record one step first that is left out."""
        self._reporter.window(step)
        self._reporter.profiled = True
        self._clock.enter(phase.LOG)
        try:
            device = self._reporter.losses.device
            self._recording = ProfilerCapture(
                device, self._clock, self.trace is not None, self._graphs, self._model
            )
            self._recording.start()
            if not warm:
                self._recording.begin()
        except Exception as error:  # noqa: BLE001  as above
            self._give_up(step, error)
            self._drop(step)
        else:
            self.next = step  # look after every step while capturing

    def _drop(self, step: int) -> None:
        self.close()
        self._reporter.window(step)
        self._reporter.profiled = False

    def _schedule(self, step: int) -> None:
        self.next = (step // self._every + 1) * self._every if self._every else NEVER

    def _give_up(self, step: int, error: Exception) -> None:
        """Stop capturing periodically: it would fail again. A request still tries."""
        self._every, self.next = 0, NEVER
        self._put(MarkEvent("warning", step, f"the profiler capture failed: {_first_line(error)}"))

    def _tell(self, recording: ProfilerCapture, event: KernelsEvent) -> None:
        if self.trace is not None:
            try:
                recording.export(self.trace)
                event = replace(event, trace=str(self.trace))
            except (OSError, RuntimeError) as error:
                text = f"cannot write the trace to {printable(str(self.trace))}: {_first_line(error)}"
                self._put(MarkEvent("warning", event.step, text))
        self._put(event)
        self._put(MarkEvent("note", event.step, capture_text(event)))


def _first_line(error: Exception) -> str:
    """The first line of an error message, printable."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return message_of(error) if text_of(error) else type(error).__name__
