"""Windows of all ranks in the state of a run: folded, restored, and forgotten when a run resumes."""

from __future__ import annotations

import json

import pytest
import record_help
from qa.ranks.simulated import Planted
from record_help import run_event

from ndd_engine.record.event import across
from ndd_engine.record.events import StageEvent, decoded
from ndd_engine.record.state import RECENT_WINDOWS, RunState


def folded(planted: Planted, count: int = 20) -> RunState:
    return record_help.folded(run_event(), *planted.events(count))


def test_a_fold_event_restores_the_ranks() -> None:
    state = folded(Planted(8, late=(5,), late_ms=20.0))
    restored = RunState.from_line(state.to_line(1.0))
    assert restored.snapshot().ranks == state.snapshot().ranks
    assert len(state.recent_ranks) == RECENT_WINDOWS


def test_a_fold_event_of_many_ranks_stays_small() -> None:
    state = folded(Planted(1024, noise=(0.01, 0.01)), 13)
    assert len(json.dumps(json.loads(state.to_line(1.0))["state"]["recent_ranks"])) < 16_000


def test_a_resumed_run_starts_anew() -> None:
    state = folded(Planted(4))
    assert state.snapshot().ranks is not None
    state.fold(99.0, StageEvent("resume", "resuming"))
    assert state.snapshot().ranks is None


def test_the_longest_rank_is_named_only_if_it_is_the_same_mostly() -> None:
    late = across(Planted(4, late=(2,), late_ms=20.0).events())
    assert late is not None
    assert late.longest["data_wait"][1] == 2
    assert late.longest["own"][1] == 2
    even = across(Planted(16, lasting=0.0).events())
    assert even is not None
    assert even.longest["forward"][1] is None


@pytest.mark.parametrize(
    "change",
    [{"columns_us": {"own": [1.0, 2.0]}}, {"rows_us": {"1": "x"}}, {"late": {"rank": 1}}, {"world": -1}],
)
def test_a_damaged_event_is_refused(change: dict[str, object]) -> None:
    body = json.loads(Planted(2).events(1)[0].to_json(1.0))
    with pytest.raises(ValueError, match=next(iter(change))):
        decoded({**body, **change})
