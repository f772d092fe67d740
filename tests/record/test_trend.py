"""A curve of any length keeps its shape, its end and its mean in a bounded number of points."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ndd_engine.record.events import checker
from ndd_engine.record.state import CAPACITY, Trend


def trend_of(values: list[float]) -> Trend:
    trend = Trend()
    for x, value in enumerate(values, start=1):
        trend.add(x, value)
    return trend


@given(st.integers(1, 3000), st.randoms(use_true_random=False))
def test_few_points_the_whole_range_the_same_mean(count: int, random: object) -> None:
    values = [random.uniform(-5, 5) for _ in range(count)]  # type: ignore[attr-defined]
    trend = trend_of(values)
    view = trend.view()
    assert len(view) <= CAPACITY
    assert [x for x, _ in view] == sorted({x for x, _ in view})
    assert view[-1][0] == count
    # Every bucket is the mean of its own values, so the weighted mean is the mean of all.
    begin = 0
    for x, mean in view:
        assert mean == pytest.approx(sum(values[begin:x]) / (x - begin))
        begin = x
    assert begin == count


def test_short_curves_are_kept_exactly() -> None:
    values = [float(index) for index in range(CAPACITY - 1)]
    assert trend_of(values).view() == tuple(enumerate(values, start=1))


def test_first_and_last_points_stay_at_the_ends() -> None:
    view = trend_of([10.0] + [5.0] * 100_000 + [1.0]).view()
    assert len(view) <= CAPACITY
    assert view[-1][0] == 100_002
    assert view[0][0] <= 100_002 / (CAPACITY / 4)
    assert view[0][1] > view[len(view) // 2][1] > view[-1][1]


def test_cut_forgets_what_came_later_and_goes_on() -> None:
    trend = trend_of([float(x) for x in range(1, 101)])
    trend.cut(40)
    assert trend.view()[-1] == (40, 40.0)
    trend.add(41, 7.0)
    assert trend.view()[-1] == (41, 7.0)


def test_cut_inside_a_bucket_keeps_x_rising() -> None:
    trend = trend_of([1.0] * 5000)
    trend.cut(3001)
    assert max(x for x, _ in trend.view()) <= 3001
    for x in range(3002, 4000):
        trend.add(x, 1.0)
    xs = [x for x, _ in trend.view()]
    assert xs == sorted(set(xs))
    assert xs[-1] == 3999


@given(st.integers(0, 1200), st.integers(0, 600))
def test_written_and_read_back_it_goes_on_the_same(before: int, after: int) -> None:
    trend = trend_of([x * 0.5 for x in range(before)])
    again = checker(Trend).validate_python(json.loads(json.dumps(asdict(trend))))
    for x in range(after):
        trend.add(before + x + 1, float(x))
        again.add(before + x + 1, float(x))
    assert again.view() == trend.view()
    assert again == trend
