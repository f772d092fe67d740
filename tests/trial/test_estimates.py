"""The statistics of a trial: coverage and error rates in simulated trials, few pairs, one process, the verdict.

Then what earlier trials measured, and what a trial reports: effect, losses, memory, break-even, and its sentence.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from measured import trial
from qa.trials.intervals import NOISES, few_pairs
from qa.trials.simulated import MODELS, Course, rates, simulate

from ndd_console.view.bars import interval_rows
from ndd_console.words.trial import VERDICTS, trial_text
from ndd_engine.errors import UsageError
from ndd_engine.trial.estimates import (
    ALONE,
    DIFFERENT,
    FIRST_LOOK,
    FLOOR,
    METHOD,
    Estimate,
    OneProcess,
    Replicates,
    Usual,
    abba_log_ratio,
    judged,
    student_cdf,
    student_quantile,
)
from ndd_engine.trial.outcome import (
    MOST_DEVICES,
    MOST_TRIALS,
    Base,
    PairVariances,
    SideFacts,
    TrialRequest,
    break_even,
    cache_folder,
    compare_losses,
    differences,
    effect,
    result,
    sentence,
)
from ndd_engine.trial.trial import drafts

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
        (0.975, 3, 3.1824),
        (0.9975, 3, 7.4533),
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


def drifting(found: Replicates, *counts: int) -> Replicates:
    """Pairs of so many blocks on a machine whose speed changes by a factor of 50, and halts in a tenth of them."""
    random = Random(1)
    for count in counts:
        if not isinstance(found, OneProcess):
            found.begin()
        for number in range(count):
            speed = 10 * math.exp(4 * random.random())
            halts = 30 if number % 10 == 9 else 1
            found.add_abba(speed, 1.2 * speed, 1.1 * speed / halts, speed * (0.9 + 0.2 * random.random()))
    return found


@pytest.mark.parametrize(
    "found",
    [drifting(OneProcess(), 40), drifting(Replicates(), 1, 9, 3, 20), drifting(Replicates(), 2)],
    ids=["one process", "pairs of unlike length", "one pair"],
)
def test_the_speeds_of_both_sides_have_the_ratio_of_the_estimate(found: Replicates) -> None:
    estimate, speeds = found.estimate(), found.rates()
    assert estimate is not None and speeds is not None
    assert speeds[1] / speeds[0] == pytest.approx(estimate.ratio)
    assert 1 < speeds[0] < 600
    assert Replicates().rates() is None


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
        assert high < 1 + FLOOR and ratio > 0.98 - 1e-9
    else:
        assert (high >= 1 and low <= 1) or abs(value) <= math.log(1 + FLOOR)
        assert high >= 1 + FLOOR or ratio < 1 / (1 + FLOOR)
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


# What earlier trials measured of the difference between processes.


def test_trials_add_up_by_device(tmp_path: Path) -> None:
    history = PairVariances(tmp_path / "sub" / "processes.json")
    assert history.usual("a") == Usual()
    for _ in range(10):
        history.add("a", Usual(0.02**2, 7.0))
    assert PairVariances(history.path).usual("a").sd > 0.017
    assert history.usual("b") == Usual()


def test_the_file_is_bounded(tmp_path: Path) -> None:
    history = PairVariances(tmp_path / "processes.json")
    for number in range(MOST_DEVICES + 5):
        history.add(f"gpu {number}", Usual())
    for _ in range(MOST_TRIALS + 5):
        history.add("gpu 9", Usual())
    devices = json.loads(history.path.read_text())["devices"]
    assert len(devices) == MOST_DEVICES and len(devices["gpu 9"]) == MOST_TRIALS
    assert "gpu 0" not in devices


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "[" * 100_000, '{"devices": 3}', '{"devices": {"a": 3}}', '{"devices": {"a": [[1], ["x", 2]]}}',
        '{"devices": {"a": [[NaN, 3], [0.0001, 0], [1e999, 2]]}}', '{"devices": {"a": [[1e9, 1e9]]}}',
    ],
)  # fmt: skip
def test_damage_and_implausible_values_do_not_count(tmp_path: Path, text: str) -> None:
    path = tmp_path / "processes.json"
    path.write_text(text)
    assert PairVariances(path).usual("a").sd <= 0.03
    for implausible in (25.0, float("nan")):
        PairVariances(path).add("a", Usual(implausible, 7.0))
    assert PairVariances(path).usual("a").sd <= 0.03


def test_a_folder_that_cannot_be_written_does_not_matter(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "processes.json").mkdir()
    for path in (tmp_path / "file" / "processes.json", tmp_path / "processes.json"):
        PairVariances(path).add("a", Usual(0.0004, 7.0))
        assert PairVariances(path).usual("a") == Usual()


def test_it_lies_in_the_cache_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "ndd-console"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "ndd-console"


# What a trial reports.

ITEMS = (16, 16)


def facts(**changes: Any) -> SideFacts:
    body: dict[str, Any] = {
        "device": "cpu", "device_name": "a CPU", "items_per_step": 16, "steps_per_epoch": 100,
        "prepare_s": 1.0, "warmup_s": 0.1, "warmup_steps": 10, "step_s": 0.01, "items_per_s": 1600.0,
        "peak_bytes": 1 << 30, "losses": [2.0, 1.0],
    }  # fmt: skip
    return SideFacts(**{**body, **changes})


def test_the_length_of_the_run_applies_to_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ndd_engine.trial.trial.preflight", lambda draft, use_torch: draft.resolve())
    request = TrialRequest(Base("it", None, "package.module:factory"), ("run.epochs=2", "loader.workers=1"))
    assert request.sets == ("loader.workers=1",)
    base, change = (draft.resolve() for draft in drafts(request))
    assert base.run.epochs == change.run.epochs == 2
    assert set(differences(base, change)) == {"loader.workers"}
    with pytest.raises(UsageError, match="settings"):
        drafts(TrialRequest(Base("it"), ("run.max_steps=100",)))


def test_the_effect_is_what_the_run_verified() -> None:
    settings = {
        "loader.workers": ["2", "2", True, "2 processes"],
        "speed.compile": ["default", "off", False, "no compiler"],
        "loader.fetch": ["auto", "batch", None, ""],
        "loader.pin_memory": ["false", "false", None, ""],
    }
    side = facts(settings=settings)
    assert effect(side, ["loader.workers"]) == (True, "")
    in_effect, reason = effect(side, ["loader.workers", "speed.compile"])
    assert in_effect is False and all(word in reason for word in ("speed.compile", "off", "no compiler"))
    assert effect(side, ["loader.fetch"]) == (None, "")
    assert effect(side, ["loader.pin_memory"]) == (True, "")  # back at its default, and read back so
    assert effect(side, ["batch.micro"]) == (None, "")
    assert side.to_dict()["not_in_effect"] == [reason]
    assert "settings" not in side.to_dict()


@pytest.mark.parametrize(
    ("base", "change", "changed", "items", "expected"),
    [
        ([2.0, 1.0], [2.0, 1.0, 0.5], ["loader.workers"], ITEMS, "same"),
        ([2.0, 1.0], [2.0, 1.005], ["precision.amp"], ITEMS, "close"),
        ([2.0, 1.0], [2.0, 1.5], ["precision.amp"], ITEMS, "differs"),
        ([2.0, 1.0], [2.0, float("nan")], ["precision.amp"], ITEMS, "differs"),
        ([2.0], [2.0], ["batch.micro"], (16, 32), "not comparable"),
        ([2.0], [2.0], ["workload.size"], ITEMS, "not comparable"),
        ([2.0], [2.0], ["workload.decoder"], ITEMS, "same"),
        ([2.0], [2.0], ["optimizer.lr"], ITEMS, "not comparable"),
        ([2.0], [2.0], ["clip.max_norm"], ITEMS, "not comparable"),
        ([2.0], [2.0], ["workload.summaries"], ITEMS, "same"),
        ([2.0], [2.0], ["optimizer.implementation"], ITEMS, "same"),
        ([], [2.0], ["loader.workers"], ITEMS, "not comparable"),
    ],
)
def test_losses_are_compared_where_they_can_be(
    base: list[float], change: list[float], changed: list[str], items: tuple[int, int], expected: str
) -> None:
    verdict, text = compare_losses(base, change, changed, items)
    assert verdict == expected
    assert text


def test_a_longer_startup_breaks_even_after_enough_faster_steps() -> None:
    # 10 s more before, and 2 ms saved in each step of 10 ms.
    change = facts(prepare_s=11.0, warmup_s=0.08, step_s=0.008, items_per_s=2000.0)
    assert break_even(facts(), change) == pytest.approx(5000, abs=1)
    assert break_even(facts(), facts(items_per_s=1000.0)) is None
    assert break_even(facts(), facts(items_per_s=2000.0, prepare_s=0.5)) == 0
    assert break_even(facts(), facts(items_per_s=None)) is None


def test_the_result_and_its_sentence_have_the_figures_and_their_interval() -> None:
    request = TrialRequest(Base("run one"), ("loader.workers=2",), 60.0, "few-workers")
    settings = {"loader.workers": ["2", "2", True, "seen"]}
    change = facts(items_per_s=2272.0, peak_bytes=1 << 31, prepare_s=3.0, settings=settings)
    found = Estimate(1.42, 1.38, 1.47, 12, 6, 5.0, "pairs")
    event = result(request, "faster", "", found, (facts(), change), ["loader.workers"], 34.2)
    assert (event.against, event.cause, event.device) == ("run one", "few-workers", "a CPU")
    assert (event.in_effect, event.loss, event.confidence) == (True, "same", 0.95)
    assert (event.low, event.high, event.pairs, event.abba_blocks) == (1.38, 1.47, 6, 12)
    for figure in ("faster 1.42x", "1.38 to 1.47", "34.2 s", "1.0 GiB → 2.0 GiB", "6 pairs"):
        assert figure in event.text
    few = Estimate(1.4, 1.3, 1.5, 9, 1, 10.0, "usual difference", 0.01)
    event = result(request, "faster", "", few, (facts(), change), [], 3.0)
    assert (event.pairs, event.method, event.between, event.df) == (1, few.method, 0.01, 10.0)
    assert "1 pair " in event.text
    nothing = result(request, "out of memory", "no room", None, (SideFacts(), SideFacts()), [], 3.0)
    assert nothing.text.endswith(": no room")
    assert nothing.ratio is None and nothing.abba_blocks == 0


BUSY = "other processes used 1.6 of 2 cores"


@pytest.mark.parametrize(("device", "told"), [("cpu", True), ("cuda:0", False)])
def test_a_ratio_under_load_is_told_to_be_one(device: str, told: bool) -> None:
    """Threads wait for each other there: bf16 was 1.3 times as fast with two threads, and 0.94 times with one."""
    request, found = TrialRequest(Base("it"), ("precision.amp=bf16",)), Estimate(1.55, 1.06, 2.23, 4, 0, 3.0)
    event = result(request, "faster", "", found, (facts(), facts(device=device)), [], 20.0, load=BUSY)
    assert (event.load == BUSY) is told and (BUSY in event.text) is told
    nothing = result(request, "failed", "no", None, (facts(), facts()), [], 20.0, load=BUSY)
    assert BUSY not in nothing.text
