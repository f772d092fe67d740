"""Training on a GPU: the device clock, precision, settings, out of memory. `make gpu` has further first checks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from benchmarks.engine import Trained
from qa.gpu import first
from qa.gpu.first import EVERY_STEP, difference, losses

from ndd_engine.recordings.snapshots import examine
from ndd_watch import clock as phase
from ndd_watch.clock import PhaseClock


def train(folder: Path, *sets: str, steps: int = 60) -> Trained:
    return first.train(folder, "chartext", ("log.window_s=0.2", *sets), "cuda", steps)


def test_device_clock_agrees_with_a_synchronised_reference() -> None:
    """Spans of known kernels: the pooled events, read without synchronising, against a synchronised pair."""
    left = torch.randn(4096, 4096, device="cuda")

    def work(times: int) -> None:
        for _ in range(times):
            torch.mm(left, left)

    work(3)
    torch.cuda.synchronize()
    clock = PhaseClock()
    clock.gpu.prepare(lambda: torch.cuda.Event(enable_timing=True), torch.cuda.current_stream)
    clock.gpu.begin(phase.OTHER)
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
    ((_, row),) = clock.gpu.take()
    assert row[phase.FORWARD] == pytest.approx(begin.elapsed_time(middle) * 1e6, rel=0.02)
    assert row[phase.BACKWARD] == pytest.approx(middle.elapsed_time(end) * 1e6, rel=0.02)


def test_out_of_memory_names_what_filled_it_and_what_fits(tmp_path: Path) -> None:
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(2e9 / total, 1.0))
    try:
        end = train(tmp_path, "workload.size=guide", "batch.micro=1024", "precision.amp=off", steps=5).end
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert end.status == "failed"
    # The test step before training needs as much as the first step.
    for part in ("cuda:0", "batch.micro=512", "batch.accumulation=2", "activations", "optimizer", "owners"):
        assert part in end.reason
    # The snapshot in the run's folder names the lines that hold the memory.
    (snapshot,) = tmp_path.rglob("memory.pickle")
    device = examine(snapshot).devices[0]
    assert device.failures and device.failures[-1].moment.owners


@pytest.mark.parametrize(
    "setting",
    [
        "precision.amp=bf16", "precision.amp=fp16", "speed.cudnn_benchmark=true", "speed.deterministic=true",
        "speed.attention=efficient", "speed.attention=math", "optimizer.implementation=foreach",
        "optimizer.implementation=loop", "loader.placement=device", "speed.compile=default",
    ],
)  # fmt: skip
def test_each_setting_is_verified_to_be_in_effect(tmp_path: Path, setting: str) -> None:
    found = train(tmp_path, "workload.size=tiny", setting, steps=5)
    assert found.end.status == "done"
    event = found.settings[setting.partition("=")[0]]
    assert event["in_effect"] is True, event["verified"]


def test_pinned_batches_of_workers_are_pinned(tmp_path: Path) -> None:
    sets = ("workload.size=tiny", "loader.workers=2", "loader.pin_memory=true")
    found = train(tmp_path, *sets, steps=5).settings
    assert found["loader.pin_memory"]["in_effect"] is True
    assert found["loader.workers"]["in_effect"] is True


def test_a_run_stays_below_the_published_peak(tmp_path: Path) -> None:
    found = train(tmp_path, "workload.size=small", "precision.amp=bf16", steps=60)
    work = found.of("work")[0]
    # Of all windows: in a single one the host may be ahead of the GPU.
    windows = found.of("window")
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
        *EVERY_STEP, "workload.size=tiny", "workload.dropout=0.0", "batch.micro=8", "batch.accumulation=4",
        "precision.amp=off", "precision.tf32=false", f"optimizer.set_to_none={set_to_none}",
    )  # fmt: skip
    eager = train(tmp_path / "eager", *common, steps=12)
    compiled = train(tmp_path / "compiled", *common, f"speed.compile={mode}", steps=12)
    assert eager.end.status == compiled.end.status == "done", compiled.end.reason
    assert compiled.settings["speed.compile"]["in_effect"]
    largest, count = difference(losses(eager.events), losses(compiled.events))
    assert count >= 6
    assert largest < 1e-4
