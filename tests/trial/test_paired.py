"""The statistics of ABBA blocks: known quantiles, drifts, and the interval of a mean."""

from __future__ import annotations

import math

import pytest

from ndd_engine.trial.paired import abba_log_ratio, estimate, student_cdf, student_quantile


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
    assert abba_log_ratio(rates[1], 1.5 * rates[0], 1.5 * rates[3], rates[2]) == pytest.approx(math.log(1.5))


def test_an_estimate_needs_two_blocks_and_contains_its_mean() -> None:
    assert estimate([0.1]) is None
    found = estimate([math.log(1.1), math.log(1.2), math.log(1.3)])
    assert found is not None and found.blocks == 3
    assert found.low < found.ratio < found.high
    assert found.ratio == pytest.approx((1.1 * 1.2 * 1.3) ** (1 / 3))
    wild = estimate([-40.0, 40.0])
    assert wild is not None and math.isfinite(wild.high)
