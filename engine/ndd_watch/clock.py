"""The clocks of a process that trains: that of its phases, and that of a GPU with the values that it computes.

Phases: exactly one is current at any time, so they add up to the wall time. The state is in memory that others can
read, see `mapped`, and what is called in every step repeats the lines of `enter` instead of calling it: between the
operations of a step, each Python function costs about a microsecond.

GPU: it runs behind the host. So a timing event is recorded at each phase change of a step, and read some steps later,
when a query shows that the GPU has passed the last one. Values are copied to pinned memory and read in the same way.
Nothing here ever synchronises, and nothing happens while the script captures a CUDA graph.
"""

from __future__ import annotations

import contextlib
import time
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Callable

from .apart import ours
from .looks import Looks
from .mapped import (
    BACKWARD,
    BASE,
    BEGUN,
    CHECKPOINT,
    CLIP,
    COLUMNS,
    CURRENT,
    DATA_WAIT,
    DONE,
    EVALUATE,
    FORWARD,
    LAST,
    LENGTHS_AT,
    LOG,
    LOSS,
    MOST_LENGTHS,
    MOST_ROWS,
    NAMES,
    OPTIMIZER,
    OTHER,
    PHASES,
    REST,
    ROW,
    ROW_WIDTH,
    ROWS,
    ROWS_AT,
    TIMED,
    TO_DEVICE,
    TRAINER,
    WAITING,
    ZERO_GRAD,
    MappedMemory,
)

# What the hooks need of all this comes from here.
__all__ = [
    "BACKWARD", "BASE", "CHECKPOINT", "CLIP", "CURRENT", "DATA_WAIT", "DONE", "EVALUATE", "FORWARD", "LAST", "LOG",
    "LOSS", "NAMES", "OPTIMIZER", "OTHER", "PHASES", "TIMED", "TO_DEVICE", "TRAINER", "WAITING", "ZERO_GRAD",
]  # fmt: skip

Then = Callable[[list[float]], None]

# Only some steps a second carry events: each costs 2 to 4 microseconds of host time.
SAMPLE_NS = 10**8
# Steps whose events, and values whose copies, have not been read yet.
MOST_PENDING = 16
NEVER = 1 << 62
# Evaluations in a step.
MOST_SPANS = 4
# Values that are on their way at the same time.
MOST_VALUES = 64
# Errors after which nothing more is timed.
MOST_ERRORS = 3


class DeviceClock:
    """The clock of the GPU that a thread trains on.

    marks: (phase that begins, event) of the present step; empty if it is not timed here. failed: the first error, ""
    without one.
    """

    def __init__(self) -> None:
        self.marks: list[tuple[int, Any]] = []
        self.failed, self._errors = "", 0
        # Of a capture: hears the phases instead, see `listen`.
        self._listener: Any = None
        # On the clock of the host: when the next step is to carry events.
        self.due = NEVER
        self._make: Callable[[], Any] | None = None
        self._current: Callable[[], Any] = lambda: None
        self._capturing: Callable[[], bool] = lambda: False
        self._stream: Any = None
        self._key = 0
        self._pool: list[Any] = []
        # Key of a step, or None for what is outside of the steps, and marks.
        self._pending: deque[tuple[int | None, list[tuple[int, Any]]]] = deque()
        # What is outside of the steps, since the present one has begun: marks, and the stream of each.
        self._spans: list[tuple[Any, list[tuple[int, Any]]]] = []
        self._outside: dict[int, float] = {}
        # (key, nanoseconds of each phase) of the steps that `read` has met since they were taken.
        self._rows: list[tuple[int, dict[int, float]]] = []

    def prepare(
        self,
        make_event: Callable[[], Any],
        current_stream: Callable[[], Any],
        capturing: Callable[[], bool] = lambda: False,
    ) -> None:
        """Begin to time, perhaps on another GPU than before: what is not read yet is dropped.

        make_event: creates an event that times. capturing: whether the stream captures a graph.
        """
        self.drop()
        self._pending.clear()
        self._spans, self._pool = [], []  # an event belongs to the GPU that has recorded it first
        self._make, self._current, self._capturing = make_event, current_stream, capturing
        self.due = 0

    def begin(self, phase: int, key: int = 0) -> None:
        """The step that begins now in this phase carries events. All are recorded on the stream that is current now."""
        if self._make is None or self.marks or len(self._pending) >= MOST_PENDING:
            return
        self._key = key
        try:
            if not self._capturing():
                self._stream = self._current()
                self._record(phase)
        except Exception as error:  # noqa: BLE001
            self._fail(error)

    def sample(self, t: int, phase: int, key: int) -> None:
        """A step begins at t on the clock of the host, and is to carry events."""
        self.due = t + SAMPLE_NS
        self.read()
        self.begin(phase, key)

    def mark(self, phase: int) -> None:
        """A phase begins, in a step with marks."""
        try:
            if self._listener is not None:
                self._listener.mark(phase)
            elif self._capturing():
                self.drop()
            else:
                self._record(phase)
        except Exception as error:  # noqa: BLE001
            self._fail(error)

    def leave_steps(self, phase: int) -> None:
        """A phase begins that is perhaps outside of the steps, such as an evaluation: all of them are timed."""
        if self._make is None or len(self._pending) >= 2 * MOST_PENDING or len(self._spans) >= MOST_SPANS:
            return
        try:
            if not self._capturing():
                stream = self._current()
                self._spans.append((stream, [(phase, self._event(stream))]))
        except Exception as error:  # noqa: BLE001
            self._fail(error)

    def back_to_steps(self) -> None:
        """It has ended."""
        if not self._spans or len(self._spans[-1][1]) > 1:
            return
        stream, (first,) = self._spans[-1]
        try:
            if self._capturing():
                self._spans.pop()
            else:
                self._spans[-1] = stream, [first, (first[0], self._event(stream))]
        except Exception as error:  # noqa: BLE001
            self._fail(error)

    def set_aside(self) -> None:
        """What began and ended outside of the steps is no part of the present one."""
        self._pending.extend((None, span) for _, span in self._spans if len(span) > 1)
        self._spans = [one for one in self._spans if len(one[1]) == 1]

    def outside(self) -> dict[int, float]:
        """Nanoseconds of each phase outside of the steps that `read` has met since the last call."""
        found, self._outside = self._outside, {}
        return found

    def rename(self, old: int, new: int) -> None:
        """A phase of the present step is another one."""
        if self._listener is not None:
            self._listener.rename(old, new)
        self._spans.clear()
        self.marks[:] = [(new if phase == old else phase, event) for phase, event in self.marks]

    def take_back(self, phase: int) -> None:
        """The phase that was marked last was another one."""
        if self._listener is not None:
            self._listener.take_back(phase)
        elif self.marks:
            self.marks[-1] = phase, self.marks[-1][1]

    def drop(self) -> None:
        """Do not time this step."""
        if self._listener is None:
            self._pool.extend(event for _, event in self.marks)
            self.marks.clear()

    def listen(self, listener: Any) -> None:
        """Have `mark`, `rename` and `take_back` of a listener called instead of timing steps, until it is None."""
        if self._listener is not None:
            self.marks.clear()
        self._listener = None
        self.drop()
        if listener is not None:
            self.marks.append((0, None))  # the hooks call `mark` where there are any
        self._listener = listener

    def end(self) -> None:
        """The step has ended; the last mark tells when."""
        if self.marks and self._listener is None:
            self._pending.append((self._key, self.marks[:]))
            self.marks.clear()

    def take(self) -> list[tuple[int, dict[int, float]]]:
        """(key, nanoseconds of each phase) of the steps that the GPU has finished since the last call."""
        self.read()
        taken, self._rows = self._rows, []
        return taken

    def read(self) -> None:
        """Read the events that the GPU has passed."""
        if not self._pending:
            return
        try:
            if self._capturing():  # a query would make the capture fail
                return
            while self._pending and self._pending[0][1][-1][1].query():
                key, marks = self._pending.popleft()
                row: dict[int, float] = {}
                for (phase, begin), (_, end) in zip(marks, marks[1:]):
                    row[phase] = row.get(phase, 0.0) + begin.elapsed_time(end) * 1e6  # milliseconds
                self._pool.extend(event for _, event in marks)
                if key is not None:
                    self._rows.append((key, row))
                else:
                    for phase, spent in row.items():
                        self._outside[phase] = self._outside.get(phase, 0.0) + spent
        except Exception as error:  # noqa: BLE001
            self._fail(error)

    def forget(self) -> None:
        """Time nothing more, and drop what is not read yet."""
        self.due, self._make, self._listener = NEVER, None, None
        self.marks.clear()
        self._pending.clear()
        self._spans, self._pool = [], []

    def _record(self, phase: int) -> None:
        self.marks.append((phase, self._event(self._stream)))

    def _event(self, stream: Any) -> Any:
        """An event that is recorded now."""
        assert self._make is not None
        event = self._pool.pop() if self._pool else self._make()
        event.record(stream)
        return event

    def _fail(self, error: Exception) -> None:
        """Drop what is not read yet. An error of the GPU reaches the training by itself, in its own next call."""
        if not ours(error):
            raise error
        self.failed = self.failed or reason_of(error)
        self._errors += 1
        make, due = self._make, self.due
        self.forget()
        if self._errors < MOST_ERRORS:
            self._make, self.due = make, due


def reason_of(error: Exception) -> str:
    """The first line of an error."""
    return str(error).partition("\n")[0] or type(error).__name__


class DeviceValues:
    """Values of tensors with one element on a GPU, some steps late. An error ends this; it reaches nobody.

    failed: that error, "" without one.
    """

    def __init__(self, torch: Any, looks: Looks) -> None:
        self._torch, self._looks = torch, looks
        self._host: Any = None
        # Places in the memory of the host, an event that follows the copies, and what gets the values.
        self._pending: deque[tuple[list[int], Any, Then]] = deque()
        self._next = self._used = 0
        self.failed = ""

    def send(self, tensors: Sequence[Any], then: Then) -> None:
        """Queue copies to the host. then: called by `read` with the values in this order."""
        torch, count = self._torch, len(tensors)
        if self.failed or self._used + count > MOST_VALUES or torch.cuda.is_current_stream_capturing():
            return
        try:
            # No function or mode of the script sees this.
            with self._looks.silent():
                if self._host is None:
                    self._host = torch.empty(MOST_VALUES, dtype=torch.float32, device="cpu", pin_memory=True)
                places = [(self._next + number) % MOST_VALUES for number in range(count)]
                for place, tensor in zip(places, tensors):
                    self._host[place].copy_(tensor.detach().reshape(()), non_blocking=True)
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(tensors[0].device))
            self._pending.append((places, event, then))
            self._next, self._used = (self._next + count) % MOST_VALUES, self._used + count
        except Exception as error:  # noqa: BLE001
            self._fail(error)

    def read(self) -> None:
        """Hand the values over that have arrived."""
        if not self._pending or not self._looks.allowed() or self._torch.cuda.is_current_stream_capturing():
            return
        try:
            while self._pending and self._pending[0][1].query():
                places, _, then = self._pending.popleft()
                self._used -= len(places)
                with self._looks.silent():
                    values = [float(self._host[place].item()) for place in places]
                then(values)
        except Exception as error:  # noqa: BLE001
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """See `DeviceClock._fail`."""
        if not ours(error):
            raise error
        self.failed = reason_of(error)
        self._pending.clear()


now = time.perf_counter_ns
ZEROS = memoryview(array("q", [0] * COLUMNS))


class PhaseClock:
    """The clock of the phases of one thread, and of the GPU that it uses.

    A loop of our own calls `enter` where a phase begins and `end_step` where a step ends. Its phases may have parts,
    as "forward/encoder". The hooks of a script keep its time in a memory, with the phases in NAMES.

    now: returns nanoseconds of a monotonic clock; tests pass their own. memory: the integers of a MappedMemory.

    state: integers, see `mapped` for their indices. names: of phases and parts. row, rest: nanoseconds of each, in the
    current step, and in the window outside of steps. rows: of a loop's steps that have ended in the window.
    waited_ns: waiting for data in all steps so far.
    """

    def __init__(self, now: Callable[[], int] = now, memory: Any = None) -> None:
        self.now, self.gpu = now, DeviceClock()
        self.marks = self.gpu.marks
        self.rows: list[list[int]] = []
        self.waited_ns = 0
        # By the phase it was entered from, and its name without that: the index of a part. Phases outside of steps.
        self._parts: dict[tuple[int, str], int] = {}
        self._asides = [EVALUATE, CHECKPOINT]
        self.names: list[str] = list(PHASES if memory is None else NAMES)
        self._zeros: Any = [0] * len(PHASES) if memory is None else ZEROS
        self.state: Any = [0] * ROW if memory is None else memory
        if memory is not None:
            self.row, self.rest = memory[ROW:REST], memory[REST : REST + COLUMNS]
            return
        self.row, self.rest = self._zeros[:], self._zeros[:]
        self.state[CURRENT] = OTHER
        self.state[LAST] = self.state[BEGUN] = now()

    def enter(self, phase: int) -> None:
        """Switch to a phase."""
        t, state = self.now(), self.state
        self.row[state[CURRENT]] += t - state[LAST]
        state[LAST] = t
        state[CURRENT] = phase
        if self.marks:
            self.gpu.mark(phase)

    def enter_part(self, name: str) -> int:
        """Switch to this part of the current phase; returns the phase to go back to."""
        outer: int = self.state[CURRENT]
        index = self._parts.get((outer, name))
        if index is None:
            index = self._parts[outer, name] = self._part(outer, name)
        self.enter(index)
        return outer

    def _part(self, outer: int, name: str) -> int:
        phase = self.names[outer].partition("/")[0]
        key = f"{phase}/{name}"
        if key not in self.names:
            if PHASES.index(phase) in self._asides:
                self._asides.append(len(self.names))
            self.names.append(key)
            for places in (self.row, self.rest, self._zeros):
                places.append(0)
        return self.names.index(key)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time inside as this part of the current phase."""
        outer = self.enter_part(name)
        try:
            yield
        finally:
            self.enter(outer)

    def end_step(self) -> int:
        """End the step and switch to `other`. Returns the time on the clock."""
        self.enter(OTHER)
        row, gpu, t = self.row, self.gpu, self.state[LAST]
        if row[EVALUATE] or row[CHECKPOINT]:
            gpu.set_aside()
            for phase in self._asides:
                self.set_aside(phase, row[phase])
        if self.marks:
            gpu.end()
        self.rows.append(row)
        self.row = self._zeros[:]
        self.waited_ns += row[DATA_WAIT]
        self.state[DONE] += 1
        if t > gpu.due:
            gpu.sample(t, OTHER, self.state[DONE])
        return int(t)

    def evaluation(self, on: bool) -> None:
        """An evaluation begins, or ends: on the GPU, all of them are timed."""
        self.enter(EVALUATE if on else OTHER)
        if on:
            self.gpu.leave_steps(EVALUATE)
        else:
            self.gpu.back_to_steps()

    def set_aside(self, phase: int, spent: int) -> None:
        """So much of a phase is no part of the current step."""
        if spent:
            self.gpu.drop()
            self.rest[phase] += spent
            self.row[phase] -= spent

    @property
    def current(self) -> str:
        """Name of the current phase, or part of one."""
        index: int = self.state[CURRENT]
        return self.names[index]

    @property
    def changed_ns(self) -> int:
        """When the phase changed last; any thread may read it."""
        return int(self.state[LAST])

    @property
    def window_ns(self) -> int:
        """Length of the window up to the last phase change."""
        return int(self.state[LAST] - self.state[BEGUN])

    def take(self) -> tuple[int, list[int]]:
        """(wall time, rest) of the window, in nanoseconds; begins the next window.

        Rows, the lengths of steps without one, and rest add up to the wall time. Time of an unfinished step counts as
        rest.
        """
        self.enter(self.state[CURRENT])
        if self.row[EVALUATE] or self.row[CHECKPOINT]:
            self.gpu.drop()
            self.gpu.set_aside()
        taken = self.window_ns, [a + b for a, b in zip(self.rest, self.row)]
        self.clear()
        return taken

    def clear(self) -> None:
        """Begin a window at the last phase change."""
        self.row[:] = self.rest[:] = self._zeros
        self.rows = []
        self.state[BEGUN] = self.state[LAST]

    def skip(self) -> None:
        """Begin a window now, after what is no part of the training, as a pause."""
        self.state[LAST] = self.now()
        self.clear()
        self.gpu.drop()


def no_phase(_phase: int) -> None:
    """Stands in for `PhaseClock.enter` where a step runs untimed."""


memory = MappedMemory()
# The clock of the process: its integers, of which `row` and `rest` are parts, and the clock of the GPU that the thread
# trains on. Where a phase changes, `mark` is called if the step has marks.
phase_clock = PhaseClock(now, memory.values)
S, row, rest = memory.values, phase_clock.row, phase_clock.rest
gpu, marks, mark = phase_clock.gpu, phase_clock.marks, phase_clock.gpu.mark
enter, evaluation, set_aside = phase_clock.enter, phase_clock.evaluation, phase_clock.set_aside
take, clear, skip = phase_clock.take, phase_clock.clear, phase_clock.skip


def begin(thread: int) -> None:
    """The training begins, on this thread."""
    t = now()
    S[LAST] = S[BEGUN] = t
    S[CURRENT] = S[BASE] = OTHER
    S[TIMED] = S[TRAINER] = thread
    row[:] = rest[:] = ZEROS


def add_row() -> None:
    """Write the current step as a row."""
    phase_clock.waited_ns += row[DATA_WAIT]
    count = S[ROWS]
    at = ROWS_AT + count % MOST_ROWS * ROW_WIDTH
    S[at] = S[DONE]
    S[at + 1 : at + ROW_WIDTH] = row
    S[ROWS] = count + 1


def waited_ns() -> int:
    """Waiting for data in all steps that have a row, so far."""
    return phase_clock.waited_ns


def leave_out_rest() -> None:
    """Have no window contain what is no phase since the last step: the script's own work after its training."""
    enter(S[CURRENT])
    S[BEGUN] += row[OTHER]
    row[OTHER] = 0


def leave_out(work: Callable[[], None]) -> None:
    """Have no window contain the time of this work of ours."""
    enter(S[CURRENT])
    begin = S[LAST]
    try:
        work()
    finally:
        S[LAST] = now()
        S[BEGUN] += S[LAST] - begin


def lengths(begin: int) -> list[int]:
    """Nanoseconds of the steps from this number on; those that are left out are missing."""
    end = S[DONE]
    found = (S[LENGTHS_AT + step % MOST_LENGTHS] >> 1 for step in range(max(begin, end - MOST_LENGTHS), end))
    return [length for length in found if length]
