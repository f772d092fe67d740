"""Profiles single steps of a loop, to name the functions that take the time. Nothing here raises into the training.

Python's profiler sees every call, and slows a step down. A profiled step is therefore a window of its own, marked as
profiled, so that it is part of no statistics.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ndd_engine.errors import said
from ndd_engine.record.events import PHASES, FunctionsEvent, MarkEvent
from ndd_engine.text import printable
from ndd_watch.asides import Asides
from ndd_watch.collecting import Collecting
from ndd_watch.looks import Looks
from ndd_watch.own import own, product, short
from ndd_watch.profiler import StepProfiler
from ndd_watch.sizes import Sizes
from ndd_watch.slowing import Slowing

from .close_looks import CloseLooks
from .reporting import Reporter

NEVER = sys.maxsize
# The first profiled step comes after so many seconds and steps: the first steps allocate and compile.
FIRST_S, FIRST_STEPS = 2.0, 5
# Steps from one profiled step to the next, at least: long steps would leave few for the statistics.
BETWEEN_STEPS = 10


class FunctionProfiles:
    """Profiles a step every `every_s` seconds, and when steps have become slower; 0: none.

    It is recorded through the reporter. due_ns: call `begin` before a step that starts at or after this time of the
    reporter's clock. settled: returns False while the way the steps run may still change (a CUDA graph is not captured
    yet). counted: counts what may grow in the model and its optimizers. looks: what is done without need.
    """

    def __init__(
        self,
        reporter: Reporter,
        every_s: float,
        settled: Callable[[], bool] = lambda: True,
        counted: Callable[[Sizes], None] = lambda sizes: None,
        looks: CloseLooks | None = None,
    ) -> None:
        self.due_ns = NEVER
        self._counted, self._slowing, self._looks = counted, Slowing(), looks
        reporter.paced = self._paced
        self._reporter, self._clock, self._settled = reporter, reporter.clock, settled
        self._every_ns = round(every_s * 1e9)
        self._profiler = StepProfiler(own, product())
        self._next_step = 0
        # Whether the present step is profiled.
        self.active = False
        self._told = False
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
        self._sizes = Sizes(Looks(torch))
        try:
            reason = self._profiler.begin()
            if not reason:
                if self._looks is not None:
                    self._looks.begin()
                self._phase = self._clock.current.partition("/")[0]
                self._clock.listener = self._changed
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
        self._close_window(step)
        if not found["wall_ns"]:
            self._tell(step, "another profiler began within the profiled step")
            return
        functions, waits = _short(found["functions"]), _short(found["waits"])
        seen = {} if self._looks is None else self._looks.end()
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
    def aside(self, phase: int, step: int) -> Iterator[None]:
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
        except Exception:  # noqa: BLE001  the evaluation goes on without it
            return False

    def _end_aside(self, phase: str) -> dict[str, Any]:
        try:
            return self._profiler.end(_roots(), {}, phase)
        except Exception:  # noqa: BLE001  as above
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
            self._clock.listener = None
            try:
                self._profiler.end()
            except Exception:  # noqa: BLE001  the training has ended
                return

    def _close_window(self, step: int) -> None:
        self._clock.listener = None
        self._reporter.window(step)
        self._reporter.profiled = self.active = False
        self._next_step = step + BETWEEN_STEPS
        self._wait()

    def _paced(self, step_ns: int) -> None:
        """A window has ended, with this usual time of a step."""
        news = self._looks is not None and self._looks.news
        if self._every_ns and (self._slowing.worth_a_look(step_ns) or news):
            self.due_ns = self._clock.now()

    def _wait(self) -> None:
        self.due_ns = self._clock.now() + self._every_ns

    def _skip(self, step: int, reason: str) -> None:
        self.close()
        self._close_window(step)
        self._tell(step, reason)

    def _tell(self, step: int, reason: str) -> None:
        """Say once why no functions are known."""
        if not self._told:
            self._told = True
            text = f"the functions of step {step + 1:,} were not profiled: {printable(reason)}"
            self._reporter.put(MarkEvent("note", step, text))

    def _changed(self, _now: int, index: int) -> None:
        """The clock's listener: a phase begins."""
        phase = PHASES[index] if index < len(PHASES) else self._clock.names[index].partition("/")[0]
        if phase == self._phase:
            return
        ended, self._phase = self._phase, phase
        try:
            self._profiler.mark(ended)
        except Exception:  # noqa: BLE001  the functions keep the phases known so far
            self._clock.listener = None


def _short(rows: Sequence[Sequence[Any]]) -> list[Any]:
    """Rows with their files as a reader wants them."""
    return [(short(row[0]), *row[1:]) for row in rows]


def _roots() -> dict[Any, str]:
    """Functions of torch by which an evaluation calls the model and reads its data."""
    from torch.nn import Module
    from torch.utils.data import dataloader

    reads: Any = dataloader._BaseDataLoaderIter.__next__
    return {Module.__call__.__code__: "forward", reads.__code__: "data_wait"}
