"""Where steps end with several optimizers, without a process: the order of their steps is all that matters."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from ndd_watch.ends import Ends
from ndd_watch.steps import untimed


def steps_of(order: Sequence[str]) -> int:
    """How many steps end, if optimizers step in this order."""
    ends, count = Ends(), 0
    for name in order:
        count += sum(ends.stepped(ord(name)))
    return count + ends.finished()


@pytest.mark.parametrize("order", ["a", "ab", "abc", "aab", "abb", "aaaaab"])
def test_an_iteration_is_a_step(order: str) -> None:
    assert steps_of(order * 60) == 60


@pytest.mark.parametrize("order", ["ab", "ba", "aaaaab"])
def test_a_second_optimizer_joins_later(order: str) -> None:
    assert steps_of("a" * 3000 + order * 1000) == 4000


@pytest.mark.parametrize("each", [1, 2, 20])
def test_optimizers_take_the_place_of_others(each: int) -> None:
    assert steps_of("".join(name * each for name in "abcde")) == 5 * each
    assert steps_of("a" * 500 + "b" * each) == 500 + each
    if each > 1:
        assert steps_of("".join(pair * each for pair in ("ab", "cd", "ef"))) == 3 * each


@pytest.mark.parametrize("each", [3, 7, 10, 25])
def test_each_step_of_optimizers_that_take_turns_is_one(each: int) -> None:
    assert steps_of(("a" * each + "b" * each) * 4) == 8 * each


@pytest.mark.parametrize("alone", [10, 200])
def test_optimizers_train_alone_before_they_train_together(alone: int) -> None:
    assert steps_of("a" * alone + "b" * alone + "ab" * 40) == 2 * alone + 40
    assert steps_of(("a" * alone + "b" * alone) * 3 + "ab" * 50) == 6 * alone + 50


def test_one_of_two_optimizers_ends() -> None:
    assert steps_of("ab" * 50 + "b" * 50) == steps_of("ab" * 50 + "a" * 50) == 100


def test_an_optimizer_that_steps_rarely_ends_no_step() -> None:
    assert steps_of(("a" * 20 + "b") * 30) == 600


def test_one_optimizer_for_each_parameter() -> None:
    names = "".join(map(chr, range(1000, 1300)))
    assert steps_of(names * 20) == 20


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
