"""On a GPU, a cost is the time in which the device waits for it, and never more than the host measured.

The host runs ahead of the device until the queue of the stream is full, and then waits in whichever call comes next.
So the same host times are a fault where the device waits, and none where it computes. Times of phases by both clocks
are `host_ns` and `device_ns` of `phases[name]` in a window.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from planted_runs import GPU_HOST, GPU_STEP, MS, NVML, Planted, capture, gpu, healthy
from planted_runs import script as observed

from ndd_engine.diagnose import diagnose
from ndd_engine.record.events import FunctionsEvent, SampleEvent, SettingEvent
from ndd_engine.record.figures import estimated_rate

# A step of 20 ms on the device, which computes all the time.
BUSY = {
    "data_wait": 0.05,
    "to_device": 0.1,
    "forward": 7.0,
    "backward": 12.0,
    "optimizer": 0.6,
    "other": 0.05,
}
# What the host needs for it without waiting for the device.
AHEAD = {"data_wait": 0.2, "to_device": 0.2, "forward": 2.0, "backward": 1.0, "optimizer": 0.6, "other": 0.2}
FULL, HALF = {**NVML, "util_percent": 99}, {**NVML, "util_percent": 45, "power_w": 200.0}
# The host waits 20 ms in one phase of a step; the device computes meanwhile, or waits for it.
WAITS, COMPUTES = 20.0, 0.05


def waiting(phase: str, device_ms: float, **more: Any) -> Planted:
    return gpu(phases=healthy(to_device=0.1, **{phase: WAITS}), device={**GPU_STEP, phase: device_ms}, **more)


def script(
    host: dict[str, float], device: dict[str, Any], gpu: dict[str, Any] | None, **more: Any
) -> Planted:
    """With the milliseconds of each phase by both clocks. gpu: what NVML says, None where there is none."""
    run = {"usable_cores": 16.0, "threads": 16}
    return observed(run=run, phases={**AHEAD, **host}, device=device, gpu=gpu, host=GPU_HOST, **more)


def waits(ms: float) -> FunctionsEvent:
    """A profiled step in which train.py:57 reads a value for so long."""
    wait = ["/home/me/train.py", 57, "main", "item", 1, round(ms * MS)]
    return FunctionsEvent(9, 20 * MS, [], [wait], {})


def function(name: str, phase: str, ms: float, phase_ms: float) -> FunctionsEvent:
    """A profiled step in which a function takes so long by itself. phase_ms: its phase."""
    row = ["/home/me/train.py", 12, name, 1, round(ms * MS), round(ms * MS), "", phase]
    return FunctionsEvent(9, 20 * MS, [row], [], {phase: round(phase_ms * MS)})


# Own runs.


@pytest.mark.parametrize(
    ("phase", "cause"), [("data_wait", "data-wait"), ("optimizer", "optimizer"), ("log", "sync")]
)
def test_a_phase_of_the_host_is_blamed_only_if_the_device_waits_for_it(phase: str, cause: str) -> None:
    sets = ("precision.amp=bf16", "log.every_steps=1", "optimizer.implementation=foreach")
    assert cause in waiting(phase, WAITS, sets=sets).causes()
    assert cause not in waiting(phase, COMPUTES, sets=sets).causes()


def test_workers_that_restart_cost_first_batches_and_what_the_device_sees_of_the_others() -> None:
    phases = {**healthy(to_device=0.1, data_wait=12.0), "data_wait/first_batch": 8.0}
    sets = ("precision.amp=bf16", "loader.workers=1", "loader.persistent=false")
    step = sum(ms for name, ms in phases.items() if "/" not in name)
    for seen, cost in ((0.05, 8.05), (12.0, 12.0)):
        found = gpu(phases=phases, device={**GPU_STEP, "data_wait": seen}, sets=sets).named("worker-restart")
        assert found.share == pytest.approx(cost / step, rel=0.02)


def test_a_device_cost_is_never_more_than_the_host_measured() -> None:
    phases, sets = healthy(to_device=0.1, optimizer=4.0), ("optimizer.implementation=foreach",)
    found = gpu(phases=phases, device={**GPU_STEP, "optimizer": 400.0}, sets=sets).named("optimizer")
    step = sum(phases.values())
    assert found.ceiling == pytest.approx(step / (step - 4.1), rel=0.02)


def test_without_a_device_clock_the_idle_time_bounds_what_a_phase_costs() -> None:
    busy = gpu(phases=healthy(to_device=0.1, data_wait=WAITS), device=dict.fromkeys(GPU_STEP), gpu=FULL)
    assert "data-wait" not in busy.causes()
    assert "data-wait" in replace(busy, gpu={**NVML, "util_percent": 40}).causes()


def test_a_gpu_at_its_power_limit_is_not_throttled() -> None:
    # NVML's "SW power cap" (0x4) is set whenever the limit is what ends the boost, as on any GPU under full load.
    limited = {**NVML, "throttle": ["power cap"], "sm_clock_mhz": 1300, "power_w": 699.0}
    assert "throttling" not in gpu(gpu=limited).causes()
    found = gpu(gpu={**limited, "throttle": ["hw thermal", "power cap"]}).named("throttling")
    assert "hw thermal" in found.title and "power cap" not in found.title
    assert any("699 W" in item.text and "700 W" in item.text for item in found.evidence)
    # A clock well below that of the first minutes is.
    fast, slow = (SampleEvent({**NVML, "sm_clock_mhz": clock}, {}) for clock in (1900, 1310))
    later = gpu(gpu={**limited, "power_w": 600.0}, after={0: [fast] * 20})
    assert all(clock in later.named("throttling").title for clock in ("1300 MHz", "1900 MHz"))
    assert "throttling" not in replace(later, after={0: [slow] * 20}).causes()


def test_a_cuda_graph_is_proposed_only_where_a_step_can_be_captured() -> None:
    usual = gpu(gpu=HALF).named("launch-bound")
    assert "speed.cuda_graph=true" in usual.changes[0].sets
    # The run has asked `why_not` (train/step/graph.py) and recorded its answer.
    why = "the factory has its own step, state, optimizer or lr, which cannot be captured"
    setting = SettingEvent("speed.cuda_graph", "false", "false", None, why)
    found = gpu(gpu=HALF, settings=(setting,)).named("launch-bound")
    assert all("speed.cuda_graph=true" not in change.sets for change in found.changes)
    assert any(why in item.text for item in found.evidence)


# Scripts.


@pytest.mark.parametrize("phase", ["data_wait", "forward", "optimizer", "other"])
def test_a_device_that_is_slower_than_its_host_is_compute_bound(phase: str) -> None:
    """The host waits in whichever call finds the queue full."""
    rest = 20.0 - sum(ms for name, ms in AHEAD.items() if name != phase)
    found = script({phase: rest}, BUSY, FULL).verdict()
    assert found.cause == "healthy" and "96 %" in found.title
    assert found.evidence[0].source == "device clock" and "19 ms" in found.evidence[0].text


def test_a_device_that_starves_within_the_model_is_launch_bound() -> None:
    host = {"forward": 7.2, "backward": 12.0}
    found = script(host, BUSY, HALF).verdict()
    assert found.cause == "launch-bound"
    # What a script can try is an edit of its own, not a setting of this program.
    assert [change.sets for change in found.changes if change.sets] == [("speed.compile=default",)]
    assert script(host, BUSY, FULL).verdict().cause == "healthy"


def test_a_value_that_is_read_in_each_step_costs_only_what_the_device_waits() -> None:
    # The device runs dry while the host launches again what it could have launched before.
    dry = {**BUSY, "forward": 4.0, "backward": 7.0, "other": 7.0}
    found = script({"other": 15.0}, dry, HALF, functions=waits(14.0))
    assert found.verdict().cause == "sync" and "train.py:57" in found.verdict().title
    assert "user-code" not in found.causes()
    # Without such a wait, the same times are code of the script.
    assert replace(found, functions=None).verdict().cause == "user-code"
    # While the device computes, it costs nothing; without device times, NVML is the bound.
    for device in (BUSY, dict.fromkeys(BUSY)):
        assert script({"other": 15.0}, device, FULL, functions=waits(14.0)).causes() == ["healthy"]


@pytest.mark.parametrize("gap", [3.0, 8.0])
def test_a_loader_is_blamed_for_the_gap_that_the_device_sees(gap: float) -> None:
    host = {"data_wait": 16.0}
    device = {**BUSY, "data_wait": gap, "forward": 7.0 - gap / 2, "backward": 12.0 - gap / 2}
    found = script(host, device, HALF).named("data-wait")
    assert found.share == pytest.approx(gap / sum({**AHEAD, **host}.values()), rel=0.01)
    assert any(item.source == "device clock" for item in found.evidence)
    assert "data-wait" not in script(host, {**device, "data_wait": 0.05}, FULL).causes()


def test_a_function_is_not_slow_while_the_device_computes() -> None:
    step = function("Net.forward", "forward", 9.0, 17.0)
    host = {"forward": 17.0, "backward": 1.0}
    assert "slow-function" not in script(host, BUSY, FULL, functions=step).causes()
    assert "slow-function" in script(host, BUSY, HALF, functions=step).causes()


# Without NVML: MIG, virtual GPUs, WSL2, most containers.


@pytest.mark.parametrize("nvml", [None, {**NVML, "util_percent": 88}])
def test_without_nvml_a_read_costs_what_the_device_waits(nvml: dict[str, Any] | None) -> None:
    host = {"forward": 0.2, "backward": 0.2, "data_wait": 0.2, "other": 18.0}
    device = {**BUSY, "data_wait": 0.2, "other": 0.3}
    assert script(host, device, nvml, functions=waits(17.0)).causes() == ["healthy"]
    # The same wait, after which the script computes for a while before it launches anything.
    dry = {**BUSY, "forward": 4.0, "backward": 7.0, "data_wait": 0.2, "other": 8.0}
    guilty = script(host, dry, nvml, functions=waits(17.0)).verdict()
    assert guilty.cause == "sync" and guilty.share == pytest.approx(0.41, abs=0.02)
    assert any(item.source == "device clock" for item in guilty.evidence)
    # It costs no more than the host measured.
    assert script(host, dry, nvml, functions=waits(3.0)).named("sync").share == 0.15


def test_a_loader_that_the_device_hides_is_no_slow_function() -> None:
    step = function("Data.__getitem__", "data_wait", 15.0, 16.0)
    host = {"data_wait": 16.0}
    assert script(host, {**BUSY, "data_wait": 0.0}, None, functions=step).causes() == ["healthy"]
    seen = {**BUSY, "data_wait": 10.0, "forward": 2.0, "backward": 7.0}
    found = script(host, seen, None, functions=step).verdict()
    assert found.cause == "data-wait" and found.share == pytest.approx(0.5, abs=0.03)


def test_a_function_in_the_model_is_slow_where_the_device_waits_for_it() -> None:
    step = function("Net.forward", "forward", 15.0, 17.0)
    host, hidden = {"forward": 17.0, "backward": 2.0}, {**BUSY, "data_wait": 0.0, "other": 0.0}
    # The device has work when the model begins, and perhaps to its end: only a capture can tell.
    (asked,) = script(host, hidden, None, functions=step).found()
    assert asked.cause == "launch-bound" and asked.confidence == "possible" and asked.share is None
    assert "(k)" in asked.changes[0].text  # the key that captures
    assert "train.py:12" in str(asked.changes[0].where)
    # It has none: the times of its phases are those of the host.
    found = script(host, {**AHEAD, **host}, None, functions=step).verdict()
    assert found.cause == "slow-function" and found.share == pytest.approx(0.74, abs=0.02)


def test_a_host_that_is_as_slow_as_the_device_may_be_launch_bound_which_a_capture_tells() -> None:
    slow = {"data_wait": 0.5, "forward": 30.0, "backward": 30.0, "optimizer": 10.0, "other": 1.0}
    found = script(slow, {**AHEAD, **slow}, None)
    first = found.verdict()
    assert first.cause == "launch-bound" and first.confidence == "possible" and first.ceiling is None
    # NVML and a capture answer that.
    assert replace(found, gpu=FULL).verdict().confidence != "possible"
    assert replace(found, kernels=capture("kernels")).verdict().cause != "launch-bound"
    # So does a device that lags behind.
    lagging = {**slow, "forward": 5.0, "backward": 5.0}
    assert "launch-bound" not in script(lagging, {**AHEAD, **slow}, None).causes()


# What this GPU can do.

ESTIMATED = {"kernels": 95 * MS, "measured": 90 * MS, "usual": 80 * MS, "low": 58 * MS, "high": 110 * MS}


@pytest.mark.parametrize(
    ("changes", "idle", "said"),
    [
        ({}, {}, "compute-bound: within 11 % of what this GPU can do"),
        ({"usual": 95 * MS}, {}, "compute-bound: the kernels are as fast as estimated"),
        ({"usual": 45 * MS, "high": 62 * MS}, {}, "compute-bound, but the kernels take 2.00x as long"),
        # Most kernels have no estimate, or the GPU often waits: that limits nothing.
        ({"kernels": 200 * MS}, {}, ""),
        ({}, {"other": 11}, ""),
    ],
)
def test_a_gpu_that_always_computes_is_compared_with_what_it_can_do(
    changes: dict[str, int], idle: dict[str, int], said: str
) -> None:
    event = replace(capture("kernels", **idle), estimated_ns={**ESTIMATED, **changes})
    snapshot = gpu(kernels=event).snapshot()
    first = diagnose(snapshot)[0]
    assert said in first.title if said else "compute-bound" not in first.title
    assert any("estimated from their shapes" in item.text for item in first.evidence) == bool(said)
    rate = estimated_rate(snapshot)
    if "kernels" in changes:
        assert rate is None
    elif not changes and not idle:
        # In the capture, its kernels take all of the time.
        items = snapshot.items_per_s * snapshot.step_ns * 1e-9 / (0.1 / 5)
        assert rate == (pytest.approx(items * 90 / 110), pytest.approx(items * 90 / 58))
