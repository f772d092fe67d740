"""The benchmark of both ways to measure: it has every key that one process switches, and joins its rounds."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks.switching import CASES, KEYS, NOT_SHOWN, cells

from ndd_engine.config import read
from ndd_engine.record.events import TrialEvent
from ndd_engine.trial.blocks import can_switch
from ndd_engine.trial.outcome import differences


def test_every_key_that_one_process_switches_is_measured_or_has_a_reason() -> None:
    assert CASES.keys() | NOT_SHOWN.keys() == KEYS
    assert not CASES.keys() & NOT_SHOWN.keys()


@pytest.mark.parametrize("key", CASES)
def test_a_case_is_what_one_process_switches(key: str) -> None:
    workload, sets, change = CASES[key]
    base, changed = (read(None, items, workload).resolve() for items in (sets, (*sets, *change)))
    keys = list(differences(base, changed))
    assert keys == [key] and can_switch((base, changed), keys)


def event(ratio: float, **changes: Any) -> TrialEvent:
    body: dict[str, Any] = {
        "sets": [], "against": "", "verdict": "faster", "text": "", "ratio": ratio, "low": ratio * 0.98,
        "high": ratio * 1.02, "abba_blocks": 40, "pairs": 0, "df": 30.0, "method": "one process",
    }  # fmt: skip
    return TrialEvent(**{**body, **changes})


@pytest.mark.parametrize(("pairs", "agree"), [(1.21, "yes"), (1.4, "NO")])
def test_rounds_are_joined_and_both_ways_compared(pairs: float, agree: str) -> None:
    together = [event(1.19), event(1.21), event(1.20), event(1.20)]
    apart = [event(pairs, pairs=5, df=4.0, method="pairs") for _ in range(4)]
    one, other, quotient, found, differ, expected = cells(together, apart)
    assert one.startswith("1.20x (95 % CI 1.1") and found == agree
    assert quotient.startswith(f"{1.2 / pairs:.2f}x") and other.startswith(f"{pairs:.2f}x")
    assert differ.endswith("%") and expected.endswith("%")
    assert set(cells(together, [])) == {"n/a"}
