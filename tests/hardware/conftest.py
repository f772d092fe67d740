"""Fakes of missing hardware: pynvml and torch with GPUs, and the /proc and /sys of a machine."""

# ruff: noqa: N802 - the names are pynvml's

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

GIB = 1 << 30


class NVMLError(Exception):
    """What pynvml raises."""


class FakeGpu:
    """A GPU, or a MIG instance (with `instances` None)."""

    def __init__(self, name: str | bytes, uuid: str, memory: int, **more: Any) -> None:
        self.name, self.uuid, self.memory = name, uuid, memory
        self.used: int = more.get("used", GIB)
        self.capability: tuple[int, int] = more.get("capability", (9, 0))
        self.instances: list[FakeGpu] | None = more.get("instances")
        self.processes: list[tuple[int, int | None]] = more.get("processes", [])
        self.bits: int = more.get("bits", 0)


# What functions of pynvml return: always the same, or an attribute of the GPU.
CONSTANT = {
    "nvmlSystemGetDriverVersion": b"550.54.15", "nvmlSystemGetCudaDriverVersion_v2": 12040,
    "nvmlDeviceGetMaxMigDeviceCount": 7, "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=63, memory=21),
    "nvmlDeviceGetTemperature": 55, "nvmlDeviceGetPowerUsage": 312_500, "nvmlDeviceGetEnforcedPowerLimit": 700_000,
    "nvmlDeviceGetMaxClockInfo": 1980,
    "nvmlDeviceGetGraphicsRunningProcesses": [SimpleNamespace(pid=999_999, usedGpuMemory=1 << 20)],  # a desktop
}  # fmt: skip
ATTRIBUTE = {
    "nvmlDeviceGetName": "name", "nvmlDeviceGetUUID": "uuid", "nvmlDeviceGetCudaComputeCapability": "capability",
    "nvmlDeviceGetCurrentClocksEventReasons": "bits",
}  # fmt: skip


class FakeNvml:
    """pynvml's functions over FakeGpus. failing: functions that raise; survives: calls before all do."""

    NVMLError = NVMLError
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    def __init__(self, *gpus: FakeGpu) -> None:
        self.gpus = list(gpus)
        self.failing: set[str] = set()
        self.survives = 1 << 60
        self.calls: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith(("nvmlInit", "nvmlShutdown", "nvmlDevice", "nvmlSystem")):
            self.calls.append(name)
            if len(self.calls) > self.survives or name in self.failing:
                raise NVMLError(f"{name} failed")
        return super().__getattribute__(name)

    def __getattr__(self, name: str) -> Any:
        if name in CONSTANT:
            return lambda *_: CONSTANT[name]
        if name in ATTRIBUTE:
            return lambda gpu: getattr(gpu, ATTRIBUTE[name])
        raise AttributeError(name)

    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None: ...
    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeGpu:
        everyone: list[FakeGpu] = [each for gpu in self.gpus for each in (gpu, *(gpu.instances or ()))]
        return {each.uuid: each for each in everyone}[uuid]

    def nvmlDeviceGetMigMode(self, gpu: FakeGpu) -> list[int]:
        return [int(gpu.instances is not None)] * 2

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: FakeGpu, index: int) -> FakeGpu:
        if index >= len(gpu.instances or ()):
            raise NVMLError("Not Found")
        return (gpu.instances or [])[index]

    def nvmlDeviceGetMemoryInfo(self, gpu: FakeGpu) -> SimpleNamespace:
        return SimpleNamespace(total=gpu.memory, used=gpu.used, free=gpu.memory - gpu.used)

    def nvmlDeviceGetClockInfo(self, gpu: FakeGpu, kind: int) -> int:
        return {1: 1755, 2: 3201}[kind]

    def nvmlDeviceGetPcieThroughput(self, gpu: FakeGpu, counter: int) -> int:
        return 1000 if counter else 500

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: FakeGpu) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in gpu.processes]


def fake_torch(*gpus: FakeGpu, cuda: str | None = "12.6", available: bool = True) -> Any:
    """The part of torch that detection uses, seeing `gpus` in this order. UUIDs come without their prefix."""
    properties = [
        SimpleNamespace(
            name=gpu.name,
            uuid=gpu.uuid.partition("-")[2],
            total_memory=gpu.memory,
            major=gpu.capability[0],
            minor=gpu.capability[1],
        )
        for gpu in gpus
    ]
    module = SimpleNamespace(
        is_available=lambda: available and bool(gpus),
        device_count=lambda: len(properties),
        get_device_properties=lambda index: properties[index],
    )
    version = "2.13.0+cpu" if cuda is None else "2.13.0+cu126"
    return SimpleNamespace(__version__=version, version=SimpleNamespace(cuda=cuda, hip=None), cuda=module)


@pytest.fixture
def fakes() -> Any:
    """FakeGpu, FakeNvml, fake_torch and the error, under one name."""
    return SimpleNamespace(gpu=FakeGpu, nvml=FakeNvml, torch=fake_torch, error=NVMLError, gib=GIB)


@pytest.fixture
def tree(tmp_path: Path) -> Callable[[dict[str, str]], Path]:
    """Writes a machine's files under a root and gives the root."""

    def make(files: dict[str, str]) -> Path:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return make
