"""Predicted memory compared with the allocator of the GPU. `make gpu` measures more batches and limits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from qa.gpu.capped import proposal, tried
from qa.gpu.memory import probed, replayed

from ndd_engine.measure.clock import PhaseClock
from ndd_engine.predict.probing import endless
from ndd_engine.recordings.snapshot import examine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no CUDA GPU: torch.cuda.is_available() is false"
    ),
]

GIB = 1 << 30


def sets(amp: str) -> tuple[str, ...]:
    return "workload.size=small", f"precision.amp={amp}"


@pytest.mark.parametrize("amp", ["off", "bf16"])
def test_a_replay_of_recorded_steps_reserves_what_the_gpu_reserved(amp: str) -> None:
    prober, _ = probed("chartext", sets(amp), "cuda")
    trace = prober.trace(8)
    reserved = torch.cuda.max_memory_reserved()
    assert replayed(trace, reserved) == pytest.approx(reserved, rel=0.005)


@pytest.mark.parametrize("amp", ["off", "bf16"])
def test_larger_batches_take_what_was_predicted(amp: str) -> None:
    prober, memory = probed("chartext", sets(amp), "cuda")
    assert memory.reliable, memory.why_not
    for micro in (64, 96):
        prober.trace(micro)
        assert memory.peak(micro, 2) == pytest.approx(torch.cuda.max_memory_reserved(), rel=0.05)


def test_a_snapshot_of_training_steps_is_replayed(tmp_path: Path) -> None:
    prober, _ = probed("chartext", sets("off"), "cuda")
    batches = endless(prober.workload, prober.config, 8)
    torch.cuda.empty_cache()
    torch.cuda.memory._record_memory_history("all", stacks="python")
    try:
        stepper = prober.stepper()
        for step in range(3):
            stepper.eager_step(batches, PhaseClock(), step)
        torch.cuda.memory._dump_snapshot(str(tmp_path / "snapshot.pickle"))
    finally:
        torch.cuda.memory._record_memory_history(None)
    device = examine(tmp_path / "snapshot.pickle").devices[0]
    assert not device.broken and not device.refused
    assert device.peak_error == pytest.approx(0.0, abs=0.005)
    assert device.peak.owners[0].requested_bytes > 0


@pytest.mark.parametrize("cap_gib", [1, 2])
def test_the_largest_batch_predicted_to_fit_runs_and_a_larger_one_does_not(cap_gib: int) -> None:
    prober, memory = probed("chartext", sets("bf16"), "cuda")
    micro = proposal(memory, cap_gib * GIB, len(prober.workload.train_data))  # type: ignore[arg-type]
    assert micro is not None
    found = tried(prober, micro, cap_gib * GIB, on_gpu=True)
    assert found.runs, f"micro-batch {micro} was predicted to fit"
    assert found.larger is not None, f"12 % more than micro-batch {micro} run, too"
