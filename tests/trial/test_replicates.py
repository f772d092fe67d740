"""The statistics of a trial: coverage and error rates in simulated trials, few pairs, one process, the verdict."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from measured import trial
from qa.trials.intervals import NOISES, few_pairs
from qa.trials.simulated import MODELS, Course, rates, simulate

from ndd_console.view.bars import interval_rows
from ndd_console.words.trial import VERDICTS, trial_text
from ndd_engine.trial.estimates import (
    ALONE,
    DIFFERENT,
    FIRST_LOOK,
    FLOOR,
    METHOD,
    OneProcess,
    Replicates,
    abba_log_ratio,
    judged,
    student_cdf,
    student_quantile,
)
from ndd_engine.trial.outcome import sentence

TRIALS = 400
USUAL = "usual difference"
ONE_PERCENT = "processes 1 %, blocks 1 %"


def replicates(*pairs: list[float], few_pairs: bool = False) -> Replicates:
    found = Replicates(None, few_pairs)
    for pair in pairs:
        found.begin()
        for value in pair:
            found.add(value)
    return found


# In simulated trials.


@pytest.mark.parametrize("name", MODELS)
def test_intervals_contain_the_truth_as_often_as_they_promise(name: str) -> None:
    found = rates(simulate(MODELS[name], 1.0, TRIALS, Course(start_s=3.0)))
    # 2,000 trials are between 93 and 97 %; 400 of them scatter by 1.1 %.
    assert 0.91 <= found["covered"] <= 0.98
    assert found["faster"] + found["slower"] <= 0.06


@pytest.mark.parametrize("name", NOISES)
@pytest.mark.parametrize("pairs", [1, 2])
def test_intervals_of_one_and_two_pairs_contain_the_truth(name: str, pairs: int) -> None:
    """Also on a machine of which no trial is known, and whose processes differ by three times the default."""
    found = few_pairs(NOISES[name], pairs, 0, TRIALS)
    # 1,000 trials are between 92 and 100 %, see docs/statistics.md; 400 of them scatter by 1.4 %.
    assert sum(one.low <= 1 <= one.high for one in found) >= 0.88 * TRIALS


@pytest.mark.parametrize("gain", [1.05, 1 / 1.05])
def test_five_percent_are_found_and_nothing_is_settled(gain: float) -> None:
    noise, course = MODELS[ONE_PERCENT], Course(start_s=4.0)
    verdict = "faster" if gain > 1 else "slower"
    assert rates(simulate(noise, gain, TRIALS, course))[verdict] >= 0.95
    assert rates(simulate(noise, 1.0, TRIALS, course))["inconclusive"] <= 0.3


# The interval.


def test_blocks_of_one_pair_are_not_taken_as_independent() -> None:
    many = replicates([0.010, 0.011, 0.009, 0.010] * 5).estimate()
    assert many is not None and many.pairs == 1 and many.blocks == 20
    assert many.low < 1 < many.high  # 1 % is what two equal processes differ by
    assert (many.method, many.between) == (USUAL, 0.01)
    four = replicates(*[[0.010, 0.011, 0.009]] * 4).estimate()
    assert four is not None and four.low > 1 and (four.method, four.df, four.between) == ("pairs", 3.0, None)


def test_nothing_is_called_before_enough_pairs() -> None:
    large = [math.log(2), math.log(2.01)]
    assert replicates(large, large, large).early() is None
    assert replicates(large, large, large, [math.log(1.99)] * 2).early() == "faster"
    assert replicates(*[[-value for value in large]] * 4).early() == "slower"
    assert replicates(*[[0.001, -0.001], [0.0, 0.001]] * 2).early() == "no difference"
    # When start-up is expensive, a large effect is clear after a few blocks.
    assert replicates(large, few_pairs=True).early() is None
    assert replicates([*large, math.log(2)], few_pairs=True).early() == "faster"


def test_the_estimate_needs_two_blocks_and_is_finite() -> None:
    assert replicates().estimate() is None and replicates([0.1]).estimate() is None
    assert replicates([0.1]).last() == "inconclusive"
    wild = replicates([-40.0, 40.0]).estimate()
    assert wild is not None and math.isfinite(wild.high)
    abandoned = replicates([0.1, 0.1])
    abandoned.begin()
    abandoned.abandon()
    assert len(abandoned.pairs) == 1


# The statistics of ABBA blocks.


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


# The blocks of one process that switches between both sides.


def blocks(values: list[float]) -> OneProcess:
    found = OneProcess()
    for value in values:
        found.add(value)
    return found


def test_a_disturbed_block_does_not_decide() -> None:
    quiet = [0.001 * (-1) ** number for number in range(19)]
    assert blocks([*quiet, 1.5]).last() == "no difference"
    found = blocks([*quiet, 1.5]).estimate()
    assert found is not None and found.method == METHOD and found.pairs == 0 and found.blocks == 20


def test_it_looks_rarely_and_not_too_early() -> None:
    found = OneProcess()
    looks = []
    for number in range(1, 101):
        found.add(0.001 * (-1) ** number)
        if found.early() is not None:
            looks.append(number)
    assert looks[0] == FIRST_LOOK and len(looks) <= 6
    assert blocks([0.2 + 0.01 * (-1) ** number for number in range(FIRST_LOOK)]).early() == "faster"
    assert blocks([0.2] * (FIRST_LOOK - 1)).early() is None


# The verdict.

LOGS = st.floats(-1.0, 1.0)
REACH = st.floats(0.0, 0.5)


@given(LOGS, REACH)
def test_a_verdict_says_what_the_interval_shows(value: float, reach: float) -> None:
    ratio, low, high = (math.exp(one) for one in (value, value - reach, value + reach))
    verdict = judged(ratio, low, high)
    if verdict == "faster":
        assert low > 1 and ratio > 1 + FLOOR
    elif verdict == "slower":
        assert high < 1 and ratio < 1 / (1 + FLOOR)
    elif verdict == "no difference":
        assert high < 1 + FLOOR
    else:
        assert high >= 1 + FLOOR and not (low > 1 and ratio > 1 + FLOOR)
    # The candidate as the baseline: faster becomes slower.
    mirrored = judged(1 / ratio, 1 / high, 1 / low)
    assert (
        (verdict == "faster") is (mirrored == "slower")
        or abs(value) < 1e-9
        or abs(abs(value) - math.log(1.02)) < 1e-9
    )


@given(st.lists(st.lists(st.floats(-0.2, 0.2), min_size=1, max_size=4), min_size=1, max_size=8))
def test_a_trial_ends_with_the_verdict_of_its_interval(pairs: list[list[float]]) -> None:
    replicates = Replicates()
    for pair in pairs:
        replicates.begin()
        for value in pair:
            replicates.add(value)
    found = replicates.estimate()
    if found is None:
        assert replicates.last() == "inconclusive"
        return
    assert found.low <= found.ratio <= found.high
    verdict = judged(found.ratio, found.low, found.high)
    if len(pairs) == 1 and verdict in DIFFERENT and found.low < ALONE and found.high > 1 / ALONE:
        verdict = "inconclusive"  # no more is known of what processes differ by
    assert replicates.last() == verdict
    # A trial that ends early has the same verdict as at the end of its budget.
    assert replicates.early() in (None, verdict)


@pytest.mark.parametrize(
    ("pairs", "called"),
    [
        ([[0.07, 0.071, 0.069]], "inconclusive"),
        ([[-0.07, -0.071, -0.069]], "inconclusive"),
        ([[0.4, 0.41, 0.39]], "faster"),
        ([[-0.4, -0.41, -0.39]], "slower"),
        ([[0.07, 0.071], [0.07, 0.069]], "faster"),
    ],
)
def test_a_single_pair_of_processes_calls_only_a_large_difference(
    pairs: list[list[float]], called: str
) -> None:
    replicates = Replicates(few_pairs=True)
    for pair in pairs:
        replicates.begin()
        for value in pair:
            replicates.add(value)
    assert replicates.last() == called
    assert replicates.early() in (None, called)
    if called == "inconclusive":
        needed = replicates.needed()
        assert needed is not None and needed >= 2


@given(LOGS, REACH)
def test_colour_and_words_follow_the_verdict(value: float, reach: float) -> None:
    ratio, low, high = (math.exp(one) for one in (value, value - reach, value + reach))
    verdict = judged(ratio, low, high)
    event = trial(verdict, ratio, low=low, high=high)
    drawn = interval_rows(ratio, low, high, 60)
    assert drawn[1][1][1] == VERDICTS[verdict]
    assert interval_rows(ratio, low, high, 60, event.verdict)[1][1][1] == VERDICTS[verdict]
    assert trial_text(event).startswith(verdict) and sentence(event).startswith(verdict)


def test_the_verdict_of_an_older_record_colours_its_interval() -> None:
    # Judged by the rule of its time.
    assert interval_rows(1.03, 1.005, 1.06, 60, "inconclusive")[1][1][1] == VERDICTS["inconclusive"]
    assert interval_rows(1.03, 1.005, 1.06, 60)[1][1][1] == VERDICTS["faster"]
