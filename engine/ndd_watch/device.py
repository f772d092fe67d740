"""Reads a GPU without waiting for it: the phases of some steps by its own clock, and values that it has computed.

A GPU runs behind the host. So a timing event is recorded at each phase change of a step, and read some steps later,
when a query shows that the GPU has passed the last one. Values are copied to pinned memory and read in the same way.
Nothing here ever synchronises, and nothing happens while the script captures a CUDA graph.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Callable

from .exceptions import ours
from .looks import Looks

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

    def read(self) -> list[tuple[int, dict[int, float]]]:
        """(key, nanoseconds of each phase) of the steps that the GPU has finished since the last call."""
        found: list[tuple[int, dict[int, float]]] = []
        if not self._pending:
            return found
        try:
            if self._capturing():  # a query would make the capture fail
                return found
            while self._pending and self._pending[0][1][-1][1].query():
                key, marks = self._pending.popleft()
                row: dict[int, float] = {}
                for (phase, begin), (_, end) in zip(marks, marks[1:]):
                    row[phase] = row.get(phase, 0.0) + begin.elapsed_time(end) * 1e6  # milliseconds
                self._pool.extend(event for _, event in marks)
                if key is not None:
                    found.append((key, row))
                else:
                    for phase, spent in row.items():
                        self._outside[phase] = self._outside.get(phase, 0.0) + spent
        except Exception as error:  # noqa: BLE001
            self._fail(error)
        return found

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
