"""Peak memory of a training run at any batch size, from traces at two small ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from . import lines
from .allocator import Rules
from .trace import Family, Trace

# glibc allocates in multiples of this, given torch's alignment of 64 bytes.
HOST_GRANULE = 64
ONE, MANY = "one", "many"


@dataclass(frozen=True)
class Items:
    """All training and evaluation items.

    kept_bytes: size as cached tensors, None if the items change every epoch. gathers: the data already consists of
    tensors in host memory. joined: batches are built by the workload's collate function, which runs on the host.
    """

    kept_bytes: int | None
    gathers: bool
    joined: bool = False

    @property
    def places(self) -> bool:
        """Whether `loader.placement` can put them on the GPU."""
        return self.gathers or (self.kept_bytes is not None and not self.joined)

    def loader_bytes(self, on_gpu: bool, placement: str, cache: bool) -> int:
        """Bytes that these loader settings add to the memory that a probe measures."""
        if on_gpu:
            return (self.kept_bytes or 0) if placement == "device" else 0
        keeps = cache or placement == "device"
        return (self.kept_bytes or 0) if keeps and not self.gathers else 0


@dataclass(frozen=True)
class Memory:
    """Memory of training one model, by micro-batch.

    on: "gpu" (the allocator is simulated) or "host". outside_bytes: memory not allocated by a step: on a GPU the CUDA
    context and libraries, on the host the process with the model and the data. source: where the traces come from, in
    words. caveat: why the prediction has low confidence even if the traces match, or "". heap: on the host, measured
    (micro-batch, bytes) that the process holds beyond all that, through heap fragmentation.
    """

    family: Family
    on: Literal["gpu", "host"]
    outside_bytes: int
    source: str
    rules: Rules = field(default_factory=Rules)
    caveat: str = ""
    heap: tuple[tuple[int, int], ...] = ()

    def peak(self, micro: int, accumulation: int = 1) -> int:
        """Predicted peak in bytes, as nvidia-smi or the process reports it."""
        trace = self._trace(micro, accumulation)
        inside = trace.peak(HOST_GRANULE) if self.on == "host" else trace.on_gpu(self.rules).peak_reserved
        return self.outside_bytes + inside + self.heap_bytes(micro)

    def heap_bytes(self, micro: int) -> int:
        """Bytes that the process holds beyond the peak in use; 0 on a GPU."""
        if not self.heap:
            return 0
        places, values = zip(*self.heap, strict=True)
        return round(lines.at(micro, places, values))

    @property
    def reliable(self) -> bool:
        """Whether the prediction is reliable; otherwise it has low confidence and should be measured."""
        return self.family.aligned and not self.caveat

    @property
    def why_not(self) -> str:
        """Why the prediction is not reliable, or ""."""
        if self.caveat:
            return self.caveat
        if self.family.aligned:
            return ""
        return f"the two recorded steps differ: {self.family.loose} large allocations could not be matched"

    def _trace(self, micro: int, accumulation: int) -> Trace:
        return self.family.trace(micro).until(ONE if accumulation == 1 else MANY)
