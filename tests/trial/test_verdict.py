"""Verdict, colour and words of a result follow from one rule."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st
from measured import trial

from ndd_console.view.interval import interval_rows
from ndd_console.words.trial import VERDICTS, trial_text
from ndd_engine.trial.outcome import sentence
from ndd_engine.trial.replicates import Replicates
from ndd_engine.trial.verdict import FLOOR, judged

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
    assert replicates.last() == verdict
    # A trial that ends early has the same verdict as at the end of its budget.
    assert replicates.early() in (None, verdict)


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
