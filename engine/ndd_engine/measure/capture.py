"""Profiles steps while they train: which functions take the time, and, on request, what torch's profiler sees.

Python's profiler sees every call, and slows a step down. A step that it profiles is therefore a window of its own,
marked as profiled, so that it is part of no statistics. A capture with torch.profiler takes a few whole optimizer
steps, on request or every so many steps. Nothing here raises into the training.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import get_ident
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import record_function

from ndd_engine.errors import message_of, said, text_of
from ndd_engine.files import PATIENCE_S, folder_for_parts, replacing
from ndd_engine.hardware.gpus import match
from ndd_engine.record.events import PHASES, FunctionsEvent, KernelsEvent, MarkEvent
from ndd_engine.record.figures import capture_text
from ndd_engine.text import printable
from ndd_watch import clock as phase
from ndd_watch.captures import EVERY_NS, FEW_NS, FIRST_NS, MOST_STEP_NS, Capture, has_room
from ndd_watch.clock import NEVER, PhaseClock
from ndd_watch.collecting import Collecting
from ndd_watch.looks import Looks, own, product, short
from ndd_watch.profiler import ANOTHER, Allowance, Asides, StepProfiler
from ndd_watch.slowing import Sizes, Slowing

from .close_looks import CloseLooks
from .module_times import Noted, captured, runs_compiled
from .reporting import Reporter
from .timeline import TraceEvent

# The first profiled step comes after so many seconds and steps: the first steps allocate and compile.
FIRST_S, FIRST_STEPS = 2.0, 5
# Steps from one profiled step to the next, at least: long steps would leave few for the statistics.
BETWEEN_STEPS = 10


class FunctionProfiles:
    """Profiles a step every `every_s` seconds, and when steps have become slower; 0: none.

    It is recorded through the reporter. due_ns: call `begin` before a step that starts at or after this time of the
    reporter's clock. settled: returns False while the way the steps run may still change (a CUDA graph is not captured
    yet). counted: counts what may grow in the model and its optimizers. looks: what is done without need. allowance: of
    these and other closer looks. captures: hears of windows that end, too.
    """

    def __init__(
        self,
        reporter: Reporter,
        every_s: float,
        settled: Callable[[], bool] = lambda: True,
        counted: Callable[[Sizes], None] = lambda sizes: None,
        looks: CloseLooks | None = None,
        allowance: Allowance | None = None,
        captures: Callable[[int], None] = lambda step_ns: None,
    ) -> None:
        self.due_ns = NEVER
        self._allowance, self._captures, self._usual_ns = allowance, captures, 0
        self._counted, self._slowing, self._looks = counted, Slowing(), looks
        reporter.paced = self._paced
        self._reporter, self._clock, self._settled = reporter, reporter.clock, settled
        self._every_ns = round(every_s * 1e9)
        self._profiler = StepProfiler(own, product())
        self._next_step = self._begun = 0
        # Whether the present step is profiled.
        self.active = False
        self._reported = False
        # The phase of which functions are being assigned.
        self._phase = ""
        self._asides = Asides(self._begin_aside, self._end_aside, self._put_aside)
        self._step = 0
        self._sizes = Sizes(Looks(torch))

    def start(self, step: int) -> None:
        """Training begins at `step` optimizer steps."""
        if self._every_ns:
            self._next_step = step + FIRST_STEPS
            self.due_ns = self._clock.now() + min(round(FIRST_S * 1e9), self._every_ns)

    def begin(self, step: int) -> None:
        """Profile the step that begins, unless it is too early or another profiler is active."""
        if step < self._next_step or not self._settled():
            return
        self._reporter.window(step)
        self._reporter.profiled = self.active = True
        self._begun = self._clock.now()
        self._sizes = Sizes(Looks(torch))
        try:
            reason = self._profiler.begin()
            if not reason:
                if self._looks is not None:
                    self._looks.begin()
                self._phase = self._clock.current.partition("/")[0]
                self._clock.gpu.listen(self)
        except Exception as error:  # noqa: BLE001  the run continues without it
            reason = said(error)
        if reason:
            self._skip(step, reason)

    def end(self, step: int) -> None:
        """Record the profiled step after its end."""
        try:
            if self._looks is not None:
                self._profiler.leave_out(self._looks.spent_ns)
            self._profiler.mark(self._phase)
            found = self._profiler.end()
        except Exception as error:  # noqa: BLE001
            self._skip(step, said(error))
            return
        if self._allowance is not None and self._usual_ns:
            self._allowance.add(self._clock.now() - self._begun - self._usual_ns)
        self._close_window(step)
        if not found["wall_ns"]:
            self._tell(_functions_of(step), step, "another profiler began within the profiled step")
            return
        functions, waits = _short(found["functions"]), _short(found["waits"])
        seen = self._seen(step)
        sizes = self._sizes
        self._counted(sizes)
        sizes.handlers()
        self._reporter.put(
            FunctionsEvent(
                step,
                found["wall_ns"],
                functions,
                waits,
                found["phases"],
                calls=_short(found["calls"]),
                sizes=sizes.counts(),
                denormals=sizes.denormals,
                **seen,
            )
        )

    @contextmanager
    def outside_steps(self, phase: int, step: int) -> Iterator[None]:
        """An evaluation or a checkpoint; once in a while, one is profiled, or its end."""
        self._step = step
        if not self._every_ns:
            yield
            return
        self._asides.begins(phase)
        try:
            yield
        finally:
            self._asides.ends(phase)
            self._asides.settle(False)

    def collect(self, collecting: Collecting) -> None:
        """Have it look at what evaluations keep."""
        self._asides.collecting = collecting

    def evaluation_goes_on(self) -> None:
        """Between two batches of it."""
        self._asides.goes_on()

    def _begin_aside(self) -> bool:
        try:
            return not self._profiler.begin()
        except Exception as error:  # noqa: BLE001  the evaluation continues without it
            self._tell("the functions of an evaluation or a checkpoint", self._step, said(error))
            return False

    def _end_aside(self, phase: str) -> dict[str, Any]:
        try:
            return self._profiler.end(_roots(), {}, phase)
        except Exception as error:  # noqa: BLE001  as above
            self._tell("the functions of an evaluation or a checkpoint", self._step, said(error))
            return {"functions": [], "calls": []}

    def _put_aside(self, found: dict[str, Any]) -> None:
        functions, calls = _short(found["functions"]), _short(found["calls"])
        self._reporter.put(
            FunctionsEvent(self._step, found["wall_ns"], functions, calls=calls, inside=found["inside"])
        )

    def drop(self, step: int) -> None:
        """End the profile, if any, of a step that did not take place."""
        if self.active:
            self.close()
            self._close_window(step)

    def close(self) -> None:
        """End without a record; call it however the loop ended."""
        if self._looks is not None:
            self._looks.drop()
        if self.active:
            self._clock.gpu.listen(None)
            try:
                self._profiler.end()
            except Exception:  # noqa: BLE001  the training has ended
                return

    def _close_window(self, step: int) -> None:
        self._clock.gpu.listen(None)
        self._reporter.window(step)
        self._reporter.profiled = self.active = False
        self._next_step = step + BETWEEN_STEPS
        self._wait()

    def _paced(self, step_ns: int) -> None:
        """A window has ended, with this usual time of a step."""
        self._usual_ns = step_ns
        self._captures(step_ns)
        news = self._looks is not None and self._looks.news
        if self._every_ns and (self._slowing.worth_a_look(step_ns) or news):
            self.due_ns = self._within(self._clock.now())

    def _wait(self) -> None:
        self.due_ns = self._within(self._clock.now() + self._every_ns)

    def _within(self, t: int) -> int:
        """When a look that is due at t is within the allowance."""
        return t if self._allowance is None else max(t, self._allowance.due(self._clock.now()))

    def _skip(self, step: int, reason: str) -> None:
        self.close()
        self._close_window(step)
        self._tell(_functions_of(step), step, reason)

    def _seen(self, step: int) -> dict[str, Any]:
        """What the other looks at a profiled step have found."""
        try:
            return {} if self._looks is None else self._looks.end()
        except Exception as error:  # noqa: BLE001  the functions are known nonetheless
            self._tell(f"embeddings and kept graphs of step {step + 1:,}", step, said(error))
            return {}

    def _tell(self, what: str, step: int, reason: str) -> None:
        """Say once why something is not known."""
        if not self._reported:
            self._reported = True
            self._reporter.put(MarkEvent("note", step, f"{what} were not profiled: {printable(reason)}"))

    def mark(self, index: int) -> None:
        """The clock tells that a phase begins."""
        phase = PHASES[index] if index < len(PHASES) else self._clock.names[index].partition("/")[0]
        if phase == self._phase:
            return
        ended, self._phase = self._phase, phase
        try:
            self._profiler.mark(ended)
        except Exception:  # noqa: BLE001  the functions keep the phases known so far
            self._clock.gpu.listen(None)


def _functions_of(step: int) -> str:
    return f"the functions of step {step + 1:,}"


def _short(rows: Sequence[Sequence[Any]]) -> list[Any]:
    """Rows with their files as a reader wants them."""
    return [(short(row[0]), *row[1:]) for row in rows]


def _roots() -> dict[Any, str]:
    """Functions of torch by which an evaluation calls the model and reads its data."""
    from torch.nn import Module
    from torch.utils.data import dataloader

    reads: Any = dataloader._BaseDataLoaderIter.__next__
    return {Module.__call__.__code__: "forward", reads.__code__: "data_wait"}


# With a trace file and no period there is one capture, after this many steps or before the run ends.
FIRST_TRACE = 10
# A capture of long steps ends after this much measured time.
LONG_NS = 10_000_000_000


class ProfilerCapture:
    """One capture, made on the training thread. Its methods raise whatever the profiler raises.

    ranges: also mark the phases in the trace.
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
        self.begin_ns: int | None = None
        self._device, self._clock, self._model = device, clock, model
        self.measured = 0
        self._capture = Capture(torch, device, Looks(torch), graphs, ours=True)
        self._hooks: list[Any] = []
        # Open calls of modules.
        self._depth = 0
        self._ranges = ranges
        self._range: Any = None
        # What the profiler has recorded.
        self._trace: Any = None

    def start(self) -> None:
        """Start the profiler."""
        if torch._C._autograd._profiler_enabled():
            raise RuntimeError(ANOTHER)
        if self._model is not None:
            self._hear(self._model)
        self._capture.start()
        if dist.is_available() and dist.is_initialized():
            ranks = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
            torch._C._autograd._add_metadata_json("distributedInfo", json.dumps(ranks))
        self._clock.gpu.listen(self)
        self._clock.enter(phase.OTHER)

    def begin(self) -> None:
        """Start measuring; call it between two steps."""
        self._clock.enter(phase.OTHER)
        self.begin_ns = self._clock.changed_ns

    def step_ended(self) -> None:
        """A whole step since `begin` has ended."""
        self.measured += 1
        self._capture.next_step(self._clock.now())

    @property
    def measured_ns(self) -> int:
        """Nanoseconds from `begin` to the last phase change."""
        return self._clock.changed_ns - self.begin_ns if self.begin_ns is not None else 0

    def end(self, step: int) -> KernelsEvent:
        """Stop the profiler and return what it recorded since `begin`, after `step` optimizer steps.

        Raises ValueError if the profiler recorded nothing, RuntimeError if its clock cannot be aligned with ours.
        """
        assert self.begin_ns is not None
        self._clock.enter(phase.LOG)
        noted = self._capture.noted(self._clock.names, self.begin_ns, self._clock.changed_ns)
        self.stop()
        noted["lines"] = [(short(file), line, name) for file, line, name in noted["lines"]]
        profile = None
        if self._device.type == "cuda":
            properties = torch.cuda.get_device_properties(self._device)
            profile = match(properties.name, properties.total_memory)
        return captured(self._trace_events(), Noted.of(noted), step, self.measured, profile)

    def stop(self) -> None:
        """Stop the profiler, and detach from the clock and the model; safe to call twice."""
        self._clock.gpu.listen(None)
        while self._hooks:
            self._hooks.pop().remove()
        self._leave_range()
        self._trace = self._capture.stop() or self._trace

    def export(self, path: Path) -> None:
        """Write the capture as a Chrome trace, gzipped if the name ends in .gz. Raises OSError."""
        with tempfile.TemporaryDirectory(prefix=".trace-", dir=folder_for_parts(path)) as folder:
            made = Path(folder) / "trace.json"
            self._trace.save(str(made))
            if not made.exists() or not made.stat().st_size:
                raise OSError("the profiler wrote nothing")
            with made.open("rb") as plain, replacing(path, PATIENCE_S) as file:
                if path.suffix != ".gz":
                    shutil.copyfileobj(plain, file)
                    return
                with gzip.open(file, "wb", compresslevel=5) as packed:
                    shutil.copyfileobj(plain, packed)

    def mark(self, index: int) -> None:
        """The clock tells that phase `index` begins."""
        self._capture.mark(self._clock.changed_ns, index)
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

    def _hear(self, model: nn.Module) -> None:
        """Hear the calls of modules. This changes nothing about the computation."""
        self._capture.root(model)
        for module in model.modules():
            self._hooks.append(module.register_forward_pre_hook(self._enters, with_kwargs=True))
            self._hooks.append(module.register_forward_hook(self._leaves, always_call=True))

    def _enters(self, module: nn.Module, inputs: object, named: object) -> None:
        # With activation checkpointing, modules also run in threads of backward.
        if get_ident() == self._capture.thread:
            self._depth += 1
            self._capture.enters(module, self._depth, sys._getframe(1), (inputs, named))

    def _leaves(self, _module: nn.Module, _inputs: object, _output: object) -> None:
        if get_ident() == self._capture.thread and self._depth:
            self._capture.leaves(self._depth)
            self._depth -= 1

    def _trace_events(self) -> list[TraceEvent]:
        return [
            TraceEvent(
                name=event.name(),
                begin=event.start_ns(),
                end=event.start_ns() + event.duration_ns(),
                thread=event.device_resource_id() if on_gpu else event.start_thread_id(),
                on_gpu=on_gpu,
                annotation=event.is_user_annotation(),
                device=event.device_index(),
                correlation=event.correlation_id(),
                sequence=event.sequence_nr(),
                forward_thread=event.fwd_thread_id(),
                given=None if on_gpu else _given(event),
            )
            for event in self._trace.events()
            for on_gpu in (event.device_type() != torch.profiler.DeviceType.CPU,)
        ]


def _given(event: Any) -> dict[str, Any]:
    """What an operator was given, with the names that traces have for it."""
    return {
        "Input Dims": event.shapes(), "Input type": event.dtypes(), "Concrete Inputs": event.concrete_inputs(),
    }  # fmt: skip


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
    attribute the time to its modules, if the steps call them. allowance: of all closer looks; with it, a few steps an
    hour are captured by themselves, as in a script.
    """

    def __init__(
        self,
        reporter: Reporter,
        plan: CapturePlan,
        settled: Callable[[], bool] = lambda: True,
        model: nn.Module | None = None,
        allowance: Allowance | None = None,
    ) -> None:
        self.next = NEVER
        self._settled, self._reporter = settled, reporter
        self._clock, self._put = reporter.clock, reporter.put
        self._every, self._steps = plan.every_steps, plan.steps
        self.trace, self._graphs = plan.trace, plan.cuda_graphs
        self._recording: ProfilerCapture | None = None
        self._model = None if model is None or runs_compiled(model) else model
        # Of captures by themselves: whether one is due, and whether it begins then, or waits for `agreed`.
        self.wished, self.alone = False, True
        self._allowance = allowance if self._model is not None and EVERY_NS and not plan.every_steps else None
        # When the next one is due, 0 before that is known; when the present one began, 0 if somebody has asked for it;
        # and the usual time of a step.
        self._due = self._began = self._usual_ns = 0

    def begin(self, step: int, total_steps: int) -> None:
        """Training begins at `step` optimizer steps."""
        self._schedule(step)
        if self.next == NEVER and self.trace is not None:
            self.next = max(min(step + FIRST_TRACE, total_steps - 1 - self._steps), step + 1)

    def ask(self, step: int) -> None:
        """Request a capture as soon as possible."""
        self.next = min(self.next, step)
        self._began = 0

    def paced(self, step_ns: int) -> None:
        """A window has ended, with this usual time of a step, 0 if it is unknown: is a capture by itself due?"""
        allowance, now = self._allowance, self._clock.now()
        if allowance is None or self._recording is not None or not 0 < step_ns <= MOST_STEP_NS:
            return
        self._usual_ns = step_ns
        if not self._due:
            self._due = now + min(FIRST_NS, EVERY_NS)
        elif self.next == NEVER and now >= max(self._due, allowance.due(now)):
            self._due, self.wished = now + EVERY_NS, True
            if self.alone:
                self.agreed()

    def agreed(self) -> None:
        """Begin a capture by itself with the next step."""
        self.wished = False
        if (
            self.next == NEVER
            and self._allowance is not None
            and has_room(torch, self._reporter.losses.device)
        ):
            self.next, self._began = 0, self._clock.now()

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
                on_gpu = self._reporter.losses.device.type == "cuda"
                self._start(step, warm=room > 1 and (on_gpu or not self._began))
            return
        if recording.begin_ns is None:
            recording.begin()
        else:
            recording.step_ended()
        wanted = 1 if self._began and self._usual_ns > FEW_NS else self._steps
        if room < 1 or recording.measured >= wanted or recording.measured_ns >= LONG_NS:
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
        if self._began and recording.measured and self._allowance is not None:
            self._allowance.add(self._clock.now() - self._began - recording.measured * self._usual_ns)
            self._began = 0

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
        self._every, self.next, self._allowance = 0, NEVER, None
        if not self._began:
            self._put(MarkEvent("warning", step, f"the profiler capture failed: {_first_line(error)}"))

    def _tell(self, recording: ProfilerCapture, event: KernelsEvent) -> None:
        if self.trace is not None and not self._began:
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
