"""Periods of step times: found where long steps recur, and not where steps only vary."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from ndd_engine.trial.outcome import period_of, recurs, undecided

draws = random.Random(3)


def noisy(length: float) -> float:
    return length * draws.lognormvariate(0.0, 0.1)


@pytest.mark.parametrize(
    ("length", "period"),
    [
        (lambda step: 300.0 if step % 16 == 0 else 5.0, 16),
        (lambda step: 300.0 if step % 320 == 7 else 5.0, 320),
        (lambda step: 9.0 if step % 2 else 5.0, 2),  # two optimizers in turn
        (lambda step: 40.0 if step % 5 == 1 else 5.0 + step % 5, 5),
        (lambda step: draws.uniform(100, 900) if step % 16 == 0 else 5.0, 16),
    ],
)
def test_a_period_is_found(length: Callable[[int], float], period: int) -> None:
    lengths = [noisy(length(step)) for step in range(4 * period + 60)]
    assert period_of(lengths) == period and not undecided(lengths)


@pytest.mark.parametrize(
    "length",
    [
        lambda step: 5.0,
        lambda step: 5.0 + step / 50,  # they become slower
        lambda step: 500.0 if step == 20 else 5.0,
        lambda step: draws.paretovariate(1.5),
        lambda step: 30.0 if draws.random() < 0.1 else 5.0,
    ],
)
def test_steps_that_only_vary_have_none(length: Callable[[int], float]) -> None:
    found = [period_of([noisy(length(step)) for step in range(count)]) for count in (12, 48, 200, 1000)]
    assert found == [1] * 4


def test_more_steps_are_wanted_until_long_ones_have_recurred() -> None:
    lengths = [300.0 if step % 30 == 0 else 5.0 for step in range(80)]
    assert undecided(lengths) and recurs(lengths) and period_of(lengths) == 1
    lengths += [300.0 if step % 30 == 0 else 5.0 for step in range(80, 120)]
    assert not undecided(lengths) and period_of(lengths) == 30
    assert undecided([5.0] * 20) and not undecided([5.0] * 50)
    assert period_of([]) == 1 and not recurs([])
