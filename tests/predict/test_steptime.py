"""Interpolation between measured micro-batches."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ndd_engine.child import decoded
from ndd_engine.predict.estimate import StepTime, TimedBatch, merged, spread, variation


def line(
    micros: list[int], fixed: float = 1e-3, each: float = 1e-4, data: float = 2e-5, host: float = 0.0
) -> StepTime:
    """Linear times. host: constant host seconds, which makes it a GPU."""
    points = [
        TimedBatch(micro, fixed + each * micro, host or fixed + each * micro, data * micro)
        for micro in micros
    ]
    return StepTime(tuple(points), 5e-4, on_gpu=host > 0)


def test_a_straight_line_is_reproduced() -> None:
    time = line([2, 16, 64])
    for micro in (1, 2, 7, 64, 300):
        assert time.micro_s(micro) == pytest.approx(1e-3 + 1.2e-4 * micro)
    assert time.step_s(8, 4) == pytest.approx(4 * (1e-3 + 1.2e-4 * 8) + 5e-4)


def test_workers_load_in_parallel_with_the_model() -> None:
    slow = line([2, 16], data=1e-3)
    assert slow.micro_s(16) == pytest.approx(1e-3 + 1.6e-3 + 16e-3)
    assert slow.micro_s(16, workers=2) == pytest.approx(8e-3)
    assert line([2, 16]).micro_s(16, workers=2) == pytest.approx(2.6e-3)


def test_on_a_gpu_the_slower_of_host_and_gpu_determines_the_time() -> None:
    time = line([1, 8, 64], fixed=1e-4, data=0.0, host=3e-3)
    assert time.micro_s(4) == pytest.approx(3e-3)
    assert time.micro_s(64) == pytest.approx(1e-4 + 6.4e-3)
    assert time.knee() == 29
    assert line([1, 8, 64]).knee() is None


def test_a_single_point_is_scaled_proportionally() -> None:
    assert line([4], fixed=0.0).micro_s(8) == pytest.approx(2 * line([4], fixed=0.0).micro_s(4))


@given(
    st.lists(st.tuples(st.integers(1, 500), st.floats(1e-6, 1.0)), min_size=1, max_size=5),
    st.integers(1, 5000),
)
def test_time_is_never_negative(points: list[tuple[int, float]], micro: int) -> None:
    time = StepTime(merged(TimedBatch(size, seconds, seconds, 0.0) for size, seconds in points), 0.0, False)
    assert time.micro_s(micro) > 0
    assert decoded(StepTime, json.loads(json.dumps(asdict(time)))) == time


@pytest.mark.parametrize(
    ("least", "most", "expected"), [(2, 128, [2, 16, 128]), (2, 3, [2, 3]), (4, 4, [4]), (4, 1, [1])]
)
def test_sizes_are_spaced_geometrically(least: int, most: int, expected: list[int]) -> None:
    assert spread(least, most) == expected


def test_times_that_vary_much_have_low_confidence() -> None:
    quiet = [0.1, 0.102, 0.101, 0.11]
    busy = [0.1, 0.1, 0.25, 0.758, 0.4]
    assert variation(quiet[:2]) is None
    for times, doubt in (
        (quiet, ""),
        (busy, "repeated steps vary by 658% (a busy machine, or items of different lengths)"),
    ):
        points = (TimedBatch(8, 0.1, 0.1, 0.0, variation(times)), TimedBatch(16, 0.2, 0.2, 0.0))
        assert StepTime(points, 0.0, on_gpu=False).doubt == doubt
    # A few slow steps among many are usual.
    assert (variation([0.1] * 19 + [0.5]) or 0.0) == 0.0
