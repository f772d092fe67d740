"""Where steps end with several optimizers, without a process: the order of their steps is all that matters."""

from __future__ import annotations

import itertools
import random

import pytest

from ndd_watch.loops import Ends
from ndd_watch.steps import untimed

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
        # Their rhythms are uneven: steps are those of one of them.
        *[
            (("d" * critics + "g") * 500, 500 if critics < 8 else 500 * critics)
            for critics in (5, 7, 9, 10, 50)
        ],
        ("".join("d" * (100 if turn < 25 else 5) + "g" for turn in range(600)), 25 * 100 + 575 * 5),
        *[
            ("".join("dg" + "x" * (turn % each == each - 1) for turn in range(640)), 640 // each)
            for each in (2, 5)
        ],
        *[("".join("dg" + "x" * (turn % each == 0) for turn in range(640)), 640) for each in (12, 16)],
        ("".join("x" * (turn % 12 == 0) + "m" for turn in range(640)), 640),
        ("".join("qr" + "a" * (turn % 2) for turn in range(60)), 30),
        ("".join("d" + "d" * (turn % 3 == 0) + "g" for turn in range(300)), 300),
        # They take turns, or train alone before they train together.
        *[(("a" * each + "b" * each) * 4, 8 * each) for each in (3, 7, 10, 25)],
        *[("a" * alone + "b" * alone + "ab" * 40, 2 * alone + 40) for alone in (10, 200)],
        *[(("a" * alone + "b" * alone) * 3 + "ab" * 50, 6 * alone + 50) for alone in (10, 200)],
    ],
    ids=lambda value: f"{value[:12]}…" if isinstance(value, str) else None,
)
def test_steps_of_several_optimizers(order: str, steps: int) -> None:
    ends = Ends()
    count = sum(sum(ends.stepped(ord(name))) for name in order)
    assert count + ends.finished() == steps


@pytest.mark.parametrize("tasks", [2, 3, 5])
@pytest.mark.parametrize("seed", range(5))
def test_where_each_batch_has_one_of_several_optimizers_each_batch_is_a_step(tasks: int, seed: int) -> None:
    ends = Ends()
    order = random.Random(seed).choices(range(1, tasks + 1), k=1000)
    assert sum(sum(ends.stepped(key)) for key in order) == pytest.approx(1000, rel=0.03)


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
