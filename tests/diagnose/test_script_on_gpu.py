"""Scripts on a GPU: what the device waits for is the bottleneck, and what only the host waits for is none.

Times of phases by both clocks are `host_ns` and `device_ns` of `phases[name]` in a window. The host runs ahead until
the queue of the stream is full; CUDA events on the stream tell what the device does.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pairs import GPU_HOST, capture
from planted_runs import MS, NVML, Planted

from ndd_engine.record.events import FunctionsEvent

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


def script(
    host: dict[str, float], device: dict[str, Any], gpu: dict[str, Any] | None, **more: Any
) -> Planted:
    """With the milliseconds of each phase by both clocks."""
    config = {"script": {"command": ["python", "train.py"]}, "batch": {"accumulation": 1, "micro": 8}}
    run = {"config": config, "usable_cores": 16.0, "threads": 16}
    return Planted(run=run, phases={**AHEAD, **host}, device=device, gpu=gpu, host=GPU_HOST, **more)


def waits(ms: float) -> FunctionsEvent:
    """A profiled step in which train.py:57 reads a value for so long."""
    wait = ["/home/me/train.py", 57, "main", "item", 1, round(ms * MS)]
    return FunctionsEvent(9, 20 * MS, [], [wait], {})


@pytest.mark.parametrize("phase", ["data_wait", "to_device", "forward", "backward", "optimizer", "other"])
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
    sets = [change.sets for change in found.changes if change.sets]
    assert sets == [("speed.compile=default",)]
    assert script(host, BUSY, FULL).verdict().cause == "healthy"


def test_a_script_that_reads_a_value_in_each_step_is_sync_bound() -> None:
    # The device runs dry while the host launches again what it could have launched before.
    dry = {**BUSY, "forward": 4.0, "backward": 7.0, "other": 7.0}
    found = script({"other": 15.0}, dry, HALF, functions=waits(14.0))
    assert found.verdict().cause == "sync"
    assert "train.py:57" in found.verdict().title
    assert "user-code" not in found.causes()
    # Without such a wait, the same times are code of the script.
    assert replace(found, functions=None).verdict().cause == "user-code"


def test_a_value_that_is_read_while_the_device_computes_costs_nothing() -> None:
    found = script({"other": 15.0}, BUSY, FULL, functions=waits(14.0))
    assert found.causes() == ["healthy"]
    # The same without device times, of which NVML is the bound.
    assert script({"other": 15.0}, dict.fromkeys(BUSY), FULL, functions=waits(14.0)).causes() == ["healthy"]


@pytest.mark.parametrize("gap", [3.0, 8.0])
def test_a_loader_is_blamed_for_the_gap_that_the_device_sees(gap: float) -> None:
    host = {"data_wait": 16.0}
    device = {**BUSY, "data_wait": gap, "forward": 7.0 - gap / 2, "backward": 12.0 - gap / 2}
    found = script(host, device, HALF).named("data-wait")
    step = sum({**AHEAD, **host}.values())
    assert found.share == pytest.approx(gap / step, rel=0.01)
    assert any(item.source == "device clock" for item in found.evidence)
    assert "data-wait" not in script(host, {**device, "data_wait": 0.05}, FULL).causes()


def test_a_function_is_not_slow_while_the_device_computes() -> None:
    row = ["/home/me/train.py", 12, "Net.forward", 1, 9 * MS, 9 * MS, "", "forward"]
    step = FunctionsEvent(9, 20 * MS, [row], [], {"forward": 17 * MS})
    host = {"forward": 17.0, "backward": 1.0}
    assert "slow-function" not in script(host, BUSY, FULL, functions=step).causes()
    assert "slow-function" in script(host, BUSY, HALF, functions=step).causes()


def function(name: str, phase: str, ms: float, **phases: float) -> FunctionsEvent:
    """A profiled step in which a function takes so long by itself. phases: of the profiled step, in milliseconds."""
    row = ["/home/me/train.py", 12, name, 1, round(ms * MS), round(ms * MS), "", phase]
    lengths = {key: round(value * MS) for key, value in phases.items()}
    return FunctionsEvent(9, 20 * MS, [row], [], lengths)


# Without NVML: MIG, virtual GPUs, WSL2, most containers.


@pytest.mark.parametrize("card", [None, {**NVML, "util_percent": 88}])
def test_a_value_that_is_read_while_the_device_computes_costs_what_the_device_waits(
    card: dict[str, Any] | None,
) -> None:
    quick = {"forward": 0.2, "backward": 0.2, "data_wait": 0.2}
    device = {**BUSY, "data_wait": 0.2, "other": 0.3}
    found = script({**quick, "other": 18.0}, device, card, functions=waits(17.0))
    assert found.causes() == ["healthy"]
    # The same wait, after which the script computes for a while before it launches anything.
    dry = {**BUSY, "forward": 4.0, "backward": 7.0, "data_wait": 0.2, "other": 8.0}
    guilty = script({**quick, "other": 18.0}, dry, card, functions=waits(17.0)).verdict()
    assert guilty.cause == "sync" and guilty.share == pytest.approx(0.41, abs=0.02)
    assert any(item.source == "device clock" for item in guilty.evidence)
    # It costs no more than the host measured.
    assert script({**quick, "other": 18.0}, dry, card, functions=waits(3.0)).named("sync").share == 0.15


def test_a_loader_that_the_device_hides_is_no_slow_function() -> None:
    profiled = function("Data.__getitem__", "data_wait", 15.0, data_wait=16.0)
    host = {"data_wait": 16.0}
    assert script(host, {**BUSY, "data_wait": 0.0}, None, functions=profiled).causes() == ["healthy"]
    seen = {**BUSY, "data_wait": 10.0, "forward": 2.0, "backward": 7.0}
    found = script(host, seen, None, functions=profiled).verdict()
    assert found.cause == "data-wait" and found.share == pytest.approx(0.5, abs=0.03)


def test_a_function_in_the_model_is_slow_where_the_device_waits_for_it() -> None:
    profiled = function("Net.forward", "forward", 15.0, forward=17.0)
    host, hidden = {"forward": 17.0, "backward": 2.0}, {**BUSY, "data_wait": 0.0, "other": 0.0}
    # The device has work when the model begins, and perhaps to its end: only a capture can tell.
    (asked,) = script(host, hidden, None, functions=profiled).found()
    assert asked.cause == "launch-bound" and asked.confidence == "possible" and asked.share is None
    assert "(k)" in asked.changes[0].text  # the key that captures
    assert "train.py:12" in str(asked.changes[0].where)
    # It has none: the times of its phases are those of the host.
    dry = {**AHEAD, **host}
    found = script(host, dry, None, functions=profiled).verdict()
    assert found.cause == "slow-function" and found.share == pytest.approx(0.74, abs=0.02)


def test_a_host_that_is_as_slow_as_the_device_may_be_launch_bound_which_a_capture_tells() -> None:
    slow = {"data_wait": 0.5, "forward": 30.0, "backward": 30.0, "optimizer": 10.0, "other": 1.0}
    found = script(slow, {**AHEAD, **slow}, None)
    first = found.verdict()
    assert first.cause == "launch-bound" and first.confidence == "possible" and first.ceiling is None
    assert "(k)" in first.changes[0].text
    # NVML and a capture answer that.
    assert replace(found, gpu=FULL).verdict().confidence != "possible"
    assert replace(found, kernels=capture("kernels")).verdict().cause != "launch-bound"
    # So does a device that lags behind.
    lagging = {**slow, "forward": 5.0, "backward": 5.0}
    assert "launch-bound" not in script(lagging, {**AHEAD, **slow}, None).causes()
