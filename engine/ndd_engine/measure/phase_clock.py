"""Times the phases of a step with two clocks: the host's and, on a GPU, the device's.

Exactly one phase is current at any time, so the phases of a window add up to its wall time by construction.
`enter` is called about ten times a step and must stay below a microsecond on the host clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ndd_engine.record.events import PHASES, Json
from ndd_watch.clock import SAMPLE_NS, DeviceClock

DATA_WAIT, TO_DEVICE, FORWARD, LOSS, BACKWARD, CLIP = range(6)
OPTIMIZER, ZERO_GRAD, LOG, EVALUATE, CHECKPOINT, OTHER = range(6, len(PHASES))


@dataclass
class Window:
    """The time between two readings of a clock, in nanoseconds: of a run of our own, or of an observed script.

    rows: one list per finished step, indexed like `names`. rest: time outside finished steps.
    device: one list per step that carried device events; None for phases it did not enter. outside: nanoseconds of the
    device in evaluations. wholes: steps that were timed as a whole. Their time is shared out like that of the others;
    `other` takes the rounding.
    """

    names: list[str]
    wall_ns: int
    rows: list[list[int]]
    rest: list[int]
    device: list[list[float | None]] = field(default_factory=list)
    outside: dict[int, float] = field(default_factory=dict)
    wholes: list[int] = field(default_factory=list)

    def figures(self) -> Json:
        """The fields of a window event that are known from the clock."""
        p50, p95, longest = _quantiles([*map(sum, self.rows), *self.wholes])
        return {
            "wall_ns": self.wall_ns, "phases": self.phases(), "step_p50_ns": p50, "step_p95_ns": p95,
            "step_max_ns": longest, "device_steps": len(self.device), "timed_steps": len(self.rows),
        }  # fmt: skip

    def phases(self) -> dict[str, Json]:
        """The `phases` field of a window event. Sub-phases also count towards their parent."""
        out: dict[str, Json] = {}
        # Steps recorded before a sub-phase was first entered are shorter.
        rest, *rows = (row + [0] * (len(self.names) - len(row)) for row in (self.rest, *self.rows))
        columns = list(zip(*rows, strict=True)) or [()] * len(self.names)
        places: dict[str, list[int]] = {}
        for index, name in enumerate(self.names):
            for key in {name, name.partition("/")[0]}:
                places.setdefault(key, []).append(index)
        left = whole_ns = sum(self.wholes)
        timed_ns = sum(map(sum, rows))
        for name, own in places.items():
            several = len(own) > 1
            values = [*map(sum, zip(*(columns[i] for i in own), strict=True))] if several else columns[own[0]]
            total = sum(values)
            share = left if name == PHASES[OTHER] else round(whole_ns * total / timed_ns) if timed_ns else 0
            if "/" not in name:
                left -= share
            total += share + sum(rest[i] for i in own)
            outside = self.outside.get(own[0])
            if not total and outside is None:
                continue
            device = [v for row in self.device for i in own if i < len(row) and (v := row[i]) is not None]
            on_device = sum(device) / len(self.device) if device else outside
            p50, p95, longest = _quantiles(values)
            out[name] = {
                "host_ns": total,
                "p50_ns": p50,
                "p95_ns": p95,
                "max_ns": longest,
                "device_ns": None if on_device is None else round(on_device),
            }
        return out


def _quantiles(values: Iterable[int]) -> tuple[int | None, int | None, int | None]:
    """(p50, p95, max)."""
    ordered = sorted(values)
    if not ordered:
        return None, None, None
    last = len(ordered) - 1
    return ordered[len(ordered) // 2], ordered[min(int(len(ordered) * 0.95), last)], ordered[last]


class PhaseClock:
    """The host clock. `now` returns nanoseconds of a monotonic clock; tests pass their own.

    failed: the first error of a GPU's clock; "" without one.
    """

    failed = ""

    def __init__(self, now: Callable[[], int] = time.perf_counter_ns) -> None:
        self.now = now
        # Nanoseconds of waiting for data before the window.
        self._waited_ns = 0
        # If set, called at every phase change with (time, index of the phase that begins). Must not raise.
        self.listener: Callable[[int, int], None] | None = None
        self.names = list(PHASES)
        # Of the phase it was entered from, and its name without that: the index of a sub-phase.
        self._parts: dict[tuple[int, str], int] = {}
        self._current = OTHER
        self._rows: list[list[int]] = []
        self._row = [0] * len(PHASES)
        self._start = self._last = now()

    def enter(self, phase: int) -> None:
        """Switch to `phase`."""
        now = self.now()
        self._row[self._current] += now - self._last
        self._last = now
        self._current = phase
        if self.listener is not None:
            self.listener(now, phase)

    def end_step(self) -> int:
        """End the step and switch to `other`. Returns the current time in nanoseconds."""
        self.enter(OTHER)
        self._rows.append(self._row)
        self._row = [0] * len(self.names)
        return self._last

    def enter_part(self, name: str) -> int:
        """Switch to the sub-phase `name` of the current phase; returns the phase to go back to."""
        outer = self._current
        index = self._parts.get((outer, name))
        if index is None:
            index = self._parts[outer, name] = self._part(outer, name)
        self.enter(index)
        return outer

    def _part(self, outer: int, name: str) -> int:
        key = f"{self.names[outer].partition('/')[0]}/{name}"
        if key not in self.names:
            self.names.append(key)
            self._row.append(0)
        return self.names.index(key)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time inside towards the sub-phase "<current phase>/<name>"."""
        outer = self.enter_part(name)
        try:
            yield
        finally:
            self.enter(outer)

    @property
    def current(self) -> str:
        """Name of the current phase."""
        return self.names[self._current]

    @property
    def last_row(self) -> list[int]:
        """Nanoseconds of the phases of the last step that ended, indexed like `names`; shorter if names were added."""
        return self._rows[-1]

    @property
    def window_ns(self) -> int:
        """Length of the window up to the last phase change."""
        return self._last - self._start

    @property
    def changed_ns(self) -> int:
        """When the phase changed last; any thread may read it."""
        return self._last

    def take(self) -> Window:
        """Return the window and begin the next one."""
        self.enter(self._current)
        window = Window(list(self.names), self._last - self._start, self._rows, self._row)
        self._waited_ns += self._waited_in_window()
        self._rows = []
        self._row = [0] * len(self.names)
        self._start = self._last
        return window

    def waited(self) -> int:
        """Nanoseconds of waiting for data so far."""
        return self._waited_ns + self._waited_in_window()

    def _waited_in_window(self) -> int:
        return sum(row[DATA_WAIT] for row in (*self._rows, self._row))

    def skip(self) -> None:
        """Drop the time since the last phase change (a pause). Call with an empty window."""
        self._start = self._last = self.now()


class DevicePhaseClock(PhaseClock):
    """The host clock plus, on some steps, the clock of the GPU, see `ndd_watch.clock`.

    make_event: creates an event that times. current_stream: of this thread. The clock chooses the steps with events by
    itself, unless `choose` leaves that to the caller.
    """

    def __init__(
        self,
        make_event: Callable[[], Any],
        now: Callable[[], int] = time.perf_counter_ns,
        current_stream: Callable[[], Any] = lambda: None,
    ) -> None:
        super().__init__(now)
        self._device = DeviceClock()
        self._device.prepare(make_event, current_stream)
        self._device_rows: list[list[float | None]] = []
        self._evaluates = False
        self._chosen: Callable[[int, list[float | None]], None] | None = None

    def choose(self, measured: Callable[[int, list[float | None]], None]) -> None:
        """Only steps that `sample` chooses carry events.

        measured: called with the key of such a step and its device times (indexed like `names`) when they are known.
        """
        self._chosen = measured

    def sample(self, key: int) -> None:
        """The step that begins now carries events. Between steps."""
        self._device.begin(self._current, key)

    def enter(self, phase: int) -> None:
        now = self.now()
        self._row[self._current] += now - self._last
        self._last = now
        self._current = phase
        if self.listener is not None:
            self.listener(now, phase)
        if self._device.marks:
            if phase in (EVALUATE, CHECKPOINT):
                # Not part of a step, and rare: in one of ten sampled steps they would count as if in every step.
                self._device.drop()
            else:
                self._device.mark(phase)
        evaluates = self.names[phase].startswith(PHASES[EVALUATE])
        if evaluates != self._evaluates:
            self._evaluates = evaluates
            if evaluates:
                self._device.leave_steps(EVALUATE)
            else:
                self._device.back_to_steps()
                self._device.set_aside()

    def end_step(self) -> int:
        now = super().end_step()
        self._device.end()
        self._read()
        if self._chosen is None and now >= self._device.due:
            self._device.due = now + SAMPLE_NS
            self.sample(0)
        return now

    def _read(self) -> None:
        read = self._device.read()
        self.failed = self._device.failed
        for key, times in read:
            row = [times.get(index) for index in range(len(self.names))]
            self._device_rows.append(row)
            if self._chosen is not None:
                self._chosen(key, row)

    def take(self) -> Window:
        window = super().take()
        self._read()
        window.device, window.outside = self._device_rows, self._device.outside()
        self._device_rows = []
        return window

    def skip(self) -> None:
        super().skip()
        self._device.drop()


def no_phase(_phase: int) -> None:
    """Stands in for `PhaseClock.enter` where a step runs untimed."""
