"""Predicted memory compared with the allocator of the GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import capped
import pytest
import torch

from ndd_engine.predict.allocator import Rules

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no CUDA card: torch.cuda.is_available() is false"
    ),
]

GIB = 1 << 30


@pytest.mark.parametrize("amp", ["off", "bf16"])
def test_a_replay_of_recorded_steps_reserves_what_the_card_reserved(amp: str) -> None:
    trace = capped.prober(amp).trace(8)
    reserved = torch.cuda.max_memory_reserved()
    assert trace.on_gpu(Rules.of_environment()).peak_reserved == pytest.approx(reserved, rel=0.005)


@pytest.mark.parametrize("amp", ["off", "bf16"])
def test_larger_batches_take_what_was_predicted(amp: str) -> None:
    probe = capped.prober(amp)
    family = probe.family()
    for micro in (64, 96):
        predicted = family.trace(micro).on_gpu(Rules.of_environment()).peak_reserved
        probe.trace(micro)
        assert predicted == pytest.approx(torch.cuda.max_memory_reserved(), rel=0.05)


@pytest.mark.parametrize("cap_gb", [2, 4, 8])
def test_the_largest_proposal_under_a_cap_runs_and_is_nearly_the_largest_there_is(cap_gb: int) -> None:
    command = [sys.executable, str(Path(capped.__file__)), str(cap_gb * GIB)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=500, check=True)
    proposed, largest = map(int, ended.stdout.split())
    assert proposed >= 0.9 * largest
