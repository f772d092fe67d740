"""Profiles a few whole optimizer steps with torch.profiler while they train.

One warm-up step is recorded first and left out: the profiler is still starting, and on a GPU the queue is empty.
"""

from __future__ import annotations

import gzip
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from ndd_engine.files import PATIENCE_S, folder_for_parts, replacing
from ndd_engine.record.events import KernelsEvent
from ndd_watch.own import own, short
from ndd_watch.phases import ANCHOR

from . import clock as phase
from .captured import Noted, captured
from .clock import PhaseClock
from .modules import ModuleWatch
from .timeline import TraceEvent

_ANCHORS = 5  # at each end; the one with the smallest delay is used


class ProfilerCapture:
    """One capture, made on the training thread. Its methods raise whatever the profiler raises.

    measured: whole steps since `begin`, counted by the caller. ranges: also mark the phases in the trace.
    graphs: CUDA graphs may be replayed. model: to attribute the time to its modules; None for compiled code and CUDA
    graphs, which call no modules.
    """

    def __init__(
        self,
        device: torch.device,
        clock: PhaseClock,
        ranges: bool = False,
        graphs: bool = False,
        model: nn.Module | None = None,
    ) -> None:
        self.on_gpu = device.type == "cuda"
        self._device = device.index or 0
        self.measured = 0
        self.begin_ns: int | None = None
        self._clock = clock
        self._marks: list[tuple[int, int]] = []
        self._anchors: list[int] = []
        self._ranges = ranges
        self._range: Any = None
        self._running = False
        self._modules = ModuleWatch(model, clock.now, own) if model is not None else None
        # Kineto writes its messages straight to the terminal, where nothing can capture them.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        if graphs:
            # A graph replay fails if CUPTI was torn down and started again.
            os.environ.setdefault("TEARDOWN_CUPTI", "0")
        on = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if self.on_gpu else [ProfilerActivity.CPU]
        self._profile = profile(activities=on)

    def start(self) -> None:
        """Start the profiler."""
        self._running = True
        if self._modules is not None:
            self._modules.start()
        self._profile.start()
        self._anchor()
        self._clock.listener = self._mark
        self._clock.enter(phase.OTHER)

    def begin(self) -> None:
        """Start measuring; call it between two steps."""
        self._clock.enter(phase.OTHER)
        self.begin_ns = self._marks[-1][0]

    @property
    def measured_ns(self) -> int:
        """Nanoseconds from `begin` to the last phase change."""
        return self._marks[-1][0] - self.begin_ns if self.begin_ns is not None else 0

    def end(self, step: int) -> KernelsEvent:
        """Stop the profiler and return what it recorded since `begin`, after `step` optimizer steps.

        Raises ValueError if the profiler recorded nothing, RuntimeError if its clock cannot be aligned with ours.
        """
        assert self.begin_ns is not None
        self._clock.enter(phase.LOG)
        end_ns = self._marks[-1][0]
        self._anchor()
        self.stop()
        names, watch = self._clock.names, self._modules
        noted = Noted(
            self.begin_ns, end_ns, self._anchors, [(time, names[index]) for time, index in self._marks],
            self._device if self.on_gpu else None,
        )  # fmt: skip
        if watch is not None:
            lines = [(short(file), line, name) for file, line, name in watch.lines]
            noted = replace(noted, names=watch.names, lines=lines, calls=watch.calls)
        return captured(self._trace_events(), noted, step, self.measured)

    def stop(self) -> None:
        """Stop the profiler, and detach from the clock and the model; safe to call twice."""
        self._clock.listener = None
        if self._modules is not None:
            self._modules.stop()
        self._leave_range()
        if self._running:
            self._running = False
            self._profile.stop()

    def export(self, path: Path) -> None:
        """Write the capture as a Chrome trace, gzipped if the name ends in .gz. Raises OSError."""
        with tempfile.TemporaryDirectory(prefix=".trace-", dir=folder_for_parts(path)) as folder:
            made = Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(made))
            if not made.exists() or not made.stat().st_size:
                raise OSError("the profiler wrote nothing")
            with made.open("rb") as plain, replacing(path, PATIENCE_S) as file:
                if path.suffix != ".gz":
                    shutil.copyfileobj(plain, file)
                    return
                with gzip.open(file, "wb", compresslevel=5) as packed:
                    shutil.copyfileobj(plain, packed)

    def _mark(self, now: int, index: int) -> None:
        """Called by the clock when phase `index` begins."""
        self._marks.append((now, index))
        if self._ranges:
            try:
                self._leave_range()
                self._range = record_function(f"ndd: {self._clock.names[index]}")
                self._range.__enter__()
            except Exception:  # noqa: BLE001  called within a step, and only for names in the trace
                self._ranges, self._range = False, None

    def _leave_range(self) -> None:
        if self._range is not None:
            left, self._range = self._range, None
            left.__exit__(None, None, None)

    def _anchor(self) -> None:
        """Record ranges at known times of our clock, to align the profiler's clock with it."""
        for _ in range(_ANCHORS):
            anchor = record_function(ANCHOR)
            self._anchors.append(self._clock.now())
            with anchor:
                pass

    def _trace_events(self) -> list[TraceEvent]:
        results = self._profile.profiler.kineto_results  # type: ignore[union-attr]
        if results is None:
            raise RuntimeError("the profiler kept no events")
        return [
            TraceEvent(
                name=event.name(),
                begin=event.start_ns(),
                end=event.start_ns() + event.duration_ns(),
                thread=event.start_thread_id(),
                on_gpu=event.device_type() != torch.profiler.DeviceType.CPU,
                annotation=event.is_user_annotation(),
                device=event.device_index(),
                correlation=event.correlation_id(),
                sequence=event.sequence_nr(),
                forward_thread=event.fwd_thread_id(),
            )
            for event in results.events()
        ]
