"""Training on a GPU: the device clock against a reference, memory counters, precision, out of memory."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from ndd_engine.config import read
from ndd_engine.measure import clock as phase
from ndd_engine.measure.clock import DevicePhaseClock
from ndd_engine.record.events import PHASES, EndEvent
from ndd_engine.recordings.snapshot import examine
from ndd_engine.train.run import Run, RunRequest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no CUDA GPU: torch.cuda.is_available() is false"
    ),
]

BASE = ("run.device=cuda", "log.window_s=0.2", "evaluate.batches=4", "checkpoint.every_minutes=0")


def train(folder: Path, *sets: str, steps: int = 60) -> tuple[EndEvent, list[dict[str, Any]]]:
    draft = read(None, [*BASE, *sets], "chartext", {"run": {"max_steps": steps, "name": "gpu"}})
    run = Run.open(RunRequest(draft, folder))
    end = run.execute()
    run.close()
    lines = run.directory.events.read_text(encoding="utf-8").splitlines()
    return end, [json.loads(line) for line in lines]


def test_device_clock_agrees_with_a_synchronised_reference() -> None:
    """Spans of known kernels: the pooled events, read without synchronising, against a synchronised pair."""
    left = torch.randn(4096, 4096, device="cuda")

    def work(times: int) -> None:
        for _ in range(times):
            torch.mm(left, left)

    work(3)
    torch.cuda.synchronize()
    clock = DevicePhaseClock(lambda: torch.cuda.Event(enable_timing=True))
    clock._next_sample = 0
    clock.end_step()  # the next step carries events
    begin, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    clock.enter(phase.FORWARD)
    begin.record()
    work(10)
    middle.record()
    clock.enter(phase.BACKWARD)
    work(20)
    end.record()
    clock.enter(phase.OTHER)
    clock.end_step()
    torch.cuda.synchronize()
    clock.end_step()
    row = clock.take().device[0]
    assert row[phase.FORWARD] == pytest.approx(begin.elapsed_time(middle) * 1e6, rel=0.02)
    assert row[phase.BACKWARD] == pytest.approx(middle.elapsed_time(end) * 1e6, rel=0.02)


def test_a_run_is_timed_by_both_clocks(tmp_path: Path) -> None:
    end, events = train(tmp_path, "workload.size=small")
    assert end.status == "done"
    run = next(event for event in events if event["type"] == "run")
    assert run["device"].startswith("cuda") and run["card"]["name"]
    windows = [event for event in events if event["type"] == "window"]
    for window in windows:
        top = sum(item["host_ns"] for name, item in window["phases"].items() if name in PHASES)
        assert top == window["wall_ns"]
    timed = [window for window in windows if window["device_steps"]]
    assert timed, "no window carries device time"
    assert all(window["phases"]["backward"]["device_ns"] > 0 for window in timed)


def test_memory_counters_equal_those_of_torch(tmp_path: Path) -> None:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    end, events = train(tmp_path, "workload.size=medium", steps=30)
    assert end.status == "done"
    memory = [event for event in events if event["type"] == "memory"]
    assert memory[-1]["peak_reserved_bytes"] == torch.cuda.max_memory_reserved()
    assert memory[-1]["growth_bytes"] > 0
    total = torch.cuda.get_device_properties(0).total_memory
    assert memory[-1]["total_bytes"] == pytest.approx(total, rel=0.02)


@pytest.mark.parametrize("amp", ["off", "bf16", "fp16"])
def test_each_precision_learns(tmp_path: Path, amp: str) -> None:
    end, events = train(
        tmp_path, "workload.size=small", f"precision.amp={amp}", "log.every_steps=1", steps=120
    )
    assert end.status == "done"
    losses = [event["loss"] for event in events if event["type"] == "window" and event["loss"] is not None]
    assert losses[-1] < losses[0] - 0.3
    if amp == "fp16":
        assert any(event["type"] == "window" and event["loss_scale"] for event in events)


def test_out_of_memory_names_what_filled_it_and_what_fits(tmp_path: Path) -> None:
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(2e9 / total, 1.0))
    try:
        end, _ = train(tmp_path, "workload.size=guide", "batch.micro=1024", "precision.amp=off", steps=5)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert end.status == "failed"
    # The test step before training needs as much as the first step.
    assert re.search(r"out of memory on cuda:0 (in a test step|at step 1)", end.reason), end.reason
    assert "--set batch.micro=512 --set batch.accumulation=2" in end.reason
    assert "activations" in end.reason and "optimizer" in end.reason
    # The snapshot in the run's folder names the lines that hold the memory.
    assert "largest owners: " in end.reason
    (snapshot,) = tmp_path.rglob("memory.pickle")
    device = examine(snapshot).devices[0]
    assert device.failures and device.failures[-1].moment.owners


def settings(events: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {event["name"]: event for event in events if event["type"] == "setting"}


def losses(events: list[dict[str, Any]]) -> list[float]:
    return [event["last_loss"][1] for event in events if event["type"] == "window" and event["last_loss"]]


EVERY_STEP = (
    "log.every_steps=1",
    "log.window_s=0",
    "workload.size=small",
    "precision.amp=off",
    "precision.tf32=false",
)


def test_a_cuda_graph_trains_like_eager_steps(tmp_path: Path) -> None:
    plain = losses(train(tmp_path / "plain", *EVERY_STEP, steps=30)[1])
    end, events = train(
        tmp_path / "graph", *EVERY_STEP, "speed.cuda_graph=true", "loader.placement=device", steps=30
    )
    assert end.status == "done"
    assert settings(events)["speed.cuda_graph"]["in_effect"] is True
    assert losses(events) == pytest.approx(plain, rel=1e-3)
    phases = [event["phases"] for event in events if event["type"] == "window"]
    assert any("forward/graph" in names for names in phases)


def test_a_cuda_graph_in_bf16_with_clipping_accumulation_and_a_schedule(tmp_path: Path) -> None:
    sets = (
        "workload.size=small",
        "precision.amp=bf16",
        "clip.max_norm=1.0",
        "batch.accumulation=2",
        "schedule.kind=cosine",
    )
    plain = losses(train(tmp_path / "plain", *sets, *EVERY_STEP[:2], steps=30)[1])
    end, events = train(tmp_path / "graph", *sets, *EVERY_STEP[:2], "speed.cuda_graph=true", steps=30)
    assert end.status == "done"
    assert settings(events)["speed.cuda_graph"]["in_effect"] is True
    assert losses(events)[-1] == pytest.approx(plain[-1], rel=0.05)


@pytest.mark.parametrize(
    "setting",
    [
        "precision.amp=bf16", "precision.amp=fp16", "speed.cudnn_benchmark=true", "speed.deterministic=true",
        "speed.attention=efficient", "speed.attention=math", "optimizer.implementation=foreach",
        "optimizer.implementation=loop", "loader.placement=device", "speed.compile=default",
    ],
)  # fmt: skip
def test_each_setting_is_verified_to_be_in_effect(tmp_path: Path, setting: str) -> None:
    end, events = train(tmp_path, "workload.size=tiny", setting, steps=5)
    assert end.status == "done"
    name = setting.partition("=")[0]
    assert settings(events)[name]["in_effect"] is True, settings(events)[name]["verified"]


def test_pinned_batches_of_workers_are_pinned(tmp_path: Path) -> None:
    _, events = train(tmp_path, "workload.size=tiny", "loader.workers=2", "loader.pin_memory=true", steps=5)
    found = settings(events)
    assert found["loader.pin_memory"]["in_effect"] is True
    assert found["loader.workers"]["in_effect"] is True


@pytest.mark.parametrize("tf32", [True, False])
def test_tf32_is_verified_by_its_rounding(tmp_path: Path, tf32: bool) -> None:
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("this GPU has no TF32")
    _, events = train(
        tmp_path, "workload.size=tiny", "precision.amp=off", f"precision.tf32={str(tf32).lower()}", steps=3
    )
    assert settings(events)["precision.tf32"]["applied"] == ("on" if tf32 else "off")


def test_a_run_stays_below_the_published_peak(tmp_path: Path) -> None:
    _, events = train(tmp_path, "workload.size=small", "precision.amp=bf16", steps=60)
    work = next(event for event in events if event["type"] == "work")
    # Of all windows: in a single one the host may be ahead of the GPU.
    windows = [event for event in events if event["type"] == "window"]
    step_s = sum(event["wall_ns"] for event in windows) / sum(event["steps"] for event in windows) / 1e9
    if work["peak_tflops"] is None:
        pytest.skip(f"no published peak: {work['reason']}")
    assert 0 < work["flops_per_step"] / step_s / (work["peak_tflops"] * 1e12) < 1


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
@pytest.mark.parametrize("set_to_none", ["true", "false"])
def test_accumulated_gradients_survive_compiled_cuda_graphs(
    tmp_path: Path, mode: str, set_to_none: str
) -> None:
    """The losses of steps of four micro-batches: compiled with CUDA graphs against eager."""
    common = (
        "workload.size=tiny", "workload.dropout=0.0", "batch.micro=8", "batch.accumulation=4", "precision.amp=off",
        "precision.tf32=false", "log.every_steps=1", "log.window_s=0", f"optimizer.set_to_none={set_to_none}",
    )  # fmt: skip
    losses = []
    for name, compiled in (("eager", "off"), ("compiled", mode)):
        end, events = train(tmp_path / name, *common, f"speed.compile={compiled}", steps=12)
        assert end.status == "done", end.reason
        setting = [item for item in events if item["type"] == "setting" and item["name"] == "speed.compile"]
        assert compiled == "off" or setting[-1]["in_effect"]
        losses.append(
            [event["last_loss"][1] for event in events if event["type"] == "window" and event["last_loss"]]
        )
    assert len(losses[0]) == 12
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
