"""Published specifications of GPUs, found by name; unknown GPUs have none."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

import ndd_profiles

_GIB = 1 << 30
# "NVIDIA A100-SXM4-80GB MIG 3g.40gb", with variants such as "1g.10gb+me" and "1c.3g.40gb".
_MIG = re.compile(r"^(?P<gpu>.+?)\s+MIG\s+(?P<profile>\S+)$")


@dataclass(frozen=True, slots=True)
class GpuProfile:
    """Published specifications of a GPU.

    memory_gb: nominal. bandwidth_gb_s: 10^9 bytes per second. dense_tflops: format (bf16, fp16, tf32, fp32) -> peak in
    10^12 operations per second without sparsity; unsupported formats are absent. note: why the peaks may not be
    reachable, or None.
    """

    slug: str
    name: str
    memory_gb: float
    bandwidth_gb_s: float
    dense_tflops: Mapping[str, float]
    compute_capability: tuple[int, int]
    source: str
    match: tuple[str, ...]
    memory_range_gb: tuple[float, float] | None = None
    note: str | None = None

    def peak_tflops(self, kind: str) -> float | None:
        """Dense peak TFLOP/s of "bf16", "fp16", "tf32" or "fp32"; None if the GPU does not support it."""
        return self.dense_tflops.get(kind)

    def is_named(self, name: str, flags: re.RegexFlag = re.NOFLAG) -> bool:
        """Whether an NVML name is that of this GPU. Others may have the same, with a different amount of memory."""
        return any(re.fullmatch(pattern, name, flags) for pattern in self.match)

    def to_dict(self) -> dict[str, Any]:
        """The specifications as JSON."""
        body = {key: value for key, value in asdict(self).items() if key not in ("match", "memory_range_gb")}
        return body | {"compute_capability": list(self.compute_capability)}


@cache
def load() -> tuple[GpuProfile, ...]:
    """All known GPUs. Raises ValueError or KeyError if a profile is malformed (a packaging error)."""
    return tuple(_parse(slug, ndd_profiles.read("gpus", slug)) for slug in ndd_profiles.names("gpus"))


def match(name: str, memory_bytes: int | None) -> GpuProfile | None:
    """The profile of the GPU with this NVML name, or None if unknown.

    memory_bytes distinguishes GPUs with the same name (RTX 3080 with 10 or 12 GB); without it they are unknown. A MIG
    instance gets the profile of its whole GPU with a note.
    """
    whole, mig = split_mig(name)
    for profile in load():
        if not profile.is_named(whole):
            continue
        if profile.memory_range_gb is not None and mig is None:
            low, high = profile.memory_range_gb
            if memory_bytes is None or not low <= memory_bytes / _GIB <= high:
                continue
        if mig is None:
            return profile
        return replace(profile, note=f"peaks of the whole GPU, of which MIG instance {mig} is a part")
    return None


def split_mig(name: str) -> tuple[str, str | None]:
    """(name of the whole GPU, MIG profile such as "3g.40gb" or None)."""
    found = _MIG.match(name.strip())
    return (found["gpu"], found["profile"]) if found else (name.strip(), None)


def _parse(slug: str, body: dict[str, Any]) -> GpuProfile:
    major, minor = body["compute_capability"].split(".")
    bounds = body.get("memory_range_gb")
    return GpuProfile(
        slug=slug,
        name=body["name"],
        memory_gb=body["memory_gb"],
        bandwidth_gb_s=body["bandwidth_gb_s"],
        dense_tflops=dict(body["dense_tflops"]),
        compute_capability=(int(major), int(minor)),
        source=body["source"],
        match=tuple(body["match"]),
        memory_range_gb=(float(bounds[0]), float(bounds[1])) if bounds else None,
        note=body.get("note"),
    )
