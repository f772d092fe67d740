"""The fold: the same Snapshot whether a run is watched live, attached late or replayed; curves of bounded length."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from qa.ranks.simulated import Planted
from record_help import (
    end,
    event_sequences,
    folded,
    mark,
    phase,
    run_event,
    setting,
    status,
    through_json,
    window,
)

from ndd_engine.record.event import across
from ndd_engine.record.events import Event, StageEvent, checker, decoded
from ndd_engine.record.state import (
    CAPACITY,
    KEPT_EVALUATIONS,
    KEPT_MARKS,
    KEPT_SETTINGS,
    RECENT_WINDOWS,
    RunState,
    Trend,
)


@settings(max_examples=100)
@given(event_sequences(), st.data())
def test_restoring_from_any_point_gives_the_same_snapshot(events: list[Event], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(events)))
    whole, first = RunState(), RunState()
    for index, event in enumerate(events):
        whole.fold(index * 0.25, event)
    for index, event in enumerate(events[:cut]):
        first.fold(index * 0.25, event)
    second = RunState.from_line(first.to_line(1.0))
    assert second.snapshot() == first.snapshot()
    for index, event in enumerate(events[cut:], start=cut):
        second.fold(index * 0.25, through_json(event))
    assert second.snapshot(3) == whole.snapshot(3)
    # Writing it again gives the same state, so that nothing changes over many of them.
    assert RunState.from_line(second.to_line(1.0)) == RunState.from_line(whole.to_line(1.0))


def test_a_figure_that_is_not_a_number_is_the_same_live_and_replayed() -> None:
    events = [
        run_event(),
        mark("evaluation", 5, metrics={"rmse": math.nan, "loss": 1.0}, better="lower"),
        mark("evaluation", 10, metrics={"rmse": 0.5, "loss": 1.0}, better="lower"),
    ]
    live = folded(*events).snapshot()
    assert live == folded(*map(through_json, events)).snapshot()
    assert live.best is not None
    assert live.best.step == 10


def test_a_state_with_other_fields_or_of_another_version_is_refused() -> None:
    good = json.loads(folded(run_event(), window(1)).to_line(1.0))
    state = good["state"]
    others = [{key: value for key, value in state.items() if key != name} for name in state]
    for changed in ({"v": 1}, *({"state": other} for other in (*others, {**state, "mood": "fine"}, 3))):
        with pytest.raises(ValueError):
            RunState.from_line(json.dumps({**good, **changed}))


def test_a_new_state_says_nothing_it_does_not_know() -> None:
    snapshot = RunState().snapshot()
    assert (snapshot.status, snapshot.progress, snapshot.final) == ("preparing", 0, False)
    assert (snapshot.run, snapshot.loss, snapshot.left.seconds, snapshot.micro_steps) == (None,) * 4
    assert (snapshot.steps_per_s, snapshot.step_ns, snapshot.idle.share) == (None,) * 3
    assert snapshot.idle.reason


def test_rates_are_of_the_recent_windows_without_evaluation_and_checkpoints() -> None:
    times = {"forward": 100_000_000, "evaluate": 300_000_000, "checkpoint": 100_000_000}
    overhead = window(2, 1, 500_000_000, phases={name: phase(ns) for name, ns in times.items()})
    snapshot = folded(run_event(), window(1, 1, 100_000_000), overhead, window(4, 2, 200_000_000)).snapshot()
    # Four steps in 400 ms of steps; the 400 ms aside count for the elapsed time only.
    assert (snapshot.step_ns, snapshot.elapsed_s) == (pytest.approx(100e6), pytest.approx(0.8))
    rates = (snapshot.steps_per_s, snapshot.items_per_s, snapshot.tokens_per_s)
    assert rates == pytest.approx((10, 160, 10_240))
    assert (snapshot.step, snapshot.items, snapshot.tokens) == (4, 64, 4096)
    # Only the newest windows count.
    slow = [window(step, 1, 10**10) for step in range(1, 6)]
    fast = [window(step, 1, 10**8) for step in range(6, 6 + RECENT_WINDOWS)]
    assert folded(run_event(), *slow, *fast).snapshot().steps_per_s == pytest.approx(10)


def test_evaluations_of_a_script_are_counted_by_its_windows_and_not_again_by_what_a_framework_says() -> None:
    observed = run_event(config={"script": {}})
    spent = {"evaluate": phase(300_000_000), "checkpoint": phase(50_000_000), "forward": phase(50_000_000)}
    state = folded(
        observed,
        window(10, 1, 400_000_000, phases=spent, evaluations=2, checkpoints=1),
        mark("evaluation", 10, metrics={"acc": 1.0}),
    )
    found = state.snapshot()
    assert (found.totals.evaluations, found.totals.checkpoints) == (2, 1)
    assert (found.left.evaluation_s, found.left.checkpoint_s) == pytest.approx((0.15, 0.05))
    assert found.best is not None


def test_a_resumed_run_forgets_what_it_will_do_again() -> None:
    first = [run_event(), *(window(step, 10, 10**9, loss=float(step)) for step in range(10, 310, 10))]
    first += [
        mark("evaluation", 100, metrics={"loss": 0.5}, better="lower"),
        mark("evaluation", 300, metrics={"loss": 0.1}, better="lower"),
        end("failed", 300),
    ]
    state = folded(*first)
    assert state.snapshot().final
    state.fold(99.0, StageEvent("resume", "importing torch"))
    assert state.snapshot().status == "preparing"
    state.fold(100.0, run_event(resumed_step=205))
    snapshot = state.snapshot()
    assert (snapshot.step, snapshot.epoch) == (205, 2)
    assert (snapshot.items, snapshot.tokens) == (205 * 16, 205 * 16 * 64)
    assert snapshot.loss_trend[-1] == (200, 200.0)
    assert max(x for x, _ in snapshot.rate_trend) == 200
    assert [evaluation.step for evaluation in snapshot.evaluations] == [100]
    assert snapshot.best is not None and snapshot.best.step == 100
    # The figures of the process that died do not apply to this one.
    assert (snapshot.step_ns, snapshot.left.seconds, snapshot.phases) == (None, None, ())
    assert (snapshot.end, snapshot.reason, snapshot.status) == (None, "", "preparing")
    state.fold(101.0, window(215, 10, 10**8, loss=7.0))
    again = state.snapshot()
    assert (again.status, again.step, again.steps_per_s) == ("training", 215, pytest.approx(100))
    assert again.loss_trend[-1] == (215, 7.0)
    # Time spent is spent.
    assert again.elapsed_s == pytest.approx(30.1)


@pytest.mark.parametrize(("better", "step"), [("lower", 20), ("higher", 10)])
def test_the_best_evaluation_follows_its_first_metric(better: str, step: int) -> None:
    marks = [
        mark("evaluation", 10, metrics={"score": 0.9, "loss": 1.0}, better=better, seconds=2.0),
        mark("evaluation", 20, metrics={"score": 0.4, "loss": 5.0}, better=better),
        mark("evaluation", 30, metrics={"score": 0.7, "loss": 0.0}, better=better),
        mark("evaluation", 40, metrics={}),
    ]
    snapshot = folded(run_event(), *marks).snapshot()
    assert snapshot.best is not None
    assert snapshot.best.step == step
    assert [item.step for item in snapshot.evaluations] == [10, 20, 30, 40]
    assert snapshot.evaluations[0].seconds == 2.0


def test_statuses_follow_the_run() -> None:
    state = RunState()
    seen, stages = [], []
    for event in (
        StageEvent("prepare", "reading"), run_event(), window(1), status("evaluating"), window(1, 0),
        status("training"), status("paused"), mark("pause", 1), window(1, 0), status("stopping"), window(2),
        end("stopped", 2),
    ):  # fmt: skip
        state.fold(1.0, event)
        seen.append(state.snapshot().status)
        stages.append(state.snapshot().stage)
    assert stages == ["reading", "reading", *[""] * 10]  # shown until the first step
    assert seen == [
        "preparing", "preparing", "training", "evaluating", "evaluating", "training",
        "paused", "paused", "paused", "stopping", "stopping", "stopped",
    ]  # fmt: skip
    assert state.snapshot().final and state.snapshot().reason == "because"


def test_the_state_stays_small_however_long_the_run() -> None:
    state = RunState()
    state.fold(0.0, run_event(total_steps=10**9))
    for step in range(1, 4000):
        state.fold(float(step), window(step, loss=1.0))
        state.fold(float(step), mark("evaluation", step, metrics={"loss": 1.0}))
        state.fold(float(step), setting(f"made.up_{step}"))
    snapshot = state.snapshot()
    assert len(snapshot.marks) == KEPT_MARKS
    assert len(snapshot.evaluations) == KEPT_EVALUATIONS
    assert len(snapshot.settings) == KEPT_SETTINGS
    assert snapshot.settings[-1].name == "made.up_3999"
    assert len(state.to_line(1.0)) < 64 * 1024


@given(st.lists(st.sampled_from(["warning", "error", "epoch", "note", "checkpoint"]), max_size=100))
@example(["warning"] * 100)
def test_warnings_are_counted_even_when_their_marks_are_gone(kinds: list[str]) -> None:
    snapshot = folded(run_event(), *(mark(kind, 1) for kind in kinds)).snapshot()
    assert snapshot.warnings == sum(kind in ("warning", "error") for kind in kinds)
    assert (snapshot.checkpoint is not None) == ("checkpoint" in kinds)
    assert [item.mark.kind for item in snapshot.marks] == kinds[-KEPT_MARKS:]


def test_the_newest_of_each_setting_is_kept_in_the_order_they_first_came() -> None:
    state = folded(
        run_event(),
        setting("loader.workers", None, verified="the workers start with the first batch"),
        setting("precision.amp"),
        setting("loader.workers", verified="4 answered"),
    )
    workers, amp = state.snapshot().settings
    assert (workers.name, workers.in_effect, workers.verified) == ("loader.workers", True, "4 answered")
    assert amp.name == "precision.amp" and state.snapshot().warnings == 0
    # A resumed run applies and verifies its own.
    state.fold(9.0, StageEvent("resume", "importing torch"))
    assert state.snapshot().settings == ()


def test_a_setting_that_is_not_in_effect_is_one_warning() -> None:
    lost = setting("loader.pin_memory", False, verified="no CUDA GPU", step=7)
    state = folded(run_event(), lost, lost)
    snapshot = state.snapshot()
    assert snapshot.warnings == 1
    (warning,) = [item.mark for item in snapshot.marks]
    assert (warning.kind, warning.step) == ("warning", 7)
    assert "loader.pin_memory" in warning.text and "no CUDA GPU" in warning.text
    # It came to work, and failed again: that is news.
    folded(setting("loader.pin_memory", True), lost, state=state)
    assert state.snapshot().warnings == 2


def test_micro_steps_are_those_that_were_done() -> None:
    assert folded(run_event(), window(4, 4, micro_steps=64)).snapshot().micro_steps == 16


# Several ranks.


def test_windows_of_ranks_are_restored_and_forgotten_when_a_run_resumes() -> None:
    state = folded(run_event(), *Planted(8, late=(5,), late_ms=20.0).events(20))
    restored = RunState.from_line(state.to_line(1.0))
    assert restored.snapshot().ranks == state.snapshot().ranks is not None
    assert len(state.recent_ranks) == RECENT_WINDOWS
    state.fold(99.0, StageEvent("resume", "resuming"))
    assert state.snapshot().ranks is None


def test_a_fold_event_of_many_ranks_stays_small() -> None:
    state = folded(run_event(), *Planted(1024, noise=(0.01, 0.01)).events(13))
    assert len(json.dumps(json.loads(state.to_line(1.0))["state"]["recent_ranks"])) < 16_000


def test_the_longest_rank_is_named_only_if_it_is_the_same_mostly() -> None:
    late = across(Planted(4, late=(2,), late_ms=20.0).events())
    assert late is not None
    assert late.longest["data_wait"][1] == 2
    assert late.longest["own"][1] == 2
    even = across(Planted(16, lasting=0.0).events())
    assert even is not None
    assert even.longest["forward"][1] is None


@pytest.mark.parametrize(
    "change",
    [{"columns_us": {"own": [1.0, 2.0]}}, {"rows_us": {"1": "x"}}, {"late": {"rank": 1}}, {"world": -1}],
)
def test_a_damaged_event_is_refused(change: dict[str, object]) -> None:
    body = json.loads(Planted(2).events(1)[0].to_json(1.0))
    with pytest.raises(ValueError, match=next(iter(change))):
        decoded({**body, **change})


# Curves.


def trend_of(values: list[float]) -> Trend:
    trend = Trend()
    for x, value in enumerate(values, start=1):
        trend.add(x, value)
    return trend


@given(st.integers(1, 1500), st.randoms(use_true_random=False))
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
