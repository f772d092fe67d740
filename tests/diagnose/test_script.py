"""Findings of scripts that are only observed: nothing was measured before training."""

from __future__ import annotations

from typing import Any

import pytest
from planted_runs import HEALTHY, Planted, cores, healthy
from planted_runs import profiled as profiled_step

from ndd_engine.diagnose import Finding, diagnose
from ndd_engine.record.events import FunctionsEvent, StacksEvent

MS = 1_000_000


def script(
    functions: FunctionsEvent | None = None, config: dict[str, Any] | None = None, **more: Any
) -> Planted:
    found = {
        "script": {"command": ["python", "train.py"]},
        "batch": {"accumulation": 1, "micro": 8},
        **(config or {}),
    }
    after = {9: [functions]} if functions is not None else {}
    return Planted(run={"config": found, **more.pop("run", {})}, after=after, **more)


def verdict(run: Planted) -> Finding:
    return diagnose(run.snapshot())[0]


def profiled(
    own_ms: float, name: str = "tokenize", caller: str = "collate", step_ms: float = 25.0, **phases_ms: float
) -> FunctionsEvent:
    """phases_ms: of the profiled step; the function belongs to the first one."""
    phase = next(iter(phases_ms), "")
    row = ["/home/me/train.py", 12, name, 3, round(own_ms * MS), round(own_ms * MS), caller, phase]
    lengths = {name: round(ms * MS) for name, ms in phases_ms.items()}
    return FunctionsEvent(9, round(step_ms * MS), [row], [], lengths)


def test_a_slow_function_is_named_with_its_line_its_caller_and_its_share() -> None:
    phases = {**HEALTHY, "other": 5.0}
    found = verdict(script(profiled(5.0), phases=phases))
    assert found.cause == "slow-function"
    assert all(part in found.title for part in ("train.py:12", "tokenize", "collate", "20 %"))
    assert found.ceiling == pytest.approx(1.25, abs=0.01)


@pytest.mark.parametrize(
    ("step", "share"),
    [
        (profiled(10.0, step_ms=50.0), 0.2),
        # The loop outside the model takes 5 ms, and 9 under the profiler.
        (profiled(8.1, step_ms=29.0, other=9.0), 0.18),
    ],
)
def test_a_step_or_a_phase_that_the_profiler_made_slower_is_scaled(
    step: FunctionsEvent, share: float
) -> None:
    found = verdict(script(step, phases={**HEALTHY, "other": 5.0}))
    assert found.cause == "slow-function" and found.share == pytest.approx(share, abs=0.01)


def test_waiting_for_data_names_the_function_once() -> None:
    phases = {**HEALTHY, "data_wait": 10.0}
    config = {"loader": {"workers": 0}}
    found = diagnose(script(profiled(9.0), config, phases=phases).snapshot())
    assert [item.cause for item in found] == ["data-wait"]
    assert any((change.where or "").startswith("train.py:12 ") for change in found[0].changes)


def test_time_outside_the_model_that_no_function_takes_is_named_by_stack_samples() -> None:
    phases = {**HEALTHY, "other": 8.0}
    stacks = StacksEvent(9, 40, [["other", "/home/me/train.py", 30, "log_norms", 30, 1]])
    for step in (profiled(0.5), profiled(0.5, other=8.0)):
        found = verdict(script(step, phases=phases, stacks=stacks))
        assert found.cause == "user-code"
        assert (found.changes[0].where or "").split() == ["train.py:30", "in", "log_norms"]


def test_a_slow_callback_of_an_own_workload_is_named_and_bounded_by_its_phase() -> None:
    # The profiler slows logging down from the usual 8 ms to 16.
    step = profiled_step(
        ("log", "my/model.py", 40, "log_norms", 15.0),
        ("forward", "my/model.py", 9, "f", 0.1),
        phases={"log": 16 * MS, "forward": 7 * MS},
    )
    run = Planted(workload="my.model:make", phases=healthy(log=8.0), functions=step)
    found = run.named("slow-function")
    assert found.share == pytest.approx(0.27, abs=0.01)
    assert (found.changes[0].where or "").split() == ["model.py:40", "in", "log_norms"]
    # A built-in workload has no code to change.
    assert "slow-function" not in Planted(phases=healthy(log=8.0), functions=step).causes()
    # On a GPU, the function costs only as much as the GPU waits for it.
    device = {"forward": 10.0, "backward": 15.0, "log": 0.2}
    run = Planted(workload="my.model:make", phases=healthy(log=8.0), functions=step, device=device)
    assert "slow-function" not in run.causes()


def test_anomaly_detection_is_told() -> None:
    found = verdict(script(config={"script": {"anomaly": True}}))
    assert (
        found.cause == "anomaly" and found.ceiling is None and "set_detect_anomaly" in found.changes[0].text
    )


def test_more_threads_than_cores_are_told_with_a_setting_to_try() -> None:
    found = verdict(script(run={"threads": 8}))
    assert found.cause == "oversubscribed" and found.sets == ("run.threads=2",) and found.ceiling is None


@pytest.mark.parametrize(("used", "cause"), [(1.9, "many-workers"), (0.4, "data-wait")])
def test_workers_beyond_the_cores_are_too_many_unless_they_wait(used: float, cause: str) -> None:
    phases = {**HEALTHY, "data_wait": 10.0}
    config = {"loader": {"workers": 8}}
    found = verdict(script(config=config, phases=phases, host=cores(used, used), run={"threads": 1}))
    assert found.cause == cause, found


def test_calls_that_wait_for_a_gpu_are_named() -> None:
    wait = ["/home/me/train.py", 40, "main", "item", 3, 8 * MS]
    functions = FunctionsEvent(9, 20 * MS, [], [wait])
    device = {name: value for name, value in HEALTHY.items() if name in ("forward", "loss", "backward")}
    found = script(functions, phases={**HEALTHY, "other": 8.2}, device=device).named("sync")
    assert "train.py:40" in found.title
    assert any(".item()" in item.text and "3 times" in item.text for item in found.evidence)


@pytest.mark.parametrize(
    ("what", "call"), [("float", "float(tensor)"), ("to", '.to("cpu")'), ("synchronize", ".synchronize()")]
)
def test_waits_without_a_call_by_name_are_told_as_they_are_written(what: str, call: str) -> None:
    functions = FunctionsEvent(9, 20 * MS, [], [["/home/me/train.py", 40, "main", what, 1, 8 * MS]])
    phases = {**HEALTHY, "other": 8.2}
    found = script(functions, phases=phases, device=phases).named("sync")
    assert any(call in item.text for item in found.evidence), found.evidence
    assert call in found.changes[0].text


def test_a_script_without_a_fault_is_healthy() -> None:
    found = diagnose(script(profiled(0.4)).snapshot())
    assert [item.cause for item in found] == ["healthy"]


@pytest.mark.parametrize(("threads", "offered"), [(2, True), (1, False)])
def test_one_thread_is_offered_where_nothing_slows_a_script_on_the_cpu(threads: int, offered: bool) -> None:
    config = {"script": {"command": ["python", "train.py"]}, "batch": {"accumulation": 1, "micro": 8}}
    found = Planted(run={"config": config, "threads": threads}).verdict()
    assert found.cause == "healthy"
    assert (("run.threads=1",) in [change.sets for change in found.changes]) is offered
