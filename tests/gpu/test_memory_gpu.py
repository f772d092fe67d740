"""A memory snapshot of real training. `make gpu` compares predicted memory with the allocator of the GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from qa.gpu.memory import probed

from ndd_engine.predict.step_probes import endless
from ndd_engine.recordings.snapshots import examine
from ndd_watch.clock import PhaseClock


def test_a_snapshot_of_training_steps_is_replayed(tmp_path: Path) -> None:
    prober, _ = probed("chartext", ("workload.size=small", "precision.amp=off"), "cuda")
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
