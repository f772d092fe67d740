"""Step times between measured micro-batches, and other processes on the cores while steps are timed."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import asdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ndd_engine.child import decoded
from ndd_engine.predict.estimate import StepTime, TimedBatch, merged, spread, variation
from ndd_engine.predict.outlook import CoreWatch, disturbed
from ndd_engine.record.snapshot import CoreUse


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
        (busy, "7.58"),
    ):
        points = (TimedBatch(8, 0.1, 0.1, 0.0, variation(times)), TimedBatch(16, 0.2, 0.2, 0.0))
        told = StepTime(points, 0.0, on_gpu=False).doubt
        assert doubt in told and bool(told) == bool(doubt)
    # A few slow steps among many are usual.
    assert (variation([0.1] * 19 + [0.5]) or 0.0) == 0.0


NAMED = ((812, "blender", 1.4),)


def use(own: float, others: float, samples: int = 8, named: bool = True) -> CoreUse:
    return CoreUse(own + others, own, others, 4.0, samples, NAMED if named else ())


@pytest.mark.parametrize(
    ("found", "on_gpu", "reported"),
    [
        (use(2.5, 1.4), False, True),
        (use(3.9, 0.1), False, False),  # the steps have all cores
        (use(2.0, 0.5), False, False),  # cores are left
        (use(2.5, 1.4, samples=2), False, False),  # too short to judge
        (use(3.2, 0.5, named=False), False, False),  # may be children that just started
        (use(2.5, 1.4, named=False), False, True),
        (use(1.0, 3.0), True, False),  # the core that launches kernels is its own
        (use(0.6, 3.4), True, True),
        (None, False, False),
    ],
)
def test_steps_are_disturbed_if_others_use_cores_that_they_want(
    found: CoreUse | None, on_gpu: bool, reported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert disturbed(found, on_gpu) == (found if reported else None)


def test_one_thread_with_a_core_of_its_own_is_not_disturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert disturbed(use(1.0, 3.0), False) is None
    assert disturbed(use(0.7, 3.3), False) is not None


def test_the_watch_counts_the_work_of_this_process_as_its_own() -> None:
    before = set(threading.enumerate())
    with CoreWatch() as cores:
        end = time.process_time() + 0.5
        while time.process_time() < end:
            pass
    assert set(threading.enumerate()) <= before
    assert cores.use is not None and cores.use.samples >= 2
    assert cores.use.by_run > 0
