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


class FakeCard:
    """A GPU, or a MIG instance (with `instances` None)."""

    def __init__(self, name: str | bytes, uuid: str, memory: int, **more: Any) -> None:
        self.name, self.uuid, self.memory = name, uuid, memory
        self.used: int = more.get("used", GIB)
        self.capability: tuple[int, int] = more.get("capability", (9, 0))
        self.instances: list[FakeCard] | None = more.get("instances")
        self.processes: list[tuple[int, int | None]] = more.get("processes", [])
        self.bits: int = more.get("bits", 0)


class FakeNvml:
    """pynvml's functions over FakeCards. failing: functions that raise; survives: calls before all do."""

    NVMLError = NVMLError
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    def __init__(self, *cards: FakeCard) -> None:
        self.cards = list(cards)
        self.failing: set[str] = set()
        self.survives = 1 << 60
        self.calls: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith(("nvmlInit", "nvmlShutdown", "nvmlDevice", "nvmlSystem")):
            self.calls.append(name)
            if len(self.calls) > self.survives or name in self.failing:
                raise NVMLError(f"{name} failed")
        return super().__getattribute__(name)

    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None: ...
    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"550.54.15"

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return 12040

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeCard:
        return self.cards[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeCard:
        everyone: list[FakeCard] = [each for card in self.cards for each in (card, *(card.instances or ()))]
        return {each.uuid: each for each in everyone}[uuid]

    def nvmlDeviceGetName(self, card: FakeCard) -> str | bytes:
        return card.name

    def nvmlDeviceGetUUID(self, card: FakeCard) -> str:
        return card.uuid

    def nvmlDeviceGetCudaComputeCapability(self, card: FakeCard) -> tuple[int, int]:
        return card.capability

    def nvmlDeviceGetMigMode(self, card: FakeCard) -> list[int]:
        return [int(card.instances is not None)] * 2

    def nvmlDeviceGetMaxMigDeviceCount(self, card: FakeCard) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, card: FakeCard, index: int) -> FakeCard:
        if index >= len(card.instances or ()):
            raise NVMLError("Not Found")
        return (card.instances or [])[index]

    def nvmlDeviceGetMemoryInfo(self, card: FakeCard) -> SimpleNamespace:
        return SimpleNamespace(total=card.memory, used=card.used, free=card.memory - card.used)

    def nvmlDeviceGetUtilizationRates(self, card: FakeCard) -> SimpleNamespace:
        return SimpleNamespace(gpu=63, memory=21)

    def nvmlDeviceGetTemperature(self, card: FakeCard, sensor: int) -> int:
        return 55

    def nvmlDeviceGetPowerUsage(self, card: FakeCard) -> int:
        return 312_500

    def nvmlDeviceGetEnforcedPowerLimit(self, card: FakeCard) -> int:
        return 700_000

    def nvmlDeviceGetClockInfo(self, card: FakeCard, kind: int) -> int:
        return {1: 1755, 2: 3201}[kind]

    def nvmlDeviceGetMaxClockInfo(self, card: FakeCard, kind: int) -> int:
        return 1980

    def nvmlDeviceGetCurrentClocksEventReasons(self, card: FakeCard) -> int:
        return card.bits

    def nvmlDeviceGetPcieThroughput(self, card: FakeCard, counter: int) -> int:
        return 1000 if counter else 500

    def nvmlDeviceGetGraphicsRunningProcesses(self, card: FakeCard) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=999_999, usedGpuMemory=1 << 20)]  # a desktop

    def nvmlDeviceGetComputeRunningProcesses(self, card: FakeCard) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in card.processes]


def fake_torch(*cards: FakeCard, cuda: str | None = "12.6", available: bool = True) -> Any:
    """The part of torch that detection uses, seeing `cards` in this order. UUIDs come without their prefix."""
    properties = [
        SimpleNamespace(
            name=card.name,
            uuid=card.uuid.partition("-")[2],
            total_memory=card.memory,
            major=card.capability[0],
            minor=card.capability[1],
        )
        for card in cards
    ]
    module = SimpleNamespace(
        is_available=lambda: available and bool(cards),
        device_count=lambda: len(properties),
        get_device_properties=lambda index: properties[index],
    )
    version = "2.13.0+cpu" if cuda is None else "2.13.0+cu126"
    return SimpleNamespace(__version__=version, version=SimpleNamespace(cuda=cuda, hip=None), cuda=module)


@pytest.fixture
def fakes() -> Any:
    """FakeCard, FakeNvml, fake_torch and the error, under one name."""
    return SimpleNamespace(card=FakeCard, nvml=FakeNvml, torch=fake_torch, error=NVMLError, gib=GIB)


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
