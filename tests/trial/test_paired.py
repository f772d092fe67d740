"""The statistics of ABBA blocks: known quantiles, and the error rates in a simulation."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable

import pytest

from ndd_engine.trial.paired import (
    FLOOR,
    abba_log_ratio,
    early,
    estimate,
    last,
    student_cdf,
    student_quantile,
)

BLOCKS = 8
TRIALS = 300
Noise = Callable[[random.Random, int], list[float]]


@pytest.mark.parametrize(
    ("p", "freedom", "expected"),
    [
        (0.975, 1, 12.7062),
        (0.975, 2, 4.3027),
        (0.975, 3, 3.1824),
        (0.975, 10, 2.2281),
        (0.995, 5, 4.0321),
        (0.9975, 3, 7.4533),
        (0.95, 30, 1.6973),
        (0.975, 1000, 1.9623),
        (0.025, 4, -2.7764),
        (0.5, 7, 0.0),
    ],
)
def test_student_quantiles_are_those_of_the_tables(p: float, freedom: int, expected: float) -> None:
    assert student_quantile(p, freedom) == pytest.approx(expected, abs=1e-4)
    assert student_cdf(student_quantile(p, freedom), freedom) == pytest.approx(p, abs=1e-12)


def test_a_drift_that_is_linear_cancels_within_an_abba_block() -> None:
    rates = [100 * math.exp(0.01 * place) for place in range(4)]
    assert abba_log_ratio(rates[0], 1.5 * rates[1], 1.5 * rates[2], rates[3]) == pytest.approx(math.log(1.5))


def test_an_estimate_needs_two_blocks_and_contains_its_mean() -> None:
    assert estimate([0.1]) is None
    found = estimate([math.log(1.1), math.log(1.2), math.log(1.3)])
    assert found is not None and found.blocks == 3
    assert found.low < found.ratio < found.high
    assert found.ratio == pytest.approx((1.1 * 1.2 * 1.3) ** (1 / 3))
    wild = estimate([-40.0, 40.0])
    assert wild is not None and math.isfinite(wild.high)


def test_what_is_clear_is_called_early_and_what_is_not_is_not() -> None:
    assert early([math.log(2)] * 2) is None  # two blocks are never enough
    assert early([math.log(2), math.log(2.01), math.log(1.99)]) == "gain"
    assert early([-math.log(2), -math.log(2.01), -math.log(1.99)]) == "loss"
    assert early([0.001, -0.001, 0.0005, 0.0]) == "no gain"
    assert early([0.0, 0.1, -0.1]) is None
    assert last([0.0, 0.1, -0.1]) == "inconclusive"
    assert last([math.log(2)] * 2) == "inconclusive"


def test_a_difference_within_what_two_equal_processes_have_is_no_gain() -> None:
    values = [0.0149, 0.0151, 0.0150, 0.0152, 0.0148]
    found = estimate(values)
    assert found is not None and found.low > 1 and found.ratio < 1 + FLOOR
    assert last(values) == "no gain"
    assert last([-value for value in values]) == "no gain"


def normal(spread: float) -> Noise:
    return lambda draw, count: [draw.gauss(0, spread) for _ in range(count)]


def heavy(spread: float) -> Noise:
    """Student's t with 3 degrees of freedom: now and then something else has the machine."""

    def make(draw: random.Random, count: int) -> list[float]:
        squares = (sum(draw.gauss(0, 1) ** 2 for _ in range(3)) for _ in range(count))
        return [spread * draw.gauss(0, 1) / math.sqrt(square) for square in squares]

    return make


def wandering(spread: float) -> Noise:
    """First-order autoregressive over the blocks: clocks and temperatures drift."""

    def make(draw: random.Random, count: int) -> list[float]:
        values, value = [], 0.0
        for _ in range(count):
            value = 0.9 * value + draw.gauss(0, spread * math.sqrt(1 - 0.81))
            values.append(value)
        return values

    return make


NOISES = {
    "still": normal(0.003),
    "usual": normal(0.01),
    "loud": normal(0.03),
    "heavy": heavy(0.02),
    "wandering": wandering(0.03),
}


def calls(noise: Noise, gain: float, offset: float) -> Counter[str]:
    """What is called in TRIALS trials. offset: spread of a process's own speed, as a share."""
    draw = random.Random(20)
    found: Counter[str] = Counter()
    for _ in range(TRIALS):
        blocks = noise(draw, 4 * BLOCKS)
        ratio = math.log(gain) + draw.gauss(0, offset) - draw.gauss(0, offset)
        values: list[float] = []
        verdict = None
        for a1, b1, b2, a2 in zip(*(iter(blocks),) * 4, strict=True):
            values.append(((b1 - a1) + (b2 - a2)) / 2 + ratio)
            if (verdict := early(values)) is not None:
                break
        found[verdict or last(values)] += 1
    return found


@pytest.mark.parametrize("offset", [0.0, 0.006])
@pytest.mark.parametrize("noise", NOISES)
def test_an_a_against_an_a_is_seldom_called_a_gain_or_a_loss(noise: str, offset: float) -> None:
    found = calls(NOISES[noise], 1.0, offset)
    assert (found["gain"] + found["loss"]) / TRIALS <= 0.05


@pytest.mark.parametrize("noise", NOISES)
def test_a_gain_of_a_tenth_is_nearly_always_found(noise: str) -> None:
    assert calls(NOISES[noise], 1.1, 0.005)["gain"] / TRIALS >= 0.97


def test_a_loss_is_found_like_a_gain_and_a_quiet_null_is_settled() -> None:
    assert calls(NOISES["loud"], 1 / 1.1, 0.005)["loss"] / TRIALS >= 0.97
    assert calls(NOISES["still"], 1.0, 0.002)["no gain"] / TRIALS >= 0.97
