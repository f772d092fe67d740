"""Pairs of a planted run with a fault and a similar run without it, and healthy runs on a GPU to build them from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from planted_runs import NVML, Planted, alone, cores, healthy, profiled, work

from ndd_engine.record.events import KernelsEvent, MemoryEvent

MB = 1 << 20
GPU_STEP = {
    "to_device": 0.2,
    "forward": 7.0,
    "loss": 0.5,
    "backward": 11.5,
    "optimizer": 0.4,
    "log": 0.1,
    "other": 0.1,
}
GPU_HOST = cores(1.2, 1.1, usable=16.0)
GPU_RUN = {"usable_cores": 16.0, "threads": 16}


@dataclass(frozen=True)
class Pair:
    """A run with a fault, and one that only looks like it. sets: the edits that the fault's finding proposes first."""

    cause: str
    guilty: Planted
    innocent: Planted
    sets: tuple[str, ...] = ()
    name: str = ""

    @property
    def id(self) -> str:
        return self.cause + (f"-{self.name}" if self.name else "")


def gpu(**changes: Any) -> Planted:
    """A healthy run on a GPU."""
    body: dict[str, Any] = {
        "phases": healthy(to_device=0.1), "device": GPU_STEP, "gpu": NVML, "host": GPU_HOST, "run": GPU_RUN,
        "sets": ("precision.amp=bf16",), "baseline": alone(threads=16),
    }  # fmt: skip
    body |= changes
    if "precision" not in body["run"]:
        body["run"] = {**body["run"], "precision": "bf16"}
    return Planted(**body)


def capture(
    method: str = "operators", launches: int = 300, convolution_ns: int = 0, **idle: int
) -> KernelsEvent:
    """A profiler capture of 100 ms; idle: cause -> milliseconds."""
    causes = {name.replace("_", " "): ms * 10**6 for name, ms in idle.items()}
    busy = 100_000_000 - sum(causes.values())
    return KernelsEvent(method, 200, 5, 100_000_000, busy, 0, causes, launches, convolution_ns=convolution_ns)


def memory(**changes: Any) -> MemoryEvent:
    """8 of 80 GiB used."""
    body: dict[str, Any] = {
        "allocated_bytes": 6 << 30, "reserved_bytes": 8 << 30, "peak_allocated_bytes": 7 << 30,
        "peak_reserved_bytes": 8 << 30, "growth_bytes": 1 << 30, "retries": 0, "ooms": 0, "free_bytes": 70 << 30,
        "total_bytes": 80 << 30, "others_bytes": None,
    }  # fmt: skip
    return MemoryEvent(**{**body, **changes})


def own(**changes: Any) -> Planted:
    """A healthy run of a user's own workload, whose forward and backward keep the same pace."""
    found = profiled(("forward", "my/model.py", 10, "Net.forward", 0.5))
    return replace(Planted(workload="my.model:make", work=work(), functions=found), **changes)
