"""What a trial reports of effect, losses, memory and break-even, and its sentence."""

from __future__ import annotations

from typing import Any

import pytest

from ndd_engine.errors import UsageError
from ndd_engine.trial.estimates import Estimate
from ndd_engine.trial.outcome import (
    Base,
    SideFacts,
    TrialRequest,
    break_even,
    compare_losses,
    differences,
    effect,
    result,
)
from ndd_engine.trial.trial import drafts

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
    assert (event.load == BUSY) is told and (f"{BUSY}, and on a free machine" in event.text) is told
    nothing = result(request, "failed", "no", None, (facts(), facts()), [], 20.0, load=BUSY)
    assert BUSY not in nothing.text
