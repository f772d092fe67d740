"""The time left: what is still due by the configuration, at the times that were measured."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from record_help import CONFIG, end, folded, mark, phase, run_event, status, window

from ndd_engine.record.events import Event, RunEvent
from ndd_engine.record.figures import Aside, due, time_left
from ndd_engine.record.snapshot import TimeLeft


def run_with(
    evaluate: dict[str, Any] | None = None, checkpoint: dict[str, Any] | None = None, **more: Any
) -> RunEvent:
    config = {
        **CONFIG,
        "evaluate": {**CONFIG["evaluate"], **(evaluate or {})},
        "checkpoint": {**CONFIG["checkpoint"], **(checkpoint or {})},
    }
    return run_event(config=config, **more)


def steps(first: int, last: int) -> list[Event]:
    """Steps of 100 ms, one a window."""
    return [window(step) for step in range(first, last + 1)]


def evaluation(step: int, seconds: float) -> list[Event]:
    """Events of an evaluation: status, windows during it, mark, status, last window."""
    half = window(step, 0, int(seconds * 5e8), phases={"evaluate": phase(int(seconds * 5e8))})
    return [status("evaluating"), half, mark("evaluation", step, metrics={}), status("training"), half]


def checkpoint(step: int, seconds: float) -> list[Event]:
    """The mark comes first: the time is in the window of the next step."""
    aside = int(seconds * 1e9)
    phases = {"checkpoint": phase(aside), "forward": phase(10**8)}
    return [mark("checkpoint", step), window(step + 1, 1, aside + 10**8, phases=phases)]


def left(*events: Event) -> TimeLeft:
    return folded(*events).snapshot().left


@given(st.integers(0, 12), st.integers(0, 3), st.booleans(), st.integers(1, 9), st.integers(1, 60), st.data())
def test_what_is_due_is_what_the_loop_will_do(
    every_steps: int, every_epochs: int, at_end: bool, per_epoch: int, total: int, data: st.DataObject
) -> None:
    section = {"every_steps": every_steps, "every_epochs": every_epochs, "at_end": at_end}
    run = run_event(steps_per_epoch=per_epoch, total_steps=total)
    step = data.draw(st.integers(0, total))

    def comes(at: int) -> bool:
        by_epoch = every_epochs * per_epoch
        periodic = (every_steps and at % every_steps == 0) or (by_epoch and at % by_epoch == 0)
        return bool(periodic or (at_end and at == total))

    later = sum(comes(at) for at in range(step + 1, total + 1))
    assert due(section, run, step, last=step) == later
    now = 1 if step > 0 and comes(step) else 0
    assert due(section, run, step, last=-1) == later + now


@given(st.integers(1, 999), st.integers(0, 50), st.integers(0, 50))
def test_the_time_left_never_grows_with_the_steps_done(step: int, every: int, minutes: int) -> None:
    run = run_with(
        {"every_steps": every, "at_end": True}, {"every_minutes": minutes, "every_steps": every * 2}
    )
    asides = Aside(), Aside()
    for aside in asides:
        aside.mark(step)
        aside.window(2 * 10**9)
    before = time_left(run, step, 1e9, *asides).seconds
    for aside in asides:
        aside.last_step = step + 1
    after = time_left(run, step + 1, 1e9, *asides).seconds
    assert before is not None
    assert after is not None
    assert 0 <= after < before


def test_steps_only_where_nothing_else_is_to_come() -> None:
    found = left(run_with(), *steps(1, 100))
    assert found.seconds == pytest.approx(900 * 0.1)
    assert (found.evaluations, found.checkpoints, found.without) == (0, 0, ())


def test_evaluations_and_checkpoints_to_come_count_at_their_measured_time() -> None:
    run = run_with({"every_steps": 200, "at_end": True}, {"every_epochs": 5, "at_end": True})
    found = left(run, *steps(1, 200), *evaluation(200, 8.0), *checkpoint(200, 1.0))
    # At step 201: evaluations at 400, 600, 800, 1000; checkpoints at 500 and 1000.
    assert (found.evaluations, found.evaluation_s) == (4, pytest.approx(8.0))
    assert (found.checkpoints, found.checkpoint_s) == (2, pytest.approx(1.0))
    assert found.seconds == pytest.approx(799 * 0.1 + 4 * 8.0 + 2 * 1.0)
    assert found.without == ()


def test_what_was_not_measured_yet_is_named_and_left_out() -> None:
    run = run_with({"every_steps": 100}, {"at_end": True})
    found = left(run, *steps(1, 50))
    assert found.seconds == pytest.approx(950 * 0.1)
    assert (found.evaluations, found.evaluation_s, found.checkpoints) == (10, None, 1)
    assert found.without == ("evaluations", "checkpoints")
    assert left(run, *steps(1, 100), *evaluation(100, 2.0)).without == ("checkpoints",)


def test_one_that_is_not_done_is_not_measured_and_still_to_come() -> None:
    run = run_with({"every_steps": 100})
    during = [*steps(1, 100), *evaluation(100, 60.0)[:2]]
    found = left(run, *during)
    assert (found.evaluations, found.evaluation_s) == (10, None)
    done = [*steps(1, 100), *evaluation(100, 4.0)]
    again = left(run, *done, *steps(101, 200), *evaluation(200, 60.0)[:2])
    assert (again.evaluations, again.evaluation_s) == (9, pytest.approx(4.0))


def test_times_are_means_of_all_that_were_measured() -> None:
    run = run_with({"every_steps": 100})
    found = left(run, *steps(1, 100), *evaluation(100, 2.0), *steps(101, 200), *evaluation(200, 4.0))
    assert found.evaluation_s == pytest.approx(3.0)


def test_checkpoints_by_the_clock_come_where_the_others_are_far_apart() -> None:
    saved = [*steps(1, 100), *checkpoint(100, 2.0)]  # at step 101: 899 steps of 0.1 s to go, 89.9 s
    assert left(run_with(None, {"every_minutes": 0.5}), *saved).checkpoints == 2
    assert left(run_with(None, {"every_minutes": 2.0}), *saved).checkpoints == 0
    # To step 500 and from there to 1000, 39.9 s and 50 s: each stretch holds one at 30 s.
    both = run_with(None, {"every_minutes": 0.5, "every_steps": 500})
    assert left(both, *saved).checkpoints == 2 + 2
    # Those at 50 steps leave no time for it.
    often = run_with(None, {"every_minutes": 0.5, "every_steps": 50})
    assert left(often, *saved).checkpoints == 18


def test_pauses_do_not_count() -> None:
    state = folded(run_with(), *steps(1, 100))
    before = state.snapshot().left
    for t, event in ((200.0, status("paused")), (9_000.0, mark("pause", 100)), (9_999.0, status("training"))):
        state.fold(t, event)
    assert state.snapshot().left == before


def test_a_resumed_run_does_not_repeat_what_its_checkpoint_followed() -> None:
    run = run_with({"every_steps": 100}, {"every_steps": 100})
    state = folded(run, *steps(1, 150), *evaluation(100, 2.0), *checkpoint(100, 1.0))
    again = run_with({"every_steps": 100}, {"every_steps": 100}, resumed_step=100)
    found = folded(again, window(100, 0, 10**6), *steps(101, 101), state=state).snapshot().left
    assert (found.evaluations, found.checkpoints) == (9, 9)
    assert found.evaluation_s == pytest.approx(2.0)  # measured in the first process, on the same data


def test_nothing_comes_after_the_end() -> None:
    run = run_with({"at_end": True}, {"at_end": True})
    assert left(run, *steps(990, 1000)).evaluations == 1
    found = left(run, *steps(990, 1000), *evaluation(1000, 2.0), mark("checkpoint", 1000), end("done", 1000))
    assert (found.seconds, found.evaluations, found.checkpoints) == (0, 0, 0)


@pytest.mark.parametrize("config", [{}, {"evaluate": 3}, {"evaluate": {"every_steps": "often"}}])
def test_a_configuration_that_says_nothing_means_no_more(config: dict[str, Any]) -> None:
    assert left(run_event(config=config), *steps(1, 10)).seconds == pytest.approx(99.0)
