"""Every cause is named where it is planted, and not where a run only looks similar."""

from __future__ import annotations

import pytest
from cases import PAIRS
from pairs import Pair, gpu, own
from planted_runs import Planted, alone, cores, data, healthy, work

from ndd_engine.diagnose import CAUSES

# Findings about settings and about the run as a whole; they have tests of their own.
# Of scripts: see test_script.py; of several ranks: see test_rank_findings.py.
ELSEWHERE = {
    "too-short", "healthy", "no-effect", "slow-function", "gpu-unseen", "straggler", "exchange", "skew",
    "iterator-restart", "repeated-items", "data-parallel",
}  # fmt: skip


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.id)
def test_the_planted_cause_is_the_verdict(pair: Pair) -> None:
    found = pair.guilty.verdict()
    assert found.cause == pair.cause, [(item.cause, item.ceiling) for item in pair.guilty.found()]
    assert found.title
    assert found.evidence
    assert found.changes


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.id)
def test_its_innocent_twin_is_not_accused(pair: Pair) -> None:
    assert pair.cause not in pair.innocent.causes()


@pytest.mark.parametrize("pair", [pair for pair in PAIRS if pair.sets], ids=lambda pair: pair.id)
def test_it_proposes_the_edit_that_takes_it_away(pair: Pair) -> None:
    assert pair.guilty.verdict().sets == pair.sets


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.id)
def test_a_ceiling_is_a_bound_of_a_gain(pair: Pair) -> None:
    for item in pair.guilty.found():
        assert item.ceiling is None or item.ceiling >= 1
        assert item.share is None or 0 <= item.share <= 1
        if item.ceiling is not None:
            assert item.share is not None
            assert item.ceiling == pytest.approx(1 / max(1 - item.share, 0.01))


def test_every_cause_is_planted_once() -> None:
    assert {pair.cause for pair in PAIRS} | ELSEWHERE == set(CAUSES)


@pytest.mark.parametrize("workload", ["antispoof", "chartext", "finetune", "eeg", "summarise"])
def test_a_healthy_run_is_called_healthy(workload: str) -> None:
    run = Planted(workload, loader=data(), baseline=alone(), work=work(), host=cores(1.95, 1.9))
    (found,) = run.found()
    assert found.cause == "healthy"
    assert "95 %" in found.title
    assert found.ceiling is None


def test_a_healthy_run_on_a_gpu_is_called_healthy() -> None:
    (found,) = gpu().found()
    assert found.cause == "healthy"


def test_an_own_workload_is_called_healthy() -> None:
    (found,) = own(loader=data(), baseline=alone()).found()
    assert found.cause == "healthy"


LOOKS_GUILTY = {
    "losses read every step": ["log.every_steps=1"],
    "a loop for an optimizer": ["optimizer.implementation=loop"],
    "no workers": ["loader.workers=0"],
    "clipping": ["clip.max_norm=0.5"],
    "no pinned memory": ["loader.pin_memory=false"],
    "items encoded again": ["loader.cache=false"],
    "deterministic": ["speed.deterministic=true"],
    "checkpoints by the step": ["checkpoint.every_steps=5"],
    "evaluations by the step": ["evaluate.every_steps=5"],
    "accumulation": ["batch.micro=2", "batch.accumulation=16"],
}


@pytest.mark.parametrize("sets", LOOKS_GUILTY.values(), ids=LOOKS_GUILTY)
def test_a_setting_is_never_named_because_it_is_set(sets: list[str]) -> None:
    run = Planted("summarise", sets, loader=data(), baseline=alone(), work=work(), host=cores(1.95, 1.9))
    assert run.causes() == ["healthy"]


def test_a_cause_within_the_noise_is_not_named() -> None:
    # One long first window, in which the workers started, and none after it.
    steady = Planted(phases=healthy(data_wait=0.1), loader=None)
    events = steady.events()
    odd = [index for index, (_, event) in enumerate(events) if event.type == "window"][-3]
    slow = Planted(phases=healthy(data_wait=300.0)).window_event(0, 1)
    from ndd_engine.diagnose import diagnose
    from ndd_engine.record.state import RunState

    state = RunState()
    for index, (t, event) in enumerate(events):
        state.fold(t, slow if index == odd else event)
    wait = next(phase for phase in state.snapshot().phases if phase.name == "data_wait")
    assert wait.share > 0.3
    assert [item.cause for item in diagnose(state.snapshot())] == ["healthy"]


def test_one_wait_has_one_cause() -> None:
    waits = {"item-collate", "in-memory-workers", "worker-restart", "short-epochs", "slow-storage", "many-workers",
             "on-the-fly", "few-workers", "data-wait"}  # fmt: skip
    for pair in PAIRS:
        assert len(waits & set(pair.guilty.causes())) <= 1
