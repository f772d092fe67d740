"""Step time at any batch size, interpolated between a few measured micro-batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from . import lines

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
        return lines.at(
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
