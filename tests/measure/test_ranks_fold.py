"""A straggler is named with its phase, at any number of ranks; ranks that only differ by noise are not."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from qa.ranks.simulated import Planted, compared, named

from ndd_engine.measure.stragglers import KEPT_WINDOWS, TOLD_STEPS, WARM_UP, compared_steps
from ndd_engine.record.events import PHASES, decode

WHERE = ("data_wait", "forward", "backward", "optimizer")
# Least part of the runs in which the planted rank and phase are named.
NAMED = 0.95


def share_named(world: int, late_ms: float, runs: int) -> float:
    right = 0
    for seed in range(runs):
        rng = random.Random(seed)
        rank, phase = rng.randrange(world), rng.choice(WHERE)
        events = Planted(world, late=(rank,), late_ms=late_ms, phase=phase).events(20, seed)
        right += named(events) == (rank, phase)
    return right / runs


@pytest.mark.parametrize(
    ("world", "late_ms", "runs"), [(2, 5.0, 60), (2, 20.0, 20), (8, 5.0, 30), (64, 6.0, 1)]
)
def test_a_late_rank_and_its_phase_are_named(world: int, late_ms: float, runs: int) -> None:
    assert share_named(world, late_ms, runs) >= NAMED


@pytest.mark.parametrize(("world", "runs"), [(2, 60), (8, 20), (64, 3)])
def test_no_rank_is_named_for_noise(world: int, runs: int) -> None:
    for seed in range(runs):
        assert all(event.late is None for event in Planted(world).events(20, seed)), seed


@pytest.mark.parametrize(
    ("planted", "expected"),
    [
        # All of a host become as fast as the others, not only one.
        (
            Planted(64, late=tuple(range(24, 32)), late_ms=12.0, phase="forward", noise=(0.005, 0.01)),
            {"host": "node3", "count": 8, "same_host": True, "ceiling": pytest.approx(1.16, abs=0.05)},
        ),
        (
            Planted(32, late=(3, 20), late_ms=15.0, noise=(0.005, 0.01)),
            {"count": 2, "same_host": False, "rank": 3},
        ),
        # The ceiling is the time until the next slowest.
        (
            Planted(
                2, late=(1,), late_ms=20.0, noise=(0.0, 0.0), lasting=0.0, stalls=0.0, places=("text.py:8 load",)
            ),
            {
                "rank": 1, "late_ns": pytest.approx(20e6, rel=0.05), "phase_ns": pytest.approx(20e6, rel=0.01),
                "ceiling": pytest.approx(95.1 / 75.1, rel=0.02), "where": "text.py:8 load",
            },
        ),
    ],
    ids=["host", "two hosts", "one"],
)  # fmt: skip
def test_what_is_told_of_late_ranks(planted: Planted, expected: dict[str, Any]) -> None:
    late = planted.events()[-1].late
    assert late is not None and {name: late[name] for name in expected} == expected


def test_a_rank_that_recovers_is_no_longer_named_and_since_is_its_first_window() -> None:
    slow, fast = Planted(2, late=(1,), late_ms=20.0), Planted(2)
    windows = [*slow.windows(20, 1), *fast.windows(30, 2, begin=80)]
    late = [event.late for event in compared(fast.comparison(), windows)]
    assert late[19] is not None
    assert {item["since_step"] for item in late[12:20] if item} == {late[19]["since_step"]}
    assert late[-1] is None


def test_more_windows_show_a_smaller_delay() -> None:
    runs = [Planted(2, late=(1,), late_ms=3.5, phase="backward").events(70, seed) for seed in range(12)]
    assert sum(named(events) == (1, "backward") for events in runs) >= NAMED * len(runs)
    early = [event.late for events in runs for event in events[: 2 * KEPT_WINDOWS]]
    assert sum(late is not None for late in early) < len(early) / 2


def test_a_rank_that_recovers_is_not_named_for_what_more_windows_show() -> None:
    late, well = Planted(2, late=(1,), late_ms=8.0), Planted(2)
    windows = [*late.windows(40, 3), *list(well.windows(41 + KEPT_WINDOWS, 4, begin=156))[1:]]
    events = compared(well.comparison(), windows)
    assert events[39].late is not None and events[39].late["rank"] == 1
    assert all(event.late is None for event in events[40 + KEPT_WINDOWS :])


def test_nothing_is_named_before_there_is_enough() -> None:
    events = Planted(2, late=(1,), late_ms=40.0, noise=(0.0, 0.0)).events(WARM_UP + 5)
    assert all(event.late is None for event in events)


def test_means_add_up_to_the_step() -> None:
    for planted in (Planted(2, late=(1,), late_ms=9.0), Planted(64)):
        for event in planted.events(5):
            phases = sum(event.columns_us[name][2] for name in PHASES if name in event.columns_us)
            waits = (event.exchange_ns + event.skew_ns) / event.steps / 1e3
            assert phases + waits == pytest.approx(event.wall_ns / event.steps / 1e3, rel=1e-4)


def test_evaluations_and_checkpoints_are_no_part_of_what_is_compared() -> None:
    names = ("forward", "forward/part", "backward/exchange", "checkpoint", "checkpoint/exchange")
    told = compared_steps(6, 4, names, {4: [10, 1, 5, 0, 0], 5: [20, 2, 5, 900, 30]})
    assert (told.numbers, told.own_ns, told.wait_ns) == ([0, 1], [11, 22], [5, 5])
    assert told.phases_ns == {"forward": 33}


def test_of_many_short_steps_all_ranks_tell_of_the_same_ones() -> None:
    rows = {step: [1, step] for step in range(1000, 3000)}
    one, other = (compared_steps(3000, 1000, ("forward", name), rows) for name in ("clip", "clip/exchange"))
    assert one.numbers == other.numbers and TOLD_STEPS / 2 < len(one.numbers) < 2 * TOLD_STEPS


def test_unknown_figures_are_left_out() -> None:
    planted = Planted(3)
    unknown: dict[str, Any] = dict.fromkeys(("hidden_ns", "cpu_ns", "rss_bytes"))
    window = [replace(told, **unknown) for told in next(planted.windows(1, 1))]
    (event,) = compared(planted.comparison(), [window])
    assert (event.hidden_ns, event.memory_bytes) == (None, {})
    assert "cpu" not in event.columns_us and "cpu" not in event.row_names


def test_a_window_without_timed_steps_is_no_event() -> None:
    planted = Planted(2)
    first, second = planted.windows(2, 1)
    empty = [replace(told, numbers=[], own_ns=[], wait_ns=[]) for told in first]
    assert [event.step for event in compared(planted.comparison(), [empty, second])] == [second[0].step]


@pytest.mark.parametrize("world", [2, 9, 64, 1024, 4096])
def test_a_window_is_small_in_the_record_and_shows_the_late_rank(world: int) -> None:
    where = "some/quite/long/path/of/a/package/dataset.py:1234 __getitem__"
    late = world * 2 // 3
    planted = Planted(world, late=(late,), late_ms=20.0, places=(where,), noise=(0.01, 0.02))
    events = replace(planted, steps=40).events(9 if world < 4096 else 1)
    text = events[-1].to_json(1_750_000_000.1234)
    assert len(text) <= 2048 and len(events[-1].rows_us) == min(world, 8)
    assert decode(text) == (pytest.approx(1_750_000_000.1234), events[-1])
    if world == 1024:
        assert named(events) == (late, "data_wait")
        # The heat map has one cell for 8 ranks.
        assert (events[-1].cell_ranks, len(events[-1].cells)) == (8, 128)
        assert max(events[-1].cells) == events[-1].cells[late // 8]
        assert events[-1].row_hosts[str(late)] == f"node{late // 8}"
