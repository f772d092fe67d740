"""Timelines and curves keep sums, means and extremes of a run of any length; axes suit their values."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ndd_console.render.html import time_axis, value_axis
from ndd_console.report.model import CAPACITY, Curve, RunClock, RunTimeline
from ndd_engine.text import percent

from .report_help import window

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=3000)


@given(VALUES)
def test_a_curve_keeps_mean_and_extremes(values: list[float]) -> None:
    curve = Curve()
    for index, value in enumerate(values):
        curve.add(float(index), value)
    assert len(curve.points) <= CAPACITY
    assert sum(point.count for point in curve.points) == len(values)
    assert min(point.low for point in curve.points) == min(values)
    assert max(point.high for point in curve.points) == max(values)
    assert curve.mean == pytest.approx(sum(values) / len(values), abs=1e-3)
    assert all(a.last < b.first for a, b in zip(curve.points, curve.points[1:], strict=False))


def test_a_curve_is_cut_where_nothing_was_recorded() -> None:
    curve = Curve()
    for x in [*range(50), *range(100, 150)]:
        curve.add(float(x), 1.0)
    assert [len(piece) for piece in curve.pieces(150.0)] == [50, 50]
    curve.add(151.0, float("nan"))
    assert len(curve.points) == 100


@given(st.lists(st.tuples(st.integers(1, 50), st.floats(0.0, 3.0)), min_size=1, max_size=200))
def test_a_timeline_keeps_the_sums(windows: list[tuple[int, float]]) -> None:
    timeline = RunTimeline()
    end = 0.0
    made = []
    for steps, gap in windows:
        item = window(18, steps, cuda=True)
        end += gap + item.wall_ns * 1e-9
        timeline.add(end, item)
        made.append(item)
    whole = timeline.whole
    assert whole.wall_ns == pytest.approx(sum(item.wall_ns for item in made), rel=1e-6)
    assert whole.steps == pytest.approx(sum(item.steps for item in made))
    assert whole.host["backward"] == pytest.approx(sum(item.phases["backward"]["host_ns"] for item in made))
    width, columns = timeline.slices(64)
    assert max(columns, default=0) < 64
    # No slice holds more time than its length.
    assert all(item.wall_ns <= width * 1e9 * 1.001 for item in columns.values())


def test_the_clock_never_decreases_and_skips_the_time_between_processes() -> None:
    clock = RunClock()
    assert [clock.at(t) for t in (1000.0, 1010.0, 1005.0)] == [0.0, 10.0, 10.0]
    clock.resume(90_000.0)
    assert clock.at(90_004.0) == 14.0


@given(st.floats(0.001, 1e8))
def test_a_time_axis_has_a_few_marks_in_one_unit(length: float) -> None:
    axis = time_axis(length)
    assert 1 <= len(axis.ticks) <= 10
    assert all(0 <= value <= length * 1.001 and label.endswith(axis.unit) for value, label in axis.ticks)


@given(
    st.floats(-1e12, 1e12, allow_subnormal=False),
    st.floats(-1e12, 1e12, allow_subnormal=False),
    st.sampled_from(["plain", "share", "bytes", "seconds"]),
    st.booleans(),
)
def test_a_value_axis_holds_its_values(a: float, b: float, kind: str, log: bool) -> None:
    low, high = sorted((a, b))
    if 0 < high - low < 1e-9 * max(abs(low), abs(high)):
        return  # closer than in any plot
    axis = value_axis(low, high, kind, "", log)  # type: ignore[arg-type]
    slack = 1e-6 * max(abs(low), abs(high), 1e-300)
    assert axis.low <= low + slack and axis.high >= high - slack
    assert 1 <= len(axis.ticks) <= 12
    assert 0 <= axis.place(low) <= axis.place(high) <= 1


def test_a_small_share_is_not_shown_as_zero() -> None:
    shown = [percent(value) for value in (None, 0.0, 0.0002, 0.012, 0.57)]
    assert shown == ["n/a", "0 %", "<0.1 %", "1.2 %", "57 %"]
