"""What the parts of `make gpu` make of a GPU's figures, on a machine that may have none."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from benchmarks.engine import ONLY_STEPS, Json, Trained, engine

from ndd_engine.diagnose.finding import Finding
from ndd_engine.predict.estimate import Fit
from ndd_engine.record.events import EndEvent
from ndd_engine.record.rundir import RunDir
from ndd_engine.trial.claims import claims as all_claims
from ndd_watch.changes import Conditions
from qa.faults.cases import MODULE
from qa.faults.faulty import GPU_CASES
from qa.gpu import capped, claims, faults, first, first_scripts, memory, overhead
from qa.gpu.figures import FAIL, PASS, UNCLEAR, Figure, Task, read


@pytest.fixture
def given(tmp_path: Path) -> Task:
    """A part on a machine with a GPU."""
    return Task(tmp_path / "figures.jsonl", "cuda", "smoke", time.monotonic() + 300.0)


def found_in(given: Task) -> dict[str, Figure]:
    return {figure.name: figure for figure in read(given.out)}


def verdicts(given: Task) -> dict[str, str]:
    return {name: figure.verdict for name, figure in found_in(given).items()}


@pytest.mark.parametrize(
    ("median", "interval", "verdict"),
    [(0.995, None, PASS), (0.98, (0.97, 0.985), FAIL), (0.98, (0.95, 1.01), UNCLEAR), (0.98, None, UNCLEAR)],
)
def test_a_median_below_the_target_fails_only_with_its_interval(
    median: float, interval: tuple[float, float] | None, verdict: str
) -> None:
    assert overhead.judged(median, interval)[0] == verdict


def test_a_prediction_that_is_silently_too_low_fails(given: Task) -> None:
    cases = [memory.Case(1, 0.02, True), memory.Case(4, -0.03, True), memory.Case(8, -0.2, False)]
    memory.summary(given, cases)
    found = found_in(given)
    assert found["replay of the recorded steps, worst"].verdict == FAIL
    silent = found["more than 2 % too low without a warning"]
    assert (silent.value, silent.verdict) == ("1", FAIL)


def test_losses_that_arrive_late_are_compared_by_step() -> None:
    def windows(*known: tuple[int, float] | None) -> list[Json]:
        return [{"type": "window", "last_loss": None if item is None else list(item)} for item in known]

    eager = first.losses(windows((1, 4.0), (2, 2.0), (3, 1.0), (4, 0.5)))
    late = first.losses(windows(None, (1, 4.0), (1, 4.0), (3, 1.0)))
    assert first.difference(eager, late) == (0.0, 2), "the loss of step 2 was overtaken"
    other = first.losses(windows((1, 4.0), (2, 2.1), (4, 0.5)))
    assert first.difference(eager, other) == (pytest.approx(0.05), 3)
    assert first.difference(eager, {}) == (0.0, 0), "nothing is compared, so the number is part of a verdict"


@pytest.mark.parametrize(
    ("cap", "micro"), [(1000, 96), (960, 96), (959, 88), (80, 8), (79, None), (10**9, None)]
)
def test_the_proposal_is_the_largest_batch_within_the_limit(cap: int, micro: int | None) -> None:
    class Linear:
        """A prediction of 10 bytes per item."""

        def fit(self, micro: int, _accumulation: int, cap: int) -> Fit:
            return Fit(10 * micro, 10 * micro <= cap)

    assert capped.proposal(Linear(), cap, 100_000) == micro  # type: ignore[arg-type]


def test_the_decisive_claims_and_severe_faults_run_and_the_others_are_left_to_only() -> None:
    decisive, other = (claims.wanted(which, "full", Conditions(True, 16)) for which in ("decisive", "other"))
    assert [claim.id for claim in decisive] == list(claims.DECISIVE)
    assert sorted(claim.id for claim in (*decisive, *other)) == sorted(claim.id for claim in all_claims())
    severe, rest = (faults.wanted(which, "full") for which in ("severe", "other"))
    assert {case.fault for case in severe} == {case.fault for case in GPU_CASES}
    assert sorted(case.name for case in (*severe, *rest)) == sorted(case.name for case in GPU_CASES)


@pytest.mark.long
def test_the_planted_workloads_train() -> None:
    reading = ("workload.options.reads=3", "workload.options.empty=1", "workload.options.rounds=4")
    for factory, options in (("reading", reading), ("heavy", ("workload.options.megabytes=2",))):
        place = f'workload.path=["{MODULE.parent}"]'
        sets = (place, *options, *ONLY_STEPS, "run.device=cpu", "batch.micro=4")
        with engine(f"{MODULE.stem}:{factory}", sets) as subject:
            subject.train(3)
            assert subject.loop.step == 3


# The first checks, from records made by hand.


def ended(given: Task, *events: Json, status: str = "done") -> Trained:
    return Trained(EndEvent(status, "why", 8, 0), list(events), RunDir(given.out.parent / "run"))


def window(steps: int = 10, device_steps: int = 2, **device_ms: float | None) -> Json:
    """Steps of 10 ms."""
    rows = {
        name: {"host_ns": 1_000_000 * steps, "device_ns": None if ms is None else round(ms * 1e6)}
        for name, ms in device_ms.items()
    }
    return {
        "type": "window", "steps": steps, "device_steps": device_steps, "wall_ns": 10_000_000 * steps,
        "phases": rows, "last_loss": None,
    }  # fmt: skip


UNTIMED = window(20, 0, forward=None, backward=None)


@pytest.mark.parametrize(
    ("windows", "verdict"),
    [
        ([window(forward=3.0, backward=6.0)], PASS),
        ([window(**{"forward": 4.0, "forward/graph": 4.0, "backward": 5.0})], PASS),  # a part of a phase
        ([window(forward=3.0, backward=9.0)], FAIL),  # 12 ms of a step that takes 10
        ([window(5, forward=3.0, backward=6.0), UNTIMED], PASS),
        ([UNTIMED], FAIL),
        ([window(forward=3.0, backward=0.0)], FAIL),
        ([], FAIL),
    ],
)
def test_the_device_clock_is_compared_with_the_steps(given: Task, windows: list[Json], verdict: str) -> None:
    first.clocks(given, "run", ended(given, *windows))
    assert verdicts(given)["run: device clock"] == verdict


@pytest.mark.parametrize(
    ("waits_ms", "causes", "verdict"),
    [(0.05, (), PASS), (0.05, ("optimizer",), PASS), (0.05, ("data-wait",), FAIL), (3.0, (), FAIL)],
)
def test_a_loader_is_blamed_for_what_the_gpu_waits(
    given: Task, waits_ms: float, causes: tuple[str, ...], verdict: str
) -> None:
    findings = tuple(Finding(cause, "", (), "certain") for cause in causes)
    first.verdict_on_loader(given, window(data_wait=waits_ms, forward=5.0), findings)
    assert verdicts(given)["the loader is not blamed"] == verdict


def test_a_run_that_warns_or_ignores_a_setting_is_a_failure(given: Task) -> None:
    warning = {"type": "mark", "kind": "warning", "text": "odd"}
    setting = {"type": "setting", "name": "speed.compile", "in_effect": False}
    first.ended(given, "bad", ended(given, warning, setting, status="failed"))
    first.ended(given, "good", ended(given, setting | {"in_effect": True}))
    names = ("run", "warnings", "settings not in effect")
    wanted = (("bad", FAIL), ("good", PASS))
    assert verdicts(given) == {f"{run}: {name}": verdict for run, verdict in wanted for name in names}


def test_a_trial_that_measures_launches_only_is_a_failure(
    given: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step takes 50 ms of the GPU; the host has launched it after 2 ms."""
    monkeypatch.setattr(first_scripts, "observed", lambda *_: RunDir(tmp_path))
    result = {"base": {"step_s": 0.002}, "change": {"step_s": 0.051}}
    monkeypatch.setattr(first_scripts, "tried", lambda *_: result)
    monkeypatch.setattr(first_scripts, "synchronised", lambda _: 0.05)
    before = torch.get_float32_matmul_precision()
    first_scripts.trial(given, tmp_path)
    torch.set_float32_matmul_precision(before)
    assert [figure.verdict for figure in read(given.out)] == [FAIL, PASS]
