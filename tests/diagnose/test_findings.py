"""Findings: order, ceiling, when to leave them as is, edits, and the verdicts on a whole run."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from cases import HAZARDS, NEIGHBOUR, PAIRS, Pair
from planted_runs import Planted, alone, cores, evaluated, files, healthy, profiled

from ndd_engine.config import read
from ndd_engine.diagnose import diagnose
from ndd_engine.record.events import EndEvent, SettingEvent, StageEvent, TrialEvent
from ndd_engine.record.state import RunState

WORKLOADS = ("antispoof", "chartext", "finetune", "eeg", "summarise")
SLOWED = next(pair.guilty for pair in PAIRS if pair.cause == "neighbour-cores")
BUSY = Planted(phases=healthy(data_wait=20.0, optimizer=5.0), sets=["optimizer.implementation=loop"])


def edits() -> dict[tuple[str, ...], Pair]:
    """Every list of edits that the planted cases bring about."""
    found: dict[tuple[str, ...], Pair] = {}
    for pair in PAIRS:
        for item in pair.guilty.found():
            for change in item.changes:
                if change.sets:
                    found[change.sets] = pair
    return found


@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_proposed_edit_is_a_valid_configuration(workload: str) -> None:
    for sets, pair in edits().items():
        known = [key for key in pair.guilty.sets if not key.startswith("workload.")]
        own = workload == pair.guilty.workload
        applied = [item for item in sets if own or not item.startswith("workload.")]
        read(None, [*known, *applied], workload).resolve()


@pytest.mark.parametrize("workload", WORKLOADS)
def test_micro_batches_keep_the_effective_batch(workload: str) -> None:
    run = Planted(
        workload, ["batch.micro=4", "batch.effective=32"],
        baseline=alone(micro=4, micro_ns=2.4e6, other_micro=2, other_ns=2.2e6),
    )  # fmt: skip
    found = run.named("small-micro")
    batch = read(None, ["batch.micro=4", "batch.effective=32", *found.sets], workload).resolve().batch
    assert (batch.items, batch.micro) == (32, 32)


@pytest.mark.parametrize("pair", HAZARDS, ids=lambda pair: pair.id)
def test_what_ends_the_run_comes_before_what_slows_it(pair: Pair) -> None:
    device = None if pair.guilty.device is None else {**pair.guilty.device, "data_wait": 40.0}
    slow = replace(pair.guilty, phases={**pair.guilty.phases, "data_wait": 40.0}, device=device)
    found = slow.found()
    assert found[0].cause == pair.cause
    assert len(found) > 1
    assert [item.cause for item in BUSY.found()] == ["data-wait", "optimizer"]  # the largest ceiling first


def test_ceilings_are_of_the_wall_time_and_no_less_than_what_was_measured() -> None:
    threads = alone(threads=1, by_threads=[[2.0, 9.5e6]])
    found = Planted(run={"threads": 1}, baseline=threads, host=cores(1.0, 1.0)).named("few-threads")
    assert found.ceiling is not None and 1.8 < found.ceiling <= 2.0
    # Of 69.8 ms, 30 are evaluations.
    after = {n: evaluated(600, 20 * n + 20) for n in range(12)}
    run = Planted(phases=healthy(data_wait=20.0), sets=["evaluate.every_steps=20"], after=after)
    assert set(run.causes()) == {"data-wait", "evaluation"}
    assert run.named("data-wait").ceiling == pytest.approx(69.8 / 49.8, abs=0.01)


# Leave it.


def test_in_a_run_that_ends_soon_advice_names_the_length_that_it_needs() -> None:
    soon = replace(BUSY, run={"total_steps": 260}, prepared_s=30.0).verdict()
    assert soon.leave == ""
    # 45 % of a step of 45 ms: a restart of 30 s breaks even after 30 / 0.02 steps.
    assert soon.from_steps == pytest.approx(1500, rel=0.05) and "1,500" in soon.condition
    change = next(change for change in soon.changes if change.sets)
    assert soon.advice(change) == f"{soon.condition}: {change.text}"
    assert "30.0 s" in soon.evidence[-1].text
    assert replace(BUSY, prepared_s=30.0).verdict().condition == ""
    # Nobody knows what a restart takes, or the run has ended: its advice is for the next one.
    unknown = replace(BUSY, run={"total_steps": 260}, preparing=False, prepared_s=30.0)
    ended = replace(
        BUSY, run={"total_steps": 240}, after={11: [EndEvent("done", "", 240, 0)]}, prepared_s=30.0
    )
    assert unknown.verdict().leave == ended.verdict().leave == ""
    # Compilation of 20 s pays off at 20 ms per step and an assumed speedup of 1.3.
    (compiled,) = (pair.guilty for pair in PAIRS if pair.cause == "compile-cost")
    assert "3,400" in compiled.named("compile-cost").changes[0].text


def test_encoding_everything_once_is_part_of_the_price() -> None:
    short = {"run": {"total_steps": 3000}, "prepared_s": 1.0}
    run = Planted(phases=healthy(data_wait=32.0), loader=files(items=1_000_000), **short)  # type: ignore[arg-type]
    found = run.named("on-the-fly")
    assert "16 min" in found.evidence[-1].text
    assert found.from_steps is not None and found.from_steps > 3000


def trial(verdict: str, *sets: str) -> TrialEvent:
    ratio = 3.0 if verdict == "faster" else 1.0
    return TrialEvent(
        list(sets), "the present", verdict, f"measured: {verdict}", ratio, 0.99 * ratio, 1.01 * ratio
    )


def test_what_was_tried_in_vain_steps_back_and_says_so() -> None:
    in_vain = [trial("no difference", "loader.workers=1"), trial("slower", "loader.cache=true")]
    tried = replace(BUSY, trials=in_vain)
    found = tried.found()
    assert [item.cause for item in found] == ["optimizer", "data-wait"]
    assert tried.trials[0].text in found[1].leave
    # While another of its settings is left to try, that one is proposed instead.
    left = replace(BUSY, trials=in_vain[:1]).verdict()
    assert left.cause == "data-wait" and left.leave == "" and left.sets == ("loader.cache=true",)
    assert left.changes[-1].measured is not None and left.changes[-1].measured.verdict == "no difference"


def test_a_measured_gain_stands_beside_its_change_and_comes_first() -> None:
    gained = replace(
        BUSY, trials=[trial("no difference", "loader.workers=1"), trial("faster", "loader.cache=true")]
    )
    found = gained.verdict()
    assert found.cause == "data-wait" and found.sets == ("loader.cache=true",)
    measured = [change.measured.verdict if change.measured is not None else "" for change in found.changes]
    assert measured == ["faster", "", "no difference"]
    assert found.to_dict()["changes"][0]["measured"] == {
        "verdict": "faster", "ratio": 3.0, "low": pytest.approx(2.97), "high": pytest.approx(3.03)
    }  # fmt: skip
    # Another number of workers than the proposed one was measured as well; threads are another subject.
    others = [
        trial("faster", "loader.workers=2"),
        trial("faster", "run.threads=1"),
        trial("slower", "loader.workers=3"),
    ]
    found = replace(BUSY, trials=others).verdict()
    assert [change.sets for change in found.changes if change.measured is not None] == [("loader.workers=2",)]
    assert found.sets == ("loader.workers=2",)
    # Of a change that was not in effect, nothing is known; and the newest trial counts.
    without = replace(trial("faster", "loader.workers=1"), in_effect=False)
    again = replace(BUSY, trials=[trial("faster", "loader.workers=1"), trial("slower", "loader.workers=1")])
    assert all(change.measured is None for change in replace(BUSY, trials=[without]).verdict().changes)
    assert again.verdict().sets == ("loader.cache=true",)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.id)
def test_advice_is_not_dropped_because_a_run_was_a_short_try(pair: Pair) -> None:
    short = replace(pair.guilty, run={**pair.guilty.run, "total_steps": 250}, prepared_s=60.0)
    whole = {item.cause: item for item in pair.guilty.found()}
    for item in short.found():
        if item.cause in whole:
            assert item.sets == whole[item.cause].sets
            assert item.leave == whole[item.cause].leave or item.cause == "leak"
            if item.ceiling is not None and item.sets and item.cause != "compile-cost":
                assert "for a run" in item.advice(next(change for change in item.changes if change.sets))


# The run as a whole.


@pytest.mark.parametrize(("windows", "steps"), [(1, 10), (12, 1), (2, 9)])
def test_too_short_a_run_is_not_judged(windows: int, steps: int) -> None:
    (found,) = Planted(phases=healthy(data_wait=90.0), windows=windows, steps=steps).found()
    assert found.cause == "too-short" and found.ceiling is None
    # Long steps need not be many.
    assert Planted(phases=healthy(data_wait=900.0), windows=10, steps=1).verdict().cause == "data-wait"
    # Hazards are told of a short run as well.
    hazard = next(pair.guilty for pair in HAZARDS if pair.id == "near-limit-host")
    assert replace(hazard, windows=windows, steps=steps).causes() == ["near-limit", "too-short"]


NO_WORKERS = SettingEvent("loader.workers", "4", "0", False, "batches\x1b[2J are made here")


def test_settings_without_effect_are_named_with_the_reason() -> None:
    (found,) = Planted(settings=[NO_WORKERS, SettingEvent("run.threads", "2", "2", True)]).found()
    assert found.cause == "no-effect" and "loader.workers" in found.title
    assert "batches\\x1b[2J" in found.evidence[0].text
    # Below whatever costs time.
    run = Planted(phases=healthy(data_wait=20.0), settings=[NO_WORKERS])
    assert run.causes() == ["data-wait", "no-effect"]


def test_the_neighbour_is_named() -> None:
    found = SLOWED.verdict()
    assert "stress" in found.title
    assert all(named in found.changes[0].text for named in ("stress", "4711", "0.9"))
    # Of a single thread, at most the time without a core is lost.
    busy = [{"pid": 4711, "name": "stress", "cores": 1.0, "stoppable": True}]
    run = Planted(host=cores(2.0, 0.9, neighbours=busy), run={"threads": 1}, sets=["run.threads=1"])
    assert run.named("neighbour-cores").ceiling == pytest.approx(1 / 0.9)


def test_what_a_run_keeps_without_need_comes_before_other_processes() -> None:
    kept = replace(profiled(), retains=("step.py", 9))
    assert replace(SLOWED, functions=kept).causes()[:2] == ["retain-graph", "neighbour-cores"]


def test_slow_updates_on_shared_cores_are_not_the_optimizers_fault() -> None:
    phases = healthy(optimizer=40.0)
    applied = [SettingEvent("optimizer.implementation", "auto", "fused", True)]
    alone_slow = Planted(phases=phases, settings=applied, host=cores(2.0, 1.95))
    assert alone_slow.verdict().cause == "optimizer"
    shared = replace(alone_slow, host=cores(2.0, 1.1, neighbours=NEIGHBOUR))
    assert "optimizer" not in [item.cause for item in shared.found()]
    assert shared.verdict().cause == "neighbour-cores"


def test_a_measured_speedup_ranks_above_a_smaller_bound() -> None:
    waiting = replace(SLOWED, phases=healthy(data_wait=20.0))
    assert waiting.verdict().cause == "data-wait"
    proved = replace(waiting, trials=[replace(trial("faster", "run.threads=1"), ratio=17.4)])
    assert proved.verdict().cause == "neighbour-cores"


def test_processes_of_the_system_and_of_others_are_not_to_be_stopped() -> None:
    for stoppable in (False, None):
        listed = [{"pid": 1, "name": "systemd", "cores": 0.9, "stoppable": stoppable}]
        found = replace(SLOWED, host=cores(2.0, 1.1, neighbours=listed)).verdict()
        assert found.cause == "neighbour-cores"
        advice = " ".join(change.text for change in found.changes)
        assert "systemd" not in advice and "pid" not in advice and "stop" not in advice
        assert any("systemd" in item.text for item in found.evidence)


def test_after_a_resume_the_new_process_counts() -> None:
    state = Planted(window={"gc_ns": 60_000_000, "gc_count": 3, "gc_max_ns": 1}).state()
    assert diagnose(state.snapshot())[0].cause == "gc"
    state.fold(1e3, StageEvent("resume", "starting"))
    assert diagnose(state.snapshot())[0].cause == "too-short"


def test_findings_are_json_the_same_of_a_replay_and_no_gpu_is_proposed_where_there_is_none() -> None:
    for pair in PAIRS:
        state = pair.guilty.state()
        found = [item.to_dict() for item in diagnose(state.snapshot())]
        again = diagnose(RunState.from_line(state.to_line(1.0)).snapshot())
        assert json.dumps([item.to_dict() for item in again], allow_nan=False) == json.dumps(found)
        if pair.guilty.device is None:
            assert "loader.placement=device" not in json.dumps(found)
