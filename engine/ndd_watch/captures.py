"""Captures a few whole steps with torch's profiler: which kernels and operators run, for which module and line.

Three steps are measured, on request and three times an hour by itself; of long steps only one then.

The process only writes the trace: a file in the folder of the run, with what is needed to read it as its metadata. The
console reads it, as it does the captures of its own runs.

On request and on a GPU, one step is recorded first and left out: the profiler is still starting, and the queue of the
GPU is empty.
One more after the last is no part of the statistics either: writing the trace delays it. A profiler of the script has
precedence.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from threading import get_ident, main_thread
from typing import Any, Callable

from . import CAPTURES
from .apart import Dropped, dumps, gc, os, ours, time
from .clock import (
    BASE,
    CHECKPOINT,
    CURRENT,
    EVALUATE,
    LAST,
    NAMES,
    OPTIMIZER,
    OTHER,
    S,
    gpu,
    now,
    rest,
)
from .lines import HeardLines
from .looks import Looks, attribute, groups_of, key_of, modules_within, own, own_frame
from .mapped import ANCHOR, CALL_AGAIN, CALL_BEGINS, CALL_ENDS, NOTED
from .modules import Modules
from .probes import Probes, profiled
from .steps import Steps

# Steps of a capture, and nanoseconds after which it ends.
STEPS, LONG_NS = 3, 10**10
# Captures by themselves: from one to the next (0: none), the first one, and the usual length of a step up to which
# there are any, and up to which they are of several steps. What the profiler records of longer ones fills the memory.
EVERY_NS = int(float(os.environ.get("NDD_WATCH_CAPTURE_S", "1200")) * 1e9)
FIRST_NS, MOST_STEP_NS, FEW_NS = 5 * 10**9, 2 * 10**9, 10**8
# Values of a call that are compared with those of another one.
MOST_GIVEN = 16
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
# Free bytes of a GPU without which nobody but the user begins a capture: the profiler takes some for its buffers.
LEAST_GPU_FREE = 1 << 30
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
    the console's own training uses it as well. ours: handlers of signals are this program's. optimizers: all that are
    known; None if gradients that they do not use are not looked for.
    """

    def __init__(
        self,
        torch: Any,
        device: Any,
        looks: Looks,
        lasting: bool = True,
        ours: bool = False,
        optimizers: Callable[[], list[Any]] | None = None,
    ) -> None:
        self._torch, self._device, self._looks, self._optimizers = torch, device, looks, optimizers
        self._ours, self._trail = ours, HeardLines()
        # The backward pass that runs on this thread, -1 without one.
        self._backward: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)
        self._ends: list[int] = []  # of the measured steps
        # Modules and what they were given in this step, and the tensors of that; the depth of a call that is one of
        # these again, 0 for none.
        self._given: dict[tuple[Any, ...], list[weakref.ref[Any]]] = {}
        self._again = 0
        # By key, parameters with gradients that no optimizer has: key of the module, and the version of its value.
        self._unused: dict[int, tuple[int, int]] | None = None
        self.on_gpu = device is not None and device.type == "cuda" and torch.cuda.is_available()
        self._lasting = _LASTING if self.on_gpu and lasting else {}
        self.thread = get_ident()
        # The profiler of torch, once it has begun.
        self._made: Any = None
        self._anchors: list[int] = []
        # (time, phase that begins).
        self.marks: list[tuple[int, int]] = []
        # (time, key of the module that is innermost from then on or 0, number of the line that calls it or -1,
        # CALL_ENDS, CALL_BEGINS or CALL_AGAIN).
        self._calls: list[tuple[int, int, int, int]] = []
        self._within: list[tuple[int, int, int]] = []
        self._lines: dict[tuple[str, int, str], int] = {}
        self._roots: dict[int, weakref.ref[Any]] = {}

    def start(self) -> None:
        """Begin to record. Raises what torch raises."""
        profiler: Any = sys.modules[_PROFILER]
        made = profiler.profile(
            use_kineto=True, use_device="cuda" if self.on_gpu else None, record_shapes=True
        )
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
        self._trail.begin(self._ours)

    def stop(self) -> Any:
        """End; what the profiler has recorded, or None if it has not begun."""
        made, self._made = self._made, None
        self._trail.end()
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

    def silence(self) -> None:
        """It cannot be ended on another thread, but hears nothing more."""
        self._trail.silence()

    def next_step(self, ended: int = 0) -> None:
        """A step begins. ended: when a measured one has ended, on our clock."""
        self._given.clear()
        if ended:
            self._ends.append(ended)

    def updates(self, measured: bool) -> None:
        """Right before an optimizer changes parameters. measured: in a measured step."""
        self._given.clear()
        if self._unused is None and measured and self._optimizers is not None:
            self._unused = self._not_updated(True)

    def root(self, module: Any) -> None:
        """The names of modules begin at this one."""
        self._roots.setdefault(key_of(module), weakref.ref(module))

    def enters(self, module: Any, depth: int, frame: Any, given: Any = None) -> None:
        """A module is called, so many calls deep, from this frame or one around it. given: its arguments, if known."""
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
        again = given is not None and self._is_again(key, depth, given)
        self._calls.append((now(), key, line, CALL_AGAIN if again else CALL_BEGINS))

    def leaves(self, depth: int) -> None:
        """A call ends that was so deep."""
        if self.thread != get_ident():
            return
        within = self._within
        while within and within[-1][0] >= depth:
            within.pop()
        if len(self._calls) < MOST_MARKS:
            self._calls.append((now(), *(within[-1][1:] if within else (0, -1)), CALL_ENDS))
        if depth <= self._again:
            self._again = 0

    def _is_again(self, key: int, depth: int, given: Any) -> bool:
        """Whether a module is called with the same input as before in this step, and within no such call."""
        if depth <= self._again:
            self._again = 0  # that one ended with an exception
        if self._again or self._backward() != -1 or not self._looks.allowed():
            return False
        values: list[Any] = [key, self._torch.is_grad_enabled()]
        tensors: list[Any] = []
        with self._looks.silent():
            if not self._compare(given, values, tensors) or not tensors:
                return False
        known = self._given.get(tuple(values))
        if known is not None and all(one() is tensor for one, tensor in zip(known, tensors)):
            self._again = depth
            return True
        self._given[tuple(values)] = [weakref.ref(tensor) for tensor in tensors]
        return False

    def _compare(self, given: Any, values: list[Any], tensors: list[Any]) -> bool:
        """Add what can be compared of the arguments of a call; False if there is anything else."""
        kind = type(given)
        if len(values) > MOST_GIVEN:
            return False
        if self._looks.is_tensor(given):
            if given.is_inference():
                return False
            tensors.append(given)
            values += (key_of(given), given._version)
            return True
        if kind is tuple or kind is list:
            return all(self._compare(one, values, tensors) for one in given)
        if kind is dict:
            values += [name for name in given if type(name) is str]
            return all(
                type(name) is str and self._compare(one, values, tensors) for name, one in given.items()
            )
        values.append(given)
        return given is None or kind is bool or kind is int or kind is float or kind is str

    def _not_updated(self, have_gradients: bool) -> dict[int, tuple[int, int]]:
        """By key, parameters of the models that no optimizer has: key of their module, and version of their value.

        have_gradients: only those that have one at present.
        """
        updated = {
            key_of(one)
            for optimizer in (self._optimizers() if self._optimizers is not None else ())
            for group in groups_of(optimizer)
            for one in group["params"]
        }
        found: dict[int, tuple[int, int]] = {}
        if not updated or not self._looks.allowed():
            return found
        with self._looks.silent():
            for root in self._models():
                for _, module in modules_within(root):
                    for one in self._parameters(module):
                        known = key_of(one) in updated or not one.requires_grad
                        if not known and (one.grad is not None or not have_gradients):
                            found[key_of(one)] = key_of(module), one._version
        return found

    def _models(self) -> list[Any]:
        """What was called outermost and still exists."""
        return [module for one in self._roots.values() if (module := one()) is not None]

    def _parameters(self, module: Any) -> list[Any]:
        """The plain parameters of a module itself."""
        found = attribute(module, "_parameters")
        return [one for one in found.values() if self._looks.is_tensor(one)] if type(found) is dict else []

    def noted(self, names: Sequence[str], begin: int, end: int) -> dict[str, Any]:
        """Before it stops: what is needed to read the trace. names: of phases. Times are nanoseconds on our clock."""
        self._anchor()
        self._trail.end()
        modules, compiled = self._module_names()
        order = {key: number for number, key in enumerate(modules)}
        trail = self._trail.take(self._lines)
        return {
            "begin": begin, "end": end, "ends": self._ends, "anchors": self._anchors,
            "device": (self._device.index or 0) if self.on_gpu else None,
            "marks": [[t, names[phase]] for t, phase in self.marks],
            "modules": list(modules.values()), "compiled": compiled, "unused": self._still_unused(order),
            "lines": list(self._lines), "trail": trail,
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

    def _still_unused(self, order: dict[int, int]) -> list[int]:
        """Numbers of the modules whose gradients no optimizer uses, and whose values nothing else has changed."""
        before = self._unused or {}
        after = self._not_updated(False) if before else {}
        found = {known[0] for one, known in before.items() if after.get(one) == known}
        return sorted(order[key] for key in found if key in order)

    def _module_names(self) -> tuple[dict[int, tuple[str, str, int]], bool]:
        """(key -> (name, class, bytes of its own parameters) of what was called outermost and its modules; whether any
        of them is compiled).

        Where several models were called, their classes are the beginning of the names.
        """
        found: dict[int, tuple[str, str, int]] = {}
        compiled = False
        roots = self._models()
        # Checkpointed activations call modules of a model outside of its own call.
        within = {key_of(module) for root in roots for name, module in modules_within(root) if name}
        roots = [root for root in roots if key_of(root) not in within]
        several = sum(bool(attribute(module, "_modules")) for module in roots) > 1
        for root in roots:
            above = type(root).__name__ if several else ""
            for name, module in modules_within(root):
                whole = ".".join(part for part in (above, name) if part)
                size = sum(self._looks.bytes_of(one) or 0 for one in self._parameters(module))
                found.setdefault(key_of(module), (whole, type(module).__name__, size))
                compiled |= attribute(module, "_compiled_call_impl") is not None
        return found, compiled


class Captures:
    """wanted: a capture is to begin as soon as possible. due_ns: when the next one begins by itself, on our clock.

    by_itself: nobody has asked for the present one. mark: records an occurrence.
    """

    def __init__(
        self, torch: Any, steps: Steps, modules: Modules, looks: Looks, mark: Callable[..., None]
    ) -> None:
        self._torch, self._steps, self._modules, self._looks, self._mark = torch, steps, modules, looks, mark
        self.wanted = False
        self.due_ns = 0 if EVERY_NS else 1 << 62
        self._number = 0
        self.by_itself, self._wanted_steps = False, STEPS
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

    def is_due(self, t: int) -> bool:
        """Whether one is to begin by itself at t on our clock."""
        if t < self.due_ns or self.wanted:
            return False
        if not self.due_ns:
            self.due_ns = t + min(FIRST_NS, EVERY_NS)
            return False
        self.due_ns = t + EVERY_NS
        # Of several ranks, one is captured: the others wait for it.
        first = os.environ.get("RANK", "0") == "0" and self._steps.gate is None
        short = sum(self._steps.last_row) <= MOST_STEP_NS
        return first and short and has_room(self._torch, self._steps.device) and not self._hindrance()

    def begin(self, t: int, by_itself: bool = False) -> bool:
        """Begin between two steps, at t on our clock; whether the next step is captured."""
        usual = sum(self._steps.last_row)
        self.by_itself, self._wanted_steps = by_itself, 1 if by_itself and usual > FEW_NS else STEPS
        if not by_itself:
            self.wanted = False
        try:
            if why := self._hindrance():
                self._tell(why)
                return False
            self._forget()
            self._step_began, self._longest = t, MORE_NS + LONGER * usual
            self._start()
            if self.by_itself and not (self._running is not None and self._running.on_gpu):
                self._first = now()
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
                self._running.next_step(t)
            else:
                self._first = t
                self._running.next_step()
            self._step_began, self._step_at, self._evaluated = t, len(self._running.marks), 0
            if profiled():
                self.make_way()
            elif self._measured >= self._wanted_steps or (self._measured and t - self._first >= LONG_NS):
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
            running.silence()
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
        """In a child process: the profiler of the parent would continue here without an end."""
        running, self._running = self._running, None
        self._hear_no_collections()
        self.wanted = self._resting = False
        self._modules.watch = None
        self._forget()
        if running is not None:
            running.silence()
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
        if phase == OPTIMIZER:
            self._running.updates(bool(self._first))
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

    def enters(self, module: Any, depth: int, given: Any) -> None:
        """A module is called, so many calls deep."""
        if self._leave:
            self.overdue()
        if self._running is not None:
            self._running.enters(module, depth, sys._getframe(1), None if S[BASE] == EVALUATE else given)

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
        made = Capture(self._torch, self._steps.device, self._looks, optimizers=self._steps.known_optimizers)
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
        if not self.by_itself:
            self._mark("warning", f"no profiler capture: {reason}")


def has_room(torch: Any, device: Any) -> bool:
    """Whether a GPU has enough free memory for what the profiler needs of it, if the training is on one."""
    if device is None or device.type != "cuda":
        return True
    try:
        return bool(torch.cuda.mem_get_info(device)[0] >= LEAST_GPU_FREE)
    except (RuntimeError, OSError, ValueError) as error:
        if not ours(error):
            raise
        return False


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
