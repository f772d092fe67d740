"""Where steps end with several optimizers, without a process: the order of their steps is all that matters."""

from __future__ import annotations

import itertools

import pytest

from ndd_watch.steps import Ends, untimed

EACH = "".join(map(chr, range(1000, 1300)))


@pytest.mark.parametrize(
    ("order", "steps"),
    [
        # An iteration of one or several optimizers is a step.
        *[(turn * 60, 60) for turn in ("a", "ab", "abc", "aab", "abb", "aaaaab")],
        (EACH * 20, 20),
        # A second one joins later, ends, or steps rarely.
        *[("a" * 3000 + turn * 1000, 4000) for turn in ("ab", "ba", "aaaaab")],
        ("ab" * 50 + "b" * 50, 100),
        ("ab" * 50 + "a" * 50, 100),
        (("a" * 20 + "b") * 30, 600),
        # They take the place of others.
        *[("".join(name * each for name in "abcde"), 5 * each) for each in (1, 2, 20)],
        *[("a" * 500 + "b" * each, 500 + each) for each in (1, 2, 20)],
        *[("ab" * each + "cd" * each + "ef" * each, 3 * each) for each in (2, 20)],
        # They take turns, or train alone before they train together.
        *[(("a" * each + "b" * each) * 4, 8 * each) for each in (3, 7, 10, 25)],
        *[("a" * alone + "b" * alone + "ab" * 40, 2 * alone + 40) for alone in (10, 200)],
        *[(("a" * alone + "b" * alone) * 3 + "ab" * 50, 6 * alone + 50) for alone in (10, 200)],
    ],
)
def test_steps_of_several_optimizers(order: str, steps: int) -> None:
    ends = Ends()
    count = sum(sum(ends.stepped(ord(name))) for name in order)
    assert count + ends.finished() == steps


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
