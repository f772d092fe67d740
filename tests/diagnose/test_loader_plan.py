"""What a loader with other workers, another order or batches further ahead is predicted to bring."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ndd_engine.diagnose.loader_plan import LoaderPlan, batch_ns, enough

MS = 1e6
EVEN = LoaderPlan([20 * MS], 4 * MS, workers=2)
# One batch in ten takes twenty times as long.
TAIL = LoaderPlan([12 * MS] * 9 + [240 * MS], 4 * MS, workers=3)


def test_workers_share_the_time_of_batches() -> None:
    assert batch_ns(EVEN) == pytest.approx(10 * MS, rel=0.05)
    assert batch_ns(replace(EVEN, workers=4)) == pytest.approx(5 * MS, rel=0.05)
    assert batch_ns(replace(EVEN, workers=16)) == pytest.approx(4 * MS, rel=0.05)
    assert enough(EVEN) == 5


def test_without_workers_a_batch_is_made_in_between() -> None:
    assert batch_ns(replace(EVEN, workers=0)) == pytest.approx(24 * MS)


def test_batches_that_differ_wait_behind_a_slow_one() -> None:
    now = batch_ns(TAIL)
    assert batch_ns(replace(TAIL, in_order=False)) < 0.8 * now
    assert batch_ns(replace(TAIL, prefetch=8)) < 0.95 * now
    even = replace(TAIL, made_ns=[36 * MS])
    assert batch_ns(replace(even, in_order=False)) == pytest.approx(batch_ns(even), rel=0.03)


def test_cores_bound_what_workers_bring() -> None:
    bound = replace(EVEN, workers=16, cpu_ns=20 * MS, cores=2)
    assert batch_ns(bound) == pytest.approx(12 * MS, rel=0.05)


def test_settings_that_cannot_be_played_have_no_prediction() -> None:
    assert EVEN.with_settings(["loader.cache=true"]) is None
    # What a change to no workers takes back is torch's own number.
    assert EVEN.with_settings(["loader.workers=0", "loader.prefetch=none"]) == replace(EVEN, workers=0)
    assert EVEN.with_settings(["loader.workers=4", "loader.prefetch=8"]) == replace(
        EVEN, workers=4, prefetch=8
    )


def test_receiving_takes_the_time_of_the_training_and_pinning_that_of_another_thread() -> None:
    fast = replace(EVEN, workers=16)
    assert batch_ns(replace(fast, receive_ns=3 * MS)) == pytest.approx(7 * MS, rel=0.05)
    assert batch_ns(replace(fast, pin_ns=3 * MS)) == pytest.approx(4 * MS, rel=0.05)
    assert batch_ns(replace(fast, pin_ns=9 * MS)) == pytest.approx(9 * MS, rel=0.05)
    assert batch_ns(replace(fast, send_ns=6 * MS)) == pytest.approx(6 * MS, rel=0.05)


def test_persistent_workers_save_the_begins_of_passes_only() -> None:
    anew = replace(EVEN, persistent=False, start_ns=220 * MS, pass_batches=10)
    kept = anew.with_settings(["loader.persistent=true"])
    assert kept is not None
    assert batch_ns(anew) - batch_ns(kept) == pytest.approx(20 * MS, rel=0.01)
    assert batch_ns(replace(anew, pass_batches=0)) == batch_ns(EVEN)


def test_a_cache_leaves_what_joins_the_items() -> None:
    cached = replace(EVEN, cached_ns=1 * MS).with_settings(["loader.cache=true", "loader.workers=0"])
    assert cached is not None
    assert batch_ns(cached) == pytest.approx(5 * MS)


def test_sending_limits_workers_only() -> None:
    slow = replace(EVEN, sending_ns=60 * MS)
    assert batch_ns(slow) == pytest.approx(30 * MS, rel=0.05)
    assert batch_ns(replace(slow, workers=0)) == pytest.approx(24 * MS)
    cached = replace(slow, cached_ns=1 * MS).with_settings(["loader.cache=true"])
    assert cached is not None
    assert batch_ns(cached) == pytest.approx(30 * MS, rel=0.05)
