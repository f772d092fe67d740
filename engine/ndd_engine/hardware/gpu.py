"""Data classes for GPUs and the machine: names, memory, processes, and the reason for every value."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from .host import Host, free_memory
from .profiles import GpuProfile


@dataclass(frozen=True, slots=True)
class Process:
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
    processes: tuple[Process, ...] | None = None
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
