"""On a real GPU: detected values equal those of nvidia-smi and torch."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

import pytest
import torch
from tests.waiting import LIMIT_S

from ndd_engine.hardware.detect import detect
from ndd_engine.hardware.gpus import Machine, match
from ndd_engine.hardware.sampler import Sampler
from ndd_engine.record.event import GPU_KEYS


@pytest.fixture(scope="module")
def machine() -> Machine:
    return detect()


def smi(fields: str, uuid: str) -> list[str]:
    """nvidia-smi's values of `fields` for one GPU, without units."""
    if shutil.which("nvidia-smi") is None:
        pytest.skip("nvidia-smi is not installed")
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits", f"--id={uuid}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    return [word.strip() for word in done.stdout.strip().split(",")]


def test_the_chosen_gpu_is_the_first_that_torch_sees(machine: Machine) -> None:
    gpu = machine.chosen
    assert gpu is not None and machine.device == "cuda:0" and gpu.index == 0
    properties = torch.cuda.get_device_properties(0)
    assert gpu.uuid is not None and str(properties.uuid) in (gpu.uuid[4:], (gpu.mig_parent or "")[4:])
    assert gpu.compute_capability == (properties.major, properties.minor)
    assert gpu.cuda_torch == torch.version.cuda
    if not gpu.mig:
        assert gpu.reasons["index"] == "matched by UUID"
        assert gpu.name == properties.name


def test_name_memory_and_driver_equal_those_of_nvidia_smi(machine: Machine) -> None:
    gpu = machine.chosen
    assert gpu is not None and gpu.uuid is not None
    if gpu.mig:
        pytest.skip("nvidia-smi does not query MIG instances")
    name, total, driver = smi("name,memory.total,driver_version", gpu.uuid)
    assert (gpu.name, gpu.driver) == (name, driver)
    assert gpu.memory_total_bytes is not None
    assert abs(gpu.memory_total_bytes / (1 << 20) - float(total)) <= 1
    assert gpu.profile == match(name, gpu.memory_total_bytes)
    if gpu.profile is not None:
        assert gpu.profile.compute_capability == gpu.compute_capability


def test_samples_follow_what_is_allocated(machine: Machine) -> None:
    gpu = machine.chosen
    assert gpu is not None and gpu.uuid is not None
    held: Any = torch.zeros(1, device="cuda")
    sampler = Sampler(gpu, lambda event: None)
    before = sampler.read_once().gpu
    held = torch.zeros(1 << 30, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    after = sampler.read_once().gpu
    assert before is not None and after is not None and tuple(after) == GPU_KEYS
    grown = after["memory_used_bytes"] - before["memory_used_bytes"]
    assert grown == pytest.approx(held.numel(), rel=0.1)
    assert after["memory_total_bytes"] == gpu.memory_total_bytes
    if not gpu.mig:
        used, temperature = smi("memory.used,temperature.gpu", gpu.uuid)
        assert after["memory_used_bytes"] / (1 << 20) == pytest.approx(float(used), abs=64)
        assert abs(after["temperature_c"] - float(temperature)) <= 5
        if after["power_w"] is not None and after["power_limit_w"] is not None:  # some laptops report neither
            assert 0 < after["power_w"] <= after["power_limit_w"] * 1.2
    if after["memory_others_bytes"] is not None:
        assert after["memory_others_bytes"] < after["memory_used_bytes"] - held.numel() * 0.9
    sampler.stop()
