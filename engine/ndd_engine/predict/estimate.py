"""Peak memory and step time of a run at any batch size, interpolated between measured micro-batches."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from .allocator import Rules, SimulatedOutOfMemoryError
from .step_traces import Family, Trace


def at(micro: int, places: Sequence[int], values: Sequence[float]) -> float:
    """The value at `micro`, interpolated between its neighbours or extrapolated from the last two points.

    places: measured sizes, ascending, at least one; a single point is scaled proportionally. The result is never below
    the smallest value scaled down proportionally, since a falling line is noise.
    """
    if len(places) == 1:
        return float(values[0]) * micro / places[0]
    place = min(max(bisect_right(places, micro), 1), len(places) - 1)
    slope = (values[place] - values[place - 1]) / (places[place] - places[place - 1])
    found = values[place - 1] + slope * (micro - places[place - 1])
    return float(max(found, min(values) * min(micro / places[0], 1.0)))


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
        return round(at(micro, places, values))

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
        return f"the two recorded steps differ: {self.family.loose:,} large allocations could not be matched"

    def _trace(self, micro: int, accumulation: int) -> Trace:
        return self.family.trace(micro).until(ONE if accumulation == 1 else MANY)


# Times whose repetitions vary by more than this have low confidence.
NOISY = 0.5


@dataclass(frozen=True)
class TimedBatch:
    """Measured seconds of one micro-batch.

    compute_s: forward and backward. host_s: until the host has launched all of it; equal to compute_s on the CPU.
    data_s: creating the batch in the training process. spread: how much longer the slow repetitions took than the fast
    ones (0.5: the 90 % quantile was 1.5 times the 10 % quantile); None with fewer than three.
    """

    micro: int
    compute_s: float
    host_s: float
    data_s: float
    spread: float | None = None


@dataclass(frozen=True)
class StepTime:
    """points: ascending by micro, at least one. update_s: clipping and the optimizer's update, once per step.

    on_gpu: the host launches asynchronously, so the slower of host and GPU determines the time.
    """

    points: tuple[TimedBatch, ...]
    update_s: float
    on_gpu: bool

    def micro_s(self, micro: int, workers: int = 0, placed: bool = False) -> float:
        """Predicted seconds of a micro-batch.

        workers: loader processes, each assumed to have its own core. placed: the data is on the GPU, where indexing
        takes negligible time.
        """
        compute, host, data = (self._at(micro, name) for name in ("compute_s", "host_s", "data_s"))
        data = 0.0 if placed else data
        if not self.on_gpu:
            return compute + data if not workers else max(compute, data / workers)
        return max(compute, host + data) if not workers else max(compute, host, data / workers)

    def step_s(self, micro: int, accumulation: int = 1, workers: int = 0, placed: bool = False) -> float:
        """Predicted seconds of an optimizer step."""
        return accumulation * self.micro_s(micro, workers, placed) + self.update_s

    def measured(self, micro: int) -> bool:
        """Whether this micro-batch was measured."""
        return any(point.micro == micro for point in self.points)

    @property
    def doubt(self) -> str:
        """Why the times have low confidence, "" if they do not."""
        most = max((point.spread or 0.0 for point in self.points), default=0.0)
        if most <= NOISY:
            return ""
        return f"repeated steps vary by {most:.0%} (a busy machine, or items of different lengths)"

    def knee(self) -> int | None:
        """The micro-batch above which the GPU, not the host, is the bottleneck; None if the host never is."""
        if not self.on_gpu or len(self.points) < 2:
            return None
        first, last = self.points[0], self.points[-1]
        slope = (last.compute_s - self.points[-2].compute_s) / (last.micro - self.points[-2].micro)
        host = first.host_s + first.data_s
        if slope <= 0 or first.compute_s > host * 1.1:
            return None
        return max(round(last.micro - (last.compute_s - host) / slope), 1)

    def _at(self, micro: int, name: str) -> float:
        return at(
            micro, [point.micro for point in self.points], [getattr(point, name) for point in self.points]
        )


def spread(least: int, most: int, count: int = 3) -> list[int]:
    """Up to `count` micro-batches from `least` to `most`, geometrically spaced."""
    if most <= least:
        return [most]
    ratio = (most / least) ** (1 / (count - 1))
    return sorted({min(max(round(least * ratio**index), least), most) for index in range(count)})


def variation(times: Sequence[float]) -> float | None:
    """The 90 % quantile over the 10 % quantile, minus 1; None for fewer than three times."""
    if len(times) < 3:
        return None
    ordered, ends = sorted(times), len(times) // 10
    return ordered[-1 - ends] / ordered[ends] - 1 if ordered[ends] > 0 else None


def merged(points: Iterable[TimedBatch]) -> tuple[TimedBatch, ...]:
    """Sorted by micro; of repeated measurements the fastest, as noise only makes a step slower."""
    best: dict[int, TimedBatch] = {}
    for point in points:
        known = best.get(point.micro)
        if known is None or point.compute_s < known.compute_s:
            best[point.micro] = point
    return tuple(best[micro] for micro in sorted(best))
