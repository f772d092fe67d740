"""Findings of several ranks: each is named where it is planted, and not where a run only looks similar."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from planted_runs import Planted as Run
from planted_runs import cores
from qa.ranks.simulated import Planted, beside, compared

from ndd_engine.diagnose import Finding, diagnose
from ndd_engine.record.events import SampleEvent
from ndd_engine.record.snapshot import Snapshot
from ndd_engine.record.state import RunState

CAUSES = {"straggler", "exchange", "skew"}
QUIET = {"noise": (0.005, 0.01)}


def snapshot_of(
    planted: Planted, sets: list[str] | None = None, host: Any = None, count: int = 14
) -> Snapshot:
    state = RunState()
    strategy = [f"parallel.ranks={planted.world}", f"parallel.strategy={planted.strategy}"]
    run = Run(sets=[*strategy, *(sets or [])])
    state.fold(0.0, run.run_event())
    for index, event in enumerate(planted.events(count)):
        state.fold(float(index), beside(event))
        state.fold(float(index), event)
        if host is not None:
            state.fold(float(index), SampleEvent(None, host))
    snapshot = state.snapshot()
    # Enough steps to be judged.
    return replace(snapshot, totals=replace(snapshot.totals, steps=100, wall_ns=10**10))


def found(planted: Planted, **options: Any) -> dict[str, Finding]:
    return {item.cause: item for item in diagnose(snapshot_of(planted, **options)) if item.cause in CAUSES}


def test_a_late_rank_is_the_verdict_with_host_code_and_ceiling() -> None:
    planted = Planted(16, late=(13,), late_ms=20.0, places=("text.py:88 tokenise",), on_host=8, **QUIET)
    first = diagnose(snapshot_of(planted))[0]
    assert first.cause == "straggler"
    assert "rank 13" in first.title and "data_wait" in first.title
    assert first.changes[0].where == planted.places[0]
    assert all(part in first.evidence[0].text for part in ("node1", planted.places[0]))
    assert first.ceiling == pytest.approx(100.1 / 81, abs=0.05)


def test_a_late_host_is_named_as_a_whole() -> None:
    planted = Planted(32, late=tuple(range(8, 16)), late_ms=15.0, phase="forward", **QUIET)
    assert "node1 (8 ranks)" in found(planted)["straggler"].title


@pytest.mark.parametrize(
    ("phase", "words"),
    [
        ("data_wait", "data of rank 1"),
        ("to_device", "how the GPU of rank 1 is connected"),
        ("forward", "other processes of rank 1"),
        ("log", "what only rank 1 does"),
    ],
)
def test_the_change_fits_the_phase(phase: str, words: str) -> None:
    planted = Planted(2, late=(1,), late_ms=20.0, phase=phase, **QUIET)
    assert words in found(planted)["straggler"].changes[0].text
    if phase == "data_wait":
        assert found(planted, sets=["loader.workers=2"])["straggler"].sets == ("loader.workers=4",)
        assert found(planted, sets=["loader.workers=0"])["straggler"].sets == ()


@pytest.mark.parametrize(
    ("planted", "causes"),
    [
        (Planted(8, exchange_ms=2.0, **QUIET), set()),  # balanced
        (Planted(1), set()),
        (Planted(4, late=(0, 1, 2, 3), late_ms=40.0, turns=True, exchange_ms=2.0, **QUIET), {"skew"}),
        # Waiting for a late rank is not counted twice.
        (Planted(8, late=(2,), late_ms=30.0, exchange_ms=2.0, **QUIET), {"straggler"}),
    ],
)
def test_each_has_one_cause(planted: Planted, causes: set[str]) -> None:
    assert set(found(planted)) == causes


def test_a_rank_without_a_processor_is_told() -> None:
    planted = Planted(2, late=(1,), late_ms=40.0, phase="backward", **QUIET)
    snapshot = snapshot_of(planted)
    assert snapshot.ranks is not None
    newest = snapshot.ranks.newest
    rows = {rank: list(row) for rank, row in newest.rows_us.items()}
    rows["1"][newest.row_names.index("cpu")] *= 0.6
    ranks = replace(snapshot.ranks, newest=replace(newest, rows_us=rows))
    finding = diagnose(replace(snapshot, ranks=ranks))[0]
    assert any("58 %" in item.text for item in finding.evidence)
    assert "rank 1" in finding.changes[0].text


def test_exposed_exchange_offers_settings_of_the_strategy() -> None:
    planted = Planted(4, exchange_ms=25.0, **QUIET)
    finding = found(planted)["exchange"]
    assert "gradients" in finding.title
    sets = [change.sets for change in finding.changes if change.sets]
    assert sets == [("parallel.bucket_mb=100",), ("parallel.compress=fp16",)]
    assert finding.ceiling == pytest.approx(100 / 75, abs=0.04)
    # Settings that are in use are not offered.
    used = found(planted, sets=["parallel.compress=bf16"])["exchange"]
    assert all(change.sets != ("parallel.compress=bf16",) for change in used.changes)
    sharded = found(replace(planted, strategy="fsdp2"))["exchange"]
    assert sharded.sets == ("parallel.reshard=false",)
    assert "parameters" in sharded.title


def test_exchange_with_ranks_that_are_not_observed_may_be_waiting() -> None:
    snapshot = snapshot_of(Planted(4, exchange_ms=25.0, **QUIET))
    assert snapshot.ranks is not None
    part = replace(snapshot.ranks, newest=replace(snapshot.ranks.newest, launched=8, first_rank=4))
    (finding,) = (item for item in diagnose(replace(snapshot, ranks=part)) if item.cause == "exchange")
    assert "other hosts" in finding.title
    assert not finding.sets


def test_the_phase_in_which_ranks_take_turns_is_named() -> None:
    state = RunState()
    state.fold(0.0, Run(sets=["parallel.ranks=4"]).run_event())
    plans = [Planted(4, late=(rank,), late_ms=40.0, exchange_ms=2.0, **QUIET) for rank in range(4)]
    windows = (list(plans[index % 4].windows(index + 1, 1))[index] for index in range(16))
    for index, event in enumerate(compared(plans[0].comparison(), windows)):
        state.fold(float(index), beside(event))
        state.fold(float(index), event)
    snapshot = state.snapshot()
    first = diagnose(replace(snapshot, totals=replace(snapshot.totals, steps=100, wall_ns=10**10)))[0]
    assert first.cause == "skew"
    assert any("data_wait" in item.text for item in first.evidence)


def test_phases_add_up_to_the_step_with_exchange_and_skew() -> None:
    snapshot = snapshot_of(Planted(8, late=(2,), late_ms=30.0))
    names = [phase.name for phase in snapshot.phases]
    assert {"exchange", "skew"} < set(names)
    assert snapshot.step_ns is not None
    assert sum(phase.host_ns for phase in snapshot.phases) == pytest.approx(snapshot.step_ns, rel=1e-6)
    # Rank 0 waits in backward: the mean over the ranks does not.
    backward = next(phase for phase in snapshot.phases if phase.name == "backward")
    assert backward.host_ns < 45e6


def test_the_other_ranks_of_this_host_count_as_this_run_and_a_stranger_does_not() -> None:
    stranger = [{"pid": 7, "name": "blender", "cores": 1.0, "stoppable": True}]
    host = cores(2.0, 0.5, ranks_cpu_percent=50.0, neighbours=stranger)
    use = snapshot_of(Planted(2, **QUIET), host=host).cores
    assert use is not None
    assert 0.9 < use.by_run < 1.1
    assert 0.9 < use.others < 1.1
    assert (use.neighbours, use.stoppable) == (((7, "blender", 1.0),), (7,))


def test_data_that_makes_the_ranks_wait_for_each_other_has_the_ceiling_of_both() -> None:
    # In each step another rank waits 100 ms for its data, and the other one for it: 75 of 175 ms remain.
    planted = Planted(2, late=(0, 1), late_ms=100.0, turns=True, **QUIET)
    snapshot = snapshot_of(planted)
    finding = next(item for item in diagnose(snapshot) if item.title.startswith("input-bound"))
    assert finding.ceiling == pytest.approx(175 / 75, abs=0.1)
    assert any(" data" in item.text for item in finding.evidence)
    # Without the other ranks it is that of the wait alone.
    alone = next(
        item for item in diagnose(replace(snapshot, ranks=None)) if item.title.startswith("input-bound")
    )
    assert alone.ceiling is not None and alone.ceiling < 1.6
