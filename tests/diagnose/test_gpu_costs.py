"""On a GPU, a cost is the time in which the device waits for it, and never more than the host measured.

The host runs ahead of the device until a queue is full, and then waits in whichever call comes next. So the same host
times are a fault where the device waits, and none where it computes.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from pairs import GPU_STEP, gpu
from planted_runs import NVML, healthy

from ndd_engine.record.events import SampleEvent, SettingEvent

# The host waits 20 ms in one phase of a step; the device computes meanwhile, or waits for it.
WAITS, COMPUTES = 20.0, 0.05


def waiting(phase: str, device_ms: float, **more: object):  # type: ignore[no-untyped-def]
    return gpu(phases=healthy(to_device=0.1, **{phase: WAITS}), device={**GPU_STEP, phase: device_ms}, **more)


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
    found = gpu(phases=healthy(to_device=0.1, optimizer=4.0), device={**GPU_STEP, "optimizer": 400.0},
                 sets=("precision.amp=bf16", "optimizer.implementation=foreach")).named("optimizer")  # fmt: skip
    step = sum(healthy(to_device=0.1, optimizer=4.0).values())
    assert found.ceiling == pytest.approx(step / (step - 4.1), rel=0.02)


def test_without_a_device_clock_the_idle_time_bounds_what_a_phase_costs() -> None:
    unknown = dict.fromkeys(GPU_STEP)
    busy = gpu(
        phases=healthy(to_device=0.1, data_wait=WAITS), device=unknown, gpu={**NVML, "util_percent": 99}
    )
    assert "data-wait" not in busy.causes()
    assert "data-wait" in replace(busy, gpu={**NVML, "util_percent": 40}).causes()


def test_a_gpu_at_its_power_limit_is_not_throttled() -> None:
    # NVML's "SW power cap" (0x4) is set whenever the limit is what ends the boost, as on any GPU under full load.
    limited = {**NVML, "throttle": ["power cap"], "sm_clock_mhz": 1300, "power_w": 699.0}
    assert "throttling" not in gpu(gpu=limited).causes()
    found = gpu(gpu={**limited, "throttle": ["hw thermal", "power cap"]}).named("throttling")
    assert "hw thermal" in found.title and "power cap" not in found.title
    assert any("699 W" in item.text and "700 W" in item.text for item in found.evidence)


def test_a_clock_well_below_that_of_the_first_minutes_is_throttling() -> None:
    fast = SampleEvent({**NVML, "sm_clock_mhz": 1900}, {})
    later = gpu(gpu={**NVML, "throttle": ["power cap"], "sm_clock_mhz": 1300}, after={0: [fast] * 20})
    title = later.named("throttling").title
    assert "1300 MHz" in title and "1900 MHz" in title
    slow = SampleEvent({**NVML, "sm_clock_mhz": 1310}, {})
    assert "throttling" not in replace(later, after={0: [slow] * 20}).causes()


def test_a_cuda_graph_is_proposed_only_where_a_step_can_be_captured() -> None:
    starved = {**NVML, "util_percent": 45, "power_w": 200.0}
    usual = gpu(gpu=starved).named("launch-bound")
    assert "speed.cuda_graph=true" in usual.changes[0].sets
    # The run has asked `why_not` (train/step/graph.py) and recorded its answer.
    why = "the factory has its own step, state, optimizer or lr, which cannot be captured"
    setting = SettingEvent("speed.cuda_graph", "false", "false", None, why)
    found = gpu(gpu=starved, settings=(setting,)).named("launch-bound")
    assert all("speed.cuda_graph=true" not in change.sets for change in found.changes)
    assert any(why in item.text for item in found.evidence)
