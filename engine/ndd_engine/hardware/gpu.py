"""What a GPU and a machine are: names, memory, processes, and the reason for every value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from .host import Host, free_memory
from .profiles import GpuProfile


@dataclass(frozen=True, slots=True)
class Process:
    """A process on a card. used_bytes and name are None where the system hides them."""

    pid: int
    used_bytes: int | None
    name: str | None


@dataclass(frozen=True, slots=True)
class Gpu:
    """A card, or one MIG instance of it.

    index: torch's number ("cuda:0" is 0), None when torch does not see it or its order is not known.
    nvml_index: NVML's number of the whole card (PCI bus order). uuid: with "GPU-" or "MIG-". mig_parent:
    UUID of the whole card. cuda_driver: newest CUDA the driver runs; cuda_torch: the one torch was built
    with. profile: published figures, None for a card that is not known. free_bytes, used_bytes: when it was
    detected. reasons: why a value is what it is, or why it is missing.
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

    def to_dict(self) -> dict[str, Any]:
        """As JSON takes it; this is `card` of the run event."""
        body = asdict(replace(self, profile=None))
        body["profile"] = self.profile.to_dict() if self.profile is not None else None
        body["compute_capability"] = list(self.compute_capability) if self.compute_capability else None
        body["processes"] = [asdict(item) for item in self.processes] if self.processes is not None else None
        return body


@dataclass(frozen=True, slots=True)
class Machine:
    """What a run can use here.

    cards: all that were found, also those torch does not see. device: "cpu" or "cuda:N", for torch.
    reasons: "device" says why this device; "nvml" and "torch" what they answered. problems: warnings for
    people.
    """

    cards: tuple[Gpu, ...]
    chosen: Gpu | None
    device: str
    reasons: dict[str, str]
    host: Host
    problems: tuple[str, ...] = ()

    @property
    def free_bytes(self) -> int | None:
        """Memory for a run: of the chosen card when it was looked at, else of the host now; None where not known."""
        return self.chosen.free_bytes if self.chosen is not None else free_memory()

    def to_dict(self) -> dict[str, Any]:
        """As JSON takes it. chosen: position in cards, or null."""
        return {
            "device": self.device,
            "chosen": next((place for place, card in enumerate(self.cards) if card is self.chosen), None),
            "cards": [card.to_dict() for card in self.cards],
            "host": self.host.to_dict(),
            "reasons": dict(self.reasons),
            "problems": list(self.problems),
        }


@dataclass(frozen=True, slots=True)
class VisibleGpus:
    """The cards and which of them a program sees. order: positions in cards, in torch's order."""

    cards: tuple[Gpu, ...]
    order: tuple[int, ...]
    reason: str
    problems: tuple[str, ...] = ()
    certain: bool = True


def names(cards: Sequence[Gpu]) -> str:
    """The cards' names in one line, equal ones counted."""
    counts: dict[str, int] = {}
    for card in cards:
        counts[card.name] = counts.get(card.name, 0) + 1
    return ", ".join(name if count == 1 else f"{count} x {name}" for name, count in counts.items())
