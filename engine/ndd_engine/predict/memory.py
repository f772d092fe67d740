"""Peak memory of a training run at any batch size, from traces at two small ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from . import lines
from .allocator import Rules, SimulatedOutOfMemoryError
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
class Fit:
    """Whether a run fits into the available memory.

    peak_bytes: predicted peak; with retries, under the limit. fits: None if the available memory is unknown. retries:
    allocations of the simulated steps that succeed only after the allocator released its cached memory, which waits for
    the GPU and costs time. roomy_bytes: predicted peak where memory is plentiful.
    """

    peak_bytes: int
    fits: bool | None
    retries: int = 0
    roomy_bytes: int = 0


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
        if self.on == "host":
            return self.outside_bytes + trace.peak(HOST_GRANULE) + self.heap_bytes(micro)
        return self.outside_bytes + max(replay.peak_reserved for replay in trace.on_any_gpu(self.rules))

    def fit(self, micro: int, accumulation: int, available_bytes: int | None, added_bytes: int = 0) -> Fit:
        """Whether it fits into the available memory, with `added_bytes` for other purposes.

        On a GPU the allocator releases cached segments and retries when the memory is full, so that a run may fit whose
        peak would be larger with more memory. It does not fit only if an allocation fails after that.
        """
        roomy = self.peak(micro, accumulation) + added_bytes
        if available_bytes is None:
            return Fit(roomy, None, roomy_bytes=roomy)
        if roomy <= available_bytes or self.on == "host":
            return Fit(roomy, roomy <= available_bytes, roomy_bytes=roomy)
        outside = self.outside_bytes + added_bytes
        try:
            replays = self._trace(micro, accumulation).on_any_gpu(self.rules, available_bytes - outside)
        except SimulatedOutOfMemoryError:
            return Fit(roomy, False, roomy_bytes=roomy)
        peak = max(replay.peak_reserved for replay in replays)
        # Without a retry it was an oversize block (max_split_size_mb) whose release made room.
        retries = max(1, *(replay.retries for replay in replays))
        return Fit(outside + peak, True, retries, roomy)

    def heap_bytes(self, micro: int) -> int:
        """Bytes that the process holds beyond the peak in use; 0 on a GPU."""
        if not self.heap:
            return 0
        places, values = zip(*self.heap, strict=True)
        return round(lines.at(micro, places, values))

    @property
    def reliable(self) -> bool:
        """Whether the prediction is reliable; otherwise it has low confidence and should be measured."""
        return not self.why_not

    @property
    def why_not(self) -> str:
        """Why the prediction is not reliable, or ""."""
        if self.caveat:
            return self.caveat
        if self.family.aligned:
            return self.family.nonlinear
        return f"the two recorded steps differ: {self.family.loose} large allocations could not be matched"

    def _trace(self, micro: int, accumulation: int) -> Trace:
        return self.family.trace(micro).until(ONE if accumulation == 1 else MANY)
