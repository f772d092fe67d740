"""Where steps end with several optimizers, without a process: the order of their steps is all that matters."""

from __future__ import annotations

import itertools

import pytest

from ndd_watch import clock
from ndd_watch.clock import now
from ndd_watch.steps import Steps, untimed


@pytest.fixture
def steps() -> Steps:
    clock.clear()
    return Steps()


@pytest.mark.parametrize("order", ["a", "ab", "abc"])
def test_an_iteration_is_a_step(steps: Steps, order: str) -> None:
    optimizers = {name: object() for name in order}
    for _ in range(100):
        for name in order:
            steps.backwards += 1
            steps.stepped(optimizers[name], now())
    assert (steps.done, steps.micro) == (100, 100)


@pytest.mark.parametrize("order", ["ab", "aab", "abb", "aaaaab"])
def test_an_iteration_stays_a_step_once_it_is_clear_which_one_steps_most_rarely(
    steps: Steps, order: str
) -> None:
    optimizers = {name: object() for name in order}
    done = []
    for _ in range(60):
        for name in order:
            steps.stepped(optimizers[name], now())
        done.append(steps.done)
    assert {after - before for before, after in itertools.pairwise(done[30:])} == {1}


def test_the_first_step_of_two_optimizers_is_one_row(steps: Steps) -> None:
    generator, critic = object(), object()
    clock.row[clock.OTHER] = 5
    steps.stepped(critic, now())
    assert (steps.done, len(clock.rows)) == (1, 1)
    steps.stepped(generator, now())
    assert (steps.done, len(clock.rows)) == (1, 1)
    assert clock.rows[0][clock.OTHER] >= 5


@pytest.mark.parametrize("every", [1, 2, 3, 7, 21, 64, 500])
def test_one_of_so_many_steps_is_timed_by_phase_at_irregular_distances(every: int) -> None:
    timed, number = [], untimed(0, every)
    while number < 100 * every:
        timed.append(number)
        number += 1 + untimed(number + 1, every)
    assert len(timed) == pytest.approx(100, abs=3)
    gaps = {after - before for before, after in itertools.pairwise(timed)}
    assert max(gaps) <= 3 * every
    if every > 3:  # no place in the turn of four or eight workers is left out
        for workers in (4, 8):
            counts = [sum(number % workers == worker for number in timed) for worker in range(workers)]
            assert min(counts) >= 0.6 * len(timed) / workers


def test_a_rank_that_times_fewer_steps_times_some_of_the_others() -> None:
    many, few = ({n for n in range(2000) if not untimed(n, every)} for every in (3, 20))
    assert few < many
