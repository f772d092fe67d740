"""What the parts of `make gpu` make of a GPU's figures, on a machine that may have none."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from benchmarks.engine import ONLY_STEPS, engine

from ndd_engine.record.events import EndEvent
from ndd_engine.record.rundir import RunDir
from ndd_engine.trial.claims import claims as all_claims
from ndd_watch.changes import Place
from qa.faults.cases import MODULE
from qa.faults.faulty import GPU_CASES
from qa.gpu import claims, faults, first, runs
from qa.gpu.figures import FAIL, PASS, Figure, Task, read


@pytest.fixture
def given(tmp_path: Path) -> Task:
    """A part on a machine with a GPU."""
    return Task(tmp_path / "figures.jsonl", "cuda", "smoke", time.monotonic() + 300.0)


def found_in(given: Task) -> dict[str, Figure]:
    return {figure.name: figure for figure in read(given.out)}


def verdicts(given: Task) -> dict[str, str]:
    return {name: figure.verdict for name, figure in found_in(given).items()}


def test_losses_that_arrive_late_are_compared_by_step() -> None:
    def windows(*known: tuple[int, float] | None) -> list[runs.Json]:
        return [{"type": "window", "last_loss": None if item is None else list(item)} for item in known]

    eager = runs.losses(windows((1, 4.0), (2, 2.0), (3, 1.0), (4, 0.5)))
    late = runs.losses(windows(None, (1, 4.0), (1, 4.0), (3, 1.0)))
    assert runs.difference(eager, late) == (0.0, 2), "the loss of step 2 was overtaken"
    other = runs.losses(windows((1, 4.0), (2, 2.1), (4, 0.5)))
    assert runs.difference(eager, other) == (pytest.approx(0.05), 3)
    assert runs.difference(eager, {}) == (0.0, 0), "nothing is compared, so the number is part of a verdict"


def test_the_decisive_claims_and_severe_faults_run_and_the_others_are_left_to_only() -> None:
    decisive, other = (claims.wanted(which, "full", Place(True, 16)) for which in ("decisive", "other"))
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


def ended(given: Task, *events: runs.Json, status: str = "done") -> runs.Trained:
    return runs.Trained(EndEvent(status, "why", 8, 0), list(events), RunDir(given.out.parent / "run"))


def window(steps: int = 10, device_steps: int = 2, **device_ms: float | None) -> runs.Json:
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
def test_the_device_clock_is_compared_with_the_steps(
    given: Task, windows: list[runs.Json], verdict: str
) -> None:
    first.clocks(given, "run", ended(given, *windows))
    assert verdicts(given)["run: device clock"] == verdict
