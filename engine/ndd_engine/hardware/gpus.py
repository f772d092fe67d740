"""GPUs and the machine: names, memory, processes, the reason for every value, and published specifications."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import Any

import ndd_profiles

from .host import Host, free_memory


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process on a GPU. used_bytes and name are None if the system hides them."""

    pid: int
    used_bytes: int | None
    name: str | None


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU, or one MIG instance of it.

    index: torch's number ("cuda:0" is 0), None if torch does not see it or the order is unknown. nvml_index: NVML's
    number of the whole GPU (PCI bus order). uuid: begins with "GPU-" or "MIG-". mig_parent: UUID of the whole GPU.
    cuda_driver: newest CUDA version that the driver supports; cuda_torch: the version torch was built with. profile:
    published figures, None for an unknown GPU. free_bytes, used_bytes: at detection. reasons: where each value comes
    from, or why it is missing.
    """

    index: int | None
    nvml_index: int | None
    uuid: str | None
    name: str
    memory_total_bytes: int | None
    compute_capability: tuple[int, int] | None
    driver: str | None = None
    cuda_driver: str | None = None
    cuda_torch: str | None = None
    mig: bool = False
    mig_parent: str | None = None
    mig_profile: str | None = None
    profile: GpuProfile | None = None
    processes: tuple[GpuProcess, ...] | None = None
    free_bytes: int | None = None
    used_bytes: int | None = None
    reasons: dict[str, str] = field(default_factory=dict)

    def because(self, key: str, reason: str, **changes: Any) -> Gpu:
        """A copy with the reason of a value, and changed fields."""
        return replace(self, reasons={**self.reasons, key: reason}, **changes)

    def to_dict(self) -> dict[str, Any]:
        """A JSON object; the `gpu` field of the run event."""
        body = asdict(replace(self, profile=None))
        body["profile"] = self.profile.to_dict() if self.profile is not None else None
        body["compute_capability"] = list(self.compute_capability) if self.compute_capability else None
        body["processes"] = [asdict(item) for item in self.processes] if self.processes is not None else None
        return body


@dataclass(frozen=True, slots=True)
class Machine:
    """The hardware that a run can use.

    gpus: all GPUs found, including those torch does not see. chosen: the GPU of the run. device: "cpu" or "cuda:N", as
    for torch. reasons: "device" explains the choice; "nvml" and "torch" give their answers. problems: warnings.
    """

    gpus: tuple[Gpu, ...]
    chosen: Gpu | None
    device: str
    reasons: dict[str, str]
    host: Host
    problems: tuple[str, ...] = ()

    @property
    def free_bytes(self) -> int | None:
        """Free memory for a run: of the chosen GPU at detection, else of the host now; None if unknown."""
        return self.chosen.free_bytes if self.chosen is not None else free_memory()

    def to_dict(self) -> dict[str, Any]:
        """A JSON object. chosen: position in gpus, or null."""
        return {
            "device": self.device,
            "chosen": next((place for place, gpu in enumerate(self.gpus) if gpu is self.chosen), None),
            "gpus": [gpu.to_dict() for gpu in self.gpus],
            "host": self.host.to_dict(),
            "reasons": dict(self.reasons),
            "problems": list(self.problems),
        }


@dataclass(frozen=True, slots=True)
class VisibleGpus:
    """All GPUs and which of them are visible to torch. order: positions in gpus, in torch's order."""

    gpus: tuple[Gpu, ...]
    order: tuple[int, ...]
    reason: str
    problems: tuple[str, ...] = ()
    certain: bool = True


def names(gpus: Sequence[Gpu]) -> str:
    """The GPUs' names in one line, equal ones counted."""
    counts = Counter(gpu.name for gpu in gpus)
    return ", ".join(name if count == 1 else f"{count} x {name}" for name, count in counts.items())


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
