"""Other processes on the cores while steps are timed."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from ndd_engine.predict.outlook import CoreWatch, disturbed
from ndd_engine.record.snapshot import CoreUse

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
    assert cores.use.own > 0
