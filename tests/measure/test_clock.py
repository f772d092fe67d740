"""The clock: every nanosecond of a window belongs to exactly one phase, and the clock never waits for the device."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ndd_engine.measure.window import Window
from ndd_engine.record.events import PHASES
from ndd_watch import clock as phase
from ndd_watch.clock import NEVER, SAMPLE_NS, PhaseClock

MS = 1_000_000


class Time:
    """A monotonic clock that tests advance."""

    def __init__(self) -> None:
        self.now = 1_000

    def __call__(self) -> int:
        return self.now


class Model:
    """The same accounting done naively: a list of (step, phase, nanoseconds); step -1 for what is in none."""

    def __init__(self) -> None:
        self.current = "other"
        self.step = 0
        self.done = 0
        self.spans: list[tuple[int, str, int]] = []

    def pass_time(self, ns: int) -> None:
        self.spans.append((self.step, self.current, ns))

    def end_step(self) -> None:
        """What is outside of the steps, as an evaluation, is not part of the one that ends."""
        self.spans = [
            (-1 if name.startswith(("evaluate", "checkpoint")) else step, name, ns)
            for step, name, ns in self.spans
        ]
        self.step += 1
        self.current = "other"

    def check(self, window: Window) -> None:
        """Compare with a window that was taken, and begin the next one."""
        phases = window.phases()
        assert window.wall_ns == sum(ns for *_, ns in self.spans)
        # Closed by construction: the phases, without the parts that their parents hold already, are the whole.
        assert (
            sum(figures["host_ns"] for name, figures in phases.items() if "/" not in name) == window.wall_ns
        )
        steps = range(self.done, self.step)
        totals = [sum(ns for step, _, ns in self.spans if step == each) for each in steps]
        figures = window.figures()
        found = [figures[f"step_{name}_ns"] for name in ("p50", "p95", "max")]
        assert found == [quantile(totals, 0.5), quantile(totals, 0.95), max(totals, default=None)]
        for name, figures in phases.items():
            mine = [span for span in self.spans if span[1] == name or span[1].startswith(f"{name}/")]
            assert figures["host_ns"] == sum(ns for *_, ns in mine)
            each = [sum(ns for step, _, ns in mine if step == index) for index in steps]
            expected = (quantile(each, 0.5), quantile(each, 0.95), max(each, default=None))
            assert (figures["p50_ns"], figures["p95_ns"], figures["max_ns"]) == expected
            assert figures["device_ns"] is None
        assert {name for _, name, ns in self.spans if ns} <= set(phases)
        self.spans = []
        self.done = self.step


def quantile(values: list[int], share: float) -> int | None:
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)] if ordered else None


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["enter", "enter", "enter", "part", "end_step", "take", "skip"]),
        st.integers(0, len(PHASES) - 1),
        st.sampled_from(["encoder", "decoder"]),
        st.integers(0, 5_000),
        st.integers(0, 5_000),
    ),
    max_size=80,
)


@given(OPERATIONS, st.booleans())
def test_phases_and_other_are_the_wall_time_whatever_happens(operations: list[Any], device: bool) -> None:
    time = Time()
    # A device whose events are never done: the host's accounting must not notice it.
    clock = on_device(time, 10**15) if device else PhaseClock(time)
    model = Model()
    for name, index, part, before, inside in operations:
        time.now += before
        model.pass_time(before)
        if name == "enter":
            clock.enter(index)
            model.current = PHASES[index]
        elif name == "part":
            with clock.part(part):
                assert clock.current == f"{model.current}/{part}"
                time.now += inside
                outer, model.current = model.current, f"{model.current}/{part}"
                model.pass_time(inside)
            model.current = outer
        elif name == "end_step":
            assert clock.end_step() == time.now
            model.end_step()
        else:
            model.check(Window.of(clock))
            if name == "skip":
                time.now += inside  # a pause: it belongs to nothing
                clock.skip()
        assert clock.current == model.current
    model.check(Window.of(clock))


class FakeEvent:
    """A CUDA event: done `lag` nanoseconds after it was recorded. Waiting for it fails the test."""

    made = 0

    def __init__(self, time: Time, lag: int) -> None:
        type(self).made += 1
        self.time, self.lag = time, lag
        self.at: int | None = None

    def record(self, _stream: object = None) -> None:
        self.at = self.time.now

    def query(self) -> bool:
        assert self.at is not None
        return self.time.now >= self.at + self.lag

    def elapsed_time(self, end_event: FakeEvent) -> float:
        assert self.query(), "read before it was done"
        assert end_event.query(), "read before it was done"
        assert end_event.at is not None
        assert self.at is not None
        return (end_event.at - self.at) / 1e6

    def synchronize(self) -> None:
        pytest.fail("the clock waited for the device")

    wait = synchronize


def steps(clock: PhaseClock, time: Time, count: int, forward_ms: int = 30, wait_ms: int = 10) -> None:
    for _ in range(count):
        clock.enter(phase.DATA_WAIT)
        time.now += wait_ms * MS
        clock.enter(phase.FORWARD)
        time.now += forward_ms * MS
        clock.end_step()


def device(lag_ms: int) -> tuple[PhaseClock, Time]:
    """A clock whose events are done so much later, and its time."""
    time = Time()
    FakeEvent.made = 0
    return on_device(time, lag_ms * MS), time


def on_device(time: Time, lag_ns: int) -> PhaseClock:
    clock = PhaseClock(time)
    clock.gpu.prepare(lambda: FakeEvent(time, lag_ns), lambda: None)
    return clock


def test_device_times_arrive_steps_later_without_waiting() -> None:
    clock, time = device(60)
    steps(clock, time, 2)
    early = Window.of(clock)
    assert early.device == []  # recorded, but the device is not there yet
    assert early.phases()["forward"]["device_ns"] is None
    steps(clock, time, 60)
    phases = Window.of(clock).phases()
    assert phases["forward"]["device_ns"] == 30 * MS
    assert phases["data_wait"]["device_ns"] == 10 * MS


def test_only_some_steps_carry_events_which_are_used_again() -> None:
    clock, time = device(150)
    steps(clock, time, 200)
    made = FakeEvent.made
    steps(clock, time, 2000, forward_ms=1, wait_ms=1)  # four seconds of short steps
    steps(clock, time, 2000)
    assert FakeEvent.made == made
    window = Window.of(clock)
    assert 0 < len(window.device) <= window.wall_ns // SAMPLE_NS + 1
    # A device that never gets done costs a bounded number of them.
    clock, time = device(10**9)
    steps(clock, time, 3000)
    assert FakeEvent.made < 100


def test_a_part_counts_for_its_phase_and_a_part_within_a_part_too_also_after_an_exception() -> None:
    clock, time = device(0)
    for _ in range(30):
        clock.enter(phase.FORWARD)
        time.now += 1 * MS
        with suppress(RuntimeError), clock.part("encoder"):
            time.now += 10 * MS
            with clock.part("attention"):
                time.now += 100 * MS
                raise RuntimeError
        assert clock.current == "forward"
        time.now += 1 * MS
        clock.end_step()
    phases = Window.of(clock).phases()
    for name, ms in {"forward": 112, "forward/encoder": 10, "forward/attention": 100}.items():
        assert (phases[name]["host_ns"], phases[name]["device_ns"]) == (30 * ms * MS, ms * MS)


@pytest.mark.parametrize("lag_ms", [0, 60])
def test_each_evaluation_is_timed_on_the_device(lag_ms: int) -> None:
    clock, time = device(lag_ms)
    spent = []
    for count in (1, 2, 0):
        steps(clock, time, 30)
        for _ in range(count):
            clock.evaluation(True)
            time.now += 200 * MS
            with clock.part("encoder"):
                time.now += 200 * MS
            clock.evaluation(False)
        steps(clock, time, 3)
        phases = Window.of(clock).phases()
        assert phases["forward"]["device_ns"] == 30 * MS
        spent.append((phases.get("evaluate") or {"device_ns": 0})["device_ns"])
    assert spent == [400 * MS, 800 * MS, 0]


def test_an_evaluation_that_the_device_has_not_done_yet_is_in_the_next_window() -> None:
    clock, time = device(100)
    clock.evaluation(True)
    time.now += 400 * MS
    clock.evaluation(False)
    early = Window.of(clock).phases()["evaluate"]
    steps(clock, time, 30)
    late = Window.of(clock).phases()["evaluate"]
    assert (early["host_ns"], early["device_ns"]) == (400 * MS, None)
    assert (late["host_ns"], late["device_ns"]) == (0, 400 * MS)


def test_a_pause_is_in_no_device_time() -> None:
    clock, time = device(0)
    steps(clock, time, 10)
    clock.take()
    time.now += 60_000 * MS
    clock.skip()
    steps(clock, time, 10)
    window = Window.of(clock)
    assert window.wall_ns == 400 * MS
    assert all(sum(row.values()) <= 41 * MS for _, row in window.device)


def test_the_caller_may_choose_the_steps_that_carry_events_unless_they_evaluate() -> None:
    clock, time = device(60)
    clock.gpu.due = NEVER
    for step in range(40):
        if step in (10, 20, 30):
            clock.gpu.begin(phase.OTHER, step)
        if step == 30:
            clock.enter(phase.EVALUATE)
            time.now += MS
        steps(clock, time, 1, forward_ms=step + 1)
    measured = [(key, row[phase.FORWARD]) for key, row in Window.of(clock).device]
    assert measured == [(10, 11 * MS), (20, 21 * MS)]
