"""How long a rank works and waits for others: in a window, and in the steps that the ranks compare with each other.

On a GPU the host runs ahead of the device, and waits for it wherever the queue is full. There both come from CUDA
events, which some steps carry: the same steps on all ranks, one after each vote.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from math import inf

from ndd_engine.measure.clock import DevicePhaseClock, PhaseClock
from ndd_engine.record.events import WindowEvent
from ndd_engine.record.ranks import ASIDES

from .marks import PART

# Nanoseconds of (work, waiting for other ranks) in each phase.
Spans = dict[str, tuple[float, float]]
_UNKNOWN = (inf, 0.0)
# The steps between two votes are binned into so many parts, to find the least wait of each: (waits, works).
SLOTS = 128
Slots = tuple[list[float], list[float]]
NO_SPANS: Slots = ([0.0] * SLOTS, [0.0] * SLOTS)


class WindowSpans:
    """The spans of a window: by the host's clock, or the device's, once it has measured steps."""

    def __init__(self) -> None:
        self._device: dict[str, float] = {}

    def of(self, window: WindowEvent) -> Spans:
        """The work and the waiting of a window add up to its wall time.

        Device times are means of some steps: they are scaled to the wall time without evaluations and checkpoints,
        whose times remain those of the host. A window without such steps has the means of the one before.
        """
        host = _spans({name: times["host_ns"] for name, times in window.phases.items()})
        if window.device_steps:
            each = {name: times["device_ns"] for name, times in window.phases.items()}
            self._device = {name: value for name, value in each.items() if value is not None}
        aside = {name: host[name] for name in ASIDES if name in host}
        device = {name: both for name, both in _spans(self._device).items() if name not in ASIDES}
        total = sum(work + wait for work, wait in device.values())
        if not window.steps or total <= 0:
            return host
        scale = (window.wall_ns - sum(work + wait for work, wait in aside.values())) / total
        return {name: (work * scale, wait * scale) for name, (work, wait) in device.items()} | aside


def _spans(times: dict[str, float]) -> Spans:
    """times: by phase and sub-phase; a phase includes its sub-phases. Evaluations and checkpoints stay whole."""
    waits = {
        name: 0.0 if name in ASIDES else times.get(f"{name}/{PART}", 0.0) for name in times if "/" not in name
    }
    return {name: (times[name] - wait, wait) for name, wait in waits.items()}


class StepSpans:
    """Of the steps since the last vote: how long each waited for other ranks and worked, in nanoseconds."""

    def __init__(self, clock: PhaseClock) -> None:
        self._clock = clock
        self._names = 0  # names of the clock that were looked at
        self._waits: list[int] = []
        self._asides: list[int] = []
        self._rows: list[tuple[int, list[int]]] = []

    def step(self, step: int) -> None:
        """After each step."""
        self._rows.append((step, self._clock.last_row))

    def voting(self, place: Callable[[int], int]) -> Slots:
        """Before a vote: the sums of the steps that no vote has yet. place: returns the slot of a step."""
        waits, works = [0.0] * SLOTS, [0.0] * SLOTS
        rows, self._rows = self._rows, []
        for step, row in rows:
            slot, (wait, work) = place(step), self._split(row)
            waits[slot] += wait
            works[slot] += work
        return waits, works

    def voted(self) -> None:
        """After a vote, on all ranks after the same step."""

    def _split(self, row: Sequence[float | None]) -> tuple[float, float]:
        names = self._clock.names
        if len(names) != self._names:
            self._names = len(names)
            parts = [name.partition("/") for name in names]
            self._asides = [index for index, (phase, _, _) in enumerate(parts) if phase in ASIDES]
            self._waits = [
                index for index, (phase, _, part) in enumerate(parts) if part == PART and phase not in ASIDES
            ]
        wait, rest, count = 0.0, sum(filter(None, row)), len(row)
        for index in self._waits:
            if index < count:
                wait += row[index] or 0.0
        for index in self._asides:
            if index < count:
                rest -= row[index] or 0.0
        return wait, rest - wait


class DeviceStepSpans(StepSpans):
    """By CUDA events, which one step after each vote carries.

    It is not the step right after the vote, which includes the recording of a window. The device is behind the host, so
    a vote reports the last step but two that carried events. It stands for all steps since the vote before. If a rank
    does not know its times yet, its wait is infinite, which does not count in the minimum of all ranks.
    """

    def __init__(self, clock: DevicePhaseClock) -> None:
        super().__init__(clock)
        self._device = clock
        self._steps, self._due = 0, False
        self._keys: deque[int] = deque(maxlen=3)
        self._known: dict[int, tuple[float, float]] = {}
        clock.choose(self._measured)

    def step(self, step: int) -> None:
        self._steps += 1
        if self._due:
            self._due = False
            self._keys.append(step)
            self._known = {key: found for key, found in self._known.items() if key >= self._keys[0]}
            self._device.sample(step)

    def voting(self, place: Callable[[int], int]) -> Slots:
        steps, self._steps = self._steps, 0
        if not steps:
            return NO_SPANS
        full = len(self._keys) == self._keys.maxlen
        wait, work = self._known.get(self._keys[0], _UNKNOWN) if full else _UNKNOWN
        rest = [0.0] * (SLOTS - 1)
        return [wait * steps, *rest], [work * steps, *rest]

    def voted(self) -> None:
        self._due = True

    def _measured(self, key: int, row: list[float | None]) -> None:
        self._known[key] = self._split(row)


def step_spans(clock: PhaseClock) -> StepSpans:
    """By the device's clock where there is one."""
    return DeviceStepSpans(clock) if isinstance(clock, DevicePhaseClock) else StepSpans(clock)
