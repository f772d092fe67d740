"""Captures a few whole steps with torch's profiler, on request: which kernels and operators run, and when none does.

The process only writes the trace: a file in the folder of the run, with what is needed to read it as its metadata. The
console reads it, as it does the captures of its own runs.

One step is recorded first and left out: the profiler is still starting, and on a GPU the queue is empty. One more after
the last is no part of the statistics either: writing the trace delays it. A profiler of the script has precedence.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from threading import get_ident, main_thread
from typing import Any, Callable

from . import CAPTURES
from .apart import Dropped, dumps, gc, os, ours, time
from .clock import CHECKPOINT, CURRENT, EVALUATE, LAST, NAMES, OTHER, S, gpu, now, rest
from .looks import Looks, attribute, key_of, modules_within, own, own_frame
from .mapped import ANCHOR, NOTED
from .modules import Modules
from .probes import Probes, profiled
from .steps import Steps

# Steps of a capture, and nanoseconds after which it ends.
STEPS, LONG_NS = 3, 10**10
# A step ends the capture where it takes so many times as long as the one before, and so much more: it is no usual one,
# and what the profiler records of it fills the memory. After LATE times that, its trace is not worth writing.
LONGER, MORE_NS, LATE = 4, 2 * 10**9, 3
# For so long, another thread waits that begins a profiler.
PATIENCE_NS = 3 * 10**8
# Changes of phases, and calls of modules, up to which they are recorded.
MOST_MARKS = 100_000
# Calls of modules during an evaluation, up to which it may be one of another model in each step, as of a teacher.
FEW_CALLS = 8
# Free bytes of a disk without which no trace is written.
LEAST_FREE = 1 << 26
# Ranges at each end by which the clocks are aligned.
ANCHORS = 5
OTHER_THREAD = "another thread continues the training"
THEIRS = "the script uses a profiler of its own, and is left alone"
_PROFILER = "torch.autograd.profiler"
# Kineto tells every begin and end of a profiler on standard error. It reads this when it is used first.
_QUIET = "KINETO_LOG_LEVEL"
# With CUDA graphs, a process may crash where CUPTI is torn down and begins again. torch.profiler sets these for graphs
# of its compiler; graphs of a script are not known.
_LASTING = {"TEARDOWN_CUPTI": "0", "DISABLE_CUPTI_LAZY_REINIT": "1"}


class Capture:
    """What torch's profiler records on this thread, and what is noted beside it: phases, and calls of modules.

    device: on which the training computes; None if it is unknown. lasting: CUDA graphs may be replayed. A capture of
    the console's own training uses it as well.
    """

    def __init__(self, torch: Any, device: Any, lasting: bool = True) -> None:
        self._torch, self._device = torch, device
        self.on_gpu = device is not None and device.type == "cuda" and torch.cuda.is_available()
        self._lasting = _LASTING if self.on_gpu and lasting else {}
        self.thread = get_ident()
        # The profiler of torch, once it has begun.
        self._made: Any = None
        self._anchors: list[int] = []
        # (time, phase that begins).
        self.marks: list[tuple[int, int]] = []
        # (time, key of the module that is innermost from then on or 0, number of the line that calls it or -1, whether
        # it begins then).
        self._calls: list[tuple[int, int, int, bool]] = []
        self._within: list[tuple[int, int, int]] = []
        self._lines: dict[tuple[str, int, str], int] = {}
        self._roots: dict[int, weakref.ref[Any]] = {}

    def start(self) -> None:
        """Begin to record. Raises what torch raises."""
        profiler: Any = sys.modules[_PROFILER]
        made = profiler.profile(use_kineto=True, use_device="cuda" if self.on_gpu else None)
        variables = {_QUIET: "99", **self._lasting}
        absent = [name for name in variables if name not in os.environ]
        try:
            for name in absent:
                os.putenv(name, variables[name])
            made._prepare_trace()
            made._start_trace()
            self._made = made
        finally:
            if _QUIET in absent:
                os.unsetenv(_QUIET)
        self._anchor()

    def stop(self) -> Any:
        """End; what the profiler has recorded, or None if it has not begun."""
        made, self._made = self._made, None
        if made is None:
            return None
        try:
            if self.on_gpu and not self._torch.cuda.is_current_stream_capturing():
                # Kernels of the captured steps may still be queued.
                self._torch.cuda.synchronize(self._device)
        finally:
            found = self._torch._C._autograd._disable_profiler()
            sys.modules[_PROFILER]._run_on_profiler_stop()
            for name in self._lasting:
                if name not in os.environ:
                    os.unsetenv(name)
        return found

    def mark(self, t: int, phase: int) -> None:
        """A phase begins at t on our clock."""
        if len(self.marks) < MOST_MARKS:
            self.marks.append((t, phase))

    def root(self, module: Any) -> None:
        """The names of modules begin at this one."""
        self._roots.setdefault(key_of(module), weakref.ref(module))

    def enters(self, module: Any, depth: int, frame: Any) -> None:
        """A module is called, so many calls deep, from this frame or one around it."""
        if len(self._calls) >= MOST_MARKS or self.thread != get_ident():
            return
        key, line = key_of(module), -1
        if depth == 1:
            self._within.clear()  # calls that ended with an exception were not heard
            self.root(module)
        frame = own_frame(frame, own)
        if frame is not None:
            code = frame.f_code
            place = code.co_filename, frame.f_lineno, getattr(code, "co_qualname", code.co_name)
            line = self._lines.setdefault(place, len(self._lines))
        self._within.append((depth, key, line))
        self._calls.append((now(), key, line, True))

    def leaves(self, depth: int) -> None:
        """A call ends that was so deep."""
        if self.thread != get_ident():
            return
        within = self._within
        while within and within[-1][0] >= depth:
            within.pop()
        if len(self._calls) < MOST_MARKS:
            self._calls.append((now(), *(within[-1][1:] if within else (0, -1)), False))

    def noted(self, names: Sequence[str], begin: int, end: int) -> dict[str, Any]:
        """Before it stops: what is needed to read the trace. names: of phases. Times are nanoseconds on our clock."""
        self._anchor()
        modules, compiled = self._module_names()
        order = {key: number for number, key in enumerate(modules)}
        return {
            "begin": begin, "end": end, "anchors": self._anchors,
            "device": (self._device.index or 0) if self.on_gpu else None,
            "marks": [[t, names[phase]] for t, phase in self.marks],
            "modules": list(modules.values()), "compiled": compiled,
            "lines": list(self._lines),
            "calls": [[t, order.get(key, -1), line, begins] for t, key, line, begins in self._calls],
        }  # fmt: skip

    def _anchor(self) -> None:
        """Record ranges at known times of our clock, to align the profiler's clock with it."""
        made = self._torch._C._profiler._RecordFunctionFast
        for _ in range(ANCHORS):
            anchor = made(ANCHOR)
            self._anchors.append(now())
            with anchor:
                pass

    def _module_names(self) -> tuple[dict[int, tuple[str, str]], bool]:
        """(key -> (name, class) of what was called outermost and its modules; whether any of them is compiled).

        Where several models were called, their classes are the beginning of the names.
        """
        found: dict[int, tuple[str, str]] = {}
        compiled = False
        roots = [module for one in self._roots.values() if (module := one()) is not None]
        # Checkpointed activations call modules of a model outside of its own call.
        within = {key_of(module) for root in roots for name, module in modules_within(root) if name}
        roots = [root for root in roots if key_of(root) not in within]
        several = sum(bool(attribute(module, "_modules")) for module in roots) > 1
        for root in roots:
            above = type(root).__name__ if several else ""
            for name, module in modules_within(root):
                whole = ".".join(part for part in (above, name) if part)
                found.setdefault(key_of(module), (whole, type(module).__name__))
                compiled |= attribute(module, "_compiled_call_impl") is not None
        return found, compiled


class Captures:
    """wanted: a capture is to begin as soon as possible. mark: records an occurrence."""

    def __init__(
        self, torch: Any, steps: Steps, modules: Modules, looks: Looks, mark: Callable[..., None]
    ) -> None:
        self._torch, self._steps, self._modules, self._looks, self._mark = torch, steps, modules, looks, mark
        self.wanted = False
        self._number = 0
        # Why there is none, for good: "" if there may be captures.
        self._never = "" if os.environ.get(CAPTURES) else "there is no folder for them"
        # The one that runs; None without one.
        self._running: Capture | None = None
        # Whether the next step is the one after a capture, and whether our own profiler begins at this moment.
        self._resting = self._starting = False
        # Why the thread on which it runs, which alone may stop it, is to do that.
        self._leave = ""
        # Whether it is being ended, and the thread of one that was left without an end; 0 for none.
        self._ending, self._left = False, 0
        self._forget()

    def _forget(self) -> None:
        """Forget the last capture."""
        # Nanoseconds on our clock.
        self._first = self._last = self._step_began = self._longest = 0
        # Of the marks, those of the present step begin at the index.
        self._measured = self._evaluated = self._step_at = 0

    def install(self, probes: Probes) -> None:
        """Hear of profilers of the script before they begin."""
        profiler: Any = sys.modules[_PROFILER]

        def begins(_probe: Any, zero: int) -> int:
            if not self._starting:
                with Dropped():
                    self._never = THEIRS
                    self.make_way()
                    self._wait()
            return zero

        # The second one is of those that are no `profile`: they begin without preparing anything.
        heard = [
            probes.put(function, begins, None, False)
            for function in (profiler.profile._prepare_trace, profiler._run_on_profiler_start)
        ]
        if not all(heard):
            self._never = "the source of this torch is not there"

    def begin(self, t: int) -> bool:
        """Begin between two steps, at t on our clock; whether the next step is captured."""
        self.wanted = False
        try:
            if why := self._hindrance():
                self._tell(why)
                return False
            self._forget()
            self._step_began, self._longest = t, MORE_NS + LONGER * sum(self._steps.last_row)
            self._start()
        except Exception as error:  # noqa: BLE001  it costs the capture
            self._failed(error)
            return False
        return True

    def step(self, t: int) -> bool:
        """A step has ended at t; whether the next one is no usual one either."""
        self._steps.profiled = True
        self.overdue()
        if self._running is None:
            self._resting = False
            return False
        if self._running.thread != get_ident():
            self._leave = OTHER_THREAD
            return False
        try:
            if self._first:
                self._measured += 1
                self._last = t
            else:
                self._first = t
            self._step_began, self._step_at, self._evaluated = t, len(self._running.marks), 0
            if profiled():
                self.make_way()
            elif self._measured >= STEPS or (self._measured and t - self._first >= LONG_NS):
                self.finish()
                self._resting = True
        except Exception as error:  # noqa: BLE001
            self._failed(error)
        return self._running is not None or self._resting

    def finish(self) -> None:
        """End the capture, if there is one, with the steps that it has."""
        if self._running is None or self._ending:
            return
        if self._running.thread != get_ident():
            self._leave = OTHER_THREAD
            return
        self._ending = True
        try:
            if not self._measured:
                self._give_up("no whole step was captured")
                return
            folder = os.environ.get(CAPTURES, "")
            if why := _no_room(folder):
                self._give_up(why)
                return
            noted = self._running.noted(NAMES, self._first, self._last)
            self._torch._C._autograd._add_metadata_json(NOTED, dumps(noted))
            trace = self._stop()
            self._number += 1
            name = f"capture-{os.getpid()}-{self._number}.json"
            trace.save(os.path.join(folder, name))
            self._mark("note", "a profiler capture was taken", trace=name, steps=self._measured)
        except Exception as error:  # noqa: BLE001
            self._failed(error)
        finally:
            self._ending = False
            self._forget()

    def overdue(self) -> None:
        """Something was heard: end a capture that another thread wants ended, or whose step does not end.

        The training may be over, and torch records what follows, about 2 KiB for each operation.
        """
        if self._left == get_ident():
            self._left = 0
            self._torch._C._autograd._clear_callbacks()  # it would record until the process ends
        if self._running is None or self._ending or self._running.thread != get_ident():
            return
        late = now() - self._step_began
        if self._leave:
            self._give_up(self._leave)
        elif late > LATE * self._longest:
            self._give_up("a step did not end")
        elif late > self._longest:
            self.finish()

    def make_way(self) -> None:
        """The script begins a profiler of its own on this thread: ours ends before, without a trace."""
        if self._running is not None and self._running.thread == get_ident():
            self._give_up(THEIRS)

    def _wait(self) -> None:
        """Wait until the thread with the capture has ended it: with two of torch's profilers at once, torch crashes."""
        if self._running is None:
            return
        self._leave = THEIRS
        until = now() + PATIENCE_NS
        while self._running is not None and now() < until:
            time.sleep(0.001)
        running: Capture | None = self._running
        if running is not None:
            # That thread waits, perhaps for this one. Ours cannot be ended any more once theirs has begun.
            self._running, self._left = None, running.thread
            gpu.listen(None)
            self._modules.watch = None
            self._tell(THEIRS)

    def _give_up(self, why: str) -> None:
        """End without a trace, on the thread of the capture."""
        self._stop()
        self._tell(why)

    def close(self) -> None:
        """End without a trace. Safe to call twice."""
        self.wanted = self._resting = False
        if self._running is None:
            return
        if self._running.thread == get_ident():
            self._stop()
        else:
            self._leave = OTHER_THREAD

    def forked(self) -> None:
        """In a child process: the profiler of the parent would go on here without an end."""
        running, self._running = self._running, None
        self._hear_no_collections()
        self.wanted = self._resting = False
        self._modules.watch = None
        self._forget()
        if running is not None:
            self._torch._C._autograd._clear_callbacks()

    # What hears the steps.

    def mark(self, phase: int) -> None:
        """A phase begins."""
        if self._running is None or self._running.thread != get_ident():
            return
        if self._leave:
            self.overdue()
            return
        t = now()
        self._running.mark(t, phase)
        if phase == EVALUATE:
            self._evaluated += 1
        # Neither is part of a capture, and both may take long.
        aside = phase == CHECKPOINT or (
            phase == EVALUATE and (self._steps.own_evaluation or self._evaluated > FEW_CALLS)
        )
        if aside or t - self._step_began > self._longest:
            self.finish()
            t = now()
            rest[OTHER] += t - S[LAST]
            S[LAST] = t

    def rename(self, old: int, new: int) -> None:
        """A phase of the present step is another one."""
        if self._running is not None:
            marks = self._running.marks
            marks[self._step_at :] = [(t, new if at == old else at) for t, at in marks[self._step_at :]]

    def take_back(self, phase: int) -> None:
        """The phase that was marked last was another one."""
        if self._running is not None and self._running.marks:
            self._running.marks[-1] = self._running.marks[-1][0], phase

    def enters(self, module: Any, depth: int, _given: Any) -> None:
        """A module is called, so many calls deep."""
        if self._leave:
            self.overdue()
        if self._running is not None:
            self._running.enters(module, depth, sys._getframe(1))

    def leaves(self, depth: int) -> None:
        """A call ends that was so deep."""
        if self._running is not None:
            self._running.leaves(depth)

    # Inside.

    def _hindrance(self) -> str:
        """Why no capture can begin now; "" if it can."""
        if self._never:
            return self._never
        if get_ident() != main_thread().ident:
            return "the training runs in a thread: torch's profiler needs the main one"
        if profiled() or self._torch._C._autograd._profiler_enabled():
            return THEIRS
        if not self._looks.allowed():
            return "a mode of the script is active that sees every operation"
        return _no_room(os.environ.get(CAPTURES, ""))

    def _start(self) -> None:
        made = Capture(self._torch, self._steps.device)
        self._starting, self._leave = True, ""
        try:
            made.start()
            self._running = made
            gc.callbacks.append(self._collected)
        finally:
            self._starting = False
        made.mark(now(), S[CURRENT])
        gpu.listen(self)
        self._modules.watch = self

    def _collected(self, _moment: str, _info: Any) -> None:
        """A step that does not end may do nothing else that is heard."""
        with Dropped():
            self.overdue()

    def _hear_no_collections(self) -> None:
        with Dropped(ValueError):
            gc.callbacks.remove(self._collected)

    def _stop(self) -> Any:
        """Take everything out; what the profiler has recorded."""
        made, self._running = self._running, None
        self._hear_no_collections()
        gpu.listen(None)
        self._modules.watch = None
        return None if made is None else made.stop()

    def _failed(self, error: Exception) -> None:
        """An error of ours costs the capture, and all later ones."""
        with Dropped():
            self.close()
        if not ours(error):
            raise error
        self._never = f"{type(error).__name__}: {error}".partition("\n")[0]
        self._tell(self._never)

    def _tell(self, reason: str) -> None:
        self._mark("warning", f"no profiler capture: {reason}")


def _no_room(folder: str) -> str:
    """Why a trace cannot be written there; "" if it can."""
    try:
        if not os.access(folder, os.W_OK | os.X_OK):
            return f"nothing can be written to {folder}"
        space = os.statvfs(folder)
    except OSError as error:
        if not ours(error):
            raise
        return f"{folder}: {error.strerror}"
    return "" if space.f_bavail * space.f_frsize >= LEAST_FREE else f"the disk of {folder} is full"
