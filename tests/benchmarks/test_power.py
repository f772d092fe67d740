"""The benchmark that plants 5 % of real work: what it plants, and how it counts verdicts."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from qa.scripts import planted_gain
from qa.trials.power import cells

from ndd_engine.record.events import TrialEvent


@pytest.mark.parametrize(("factory", "more"), [("factory", 1.05), ("innocent", 1.0)])
def test_a_twentieth_more_work_is_planted_and_its_twin_has_none(
    monkeypatch: pytest.MonkeyPatch, factory: str, more: float
) -> None:
    model: Any = getattr(planted_gain, factory)(None)["model"]
    assert model.values.numel() < 32768  # from there on torch would use the second thread
    done: list[float] = []
    model.values = SimpleNamespace(mul_=done.append)
    for threads in (1, 2):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        done.append(threads * 1000)
        model(torch.ones(2, 8))
    second = done.index(2000)
    assert (len(done) - second - 1) / (second - 1) == more


def test_verdicts_are_counted_and_intervals_looked_into() -> None:
    one = TrialEvent([], "", "faster", "", ratio=1.05, low=1.03, high=1.07, seconds=20.0)
    none = replace(one, verdict="inconclusive", ratio=None, low=None, high=None)
    wide = replace(one, verdict="inconclusive", ratio=1.0, low=0.96, high=1.04)
    assert cells([one, none, wide], True) == [
        "3", "1", "0", "0", "2", "0", "1 of 2", "1.025x", "3 %", "20",
    ]  # fmt: skip
    assert cells([one, wide], False)[6] == "1 of 2" and cells([none], True)[7:9] == ["n/a", "n/a"]
