"""Peak memory and step time of a run at any batch size, interpolated between measured micro-batches."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from typing import Any, Literal

from ndd_engine.text import factor

from .allocator import MIN_BLOCK, Allocator, Rules, SimulatedOutOfMemoryError

FREED = -1
# Marks before and after the creation of a batch, followed by its number.
DATA, DATA_END = "data ", "data end "
# Collapsed requests are rounded up to a multiple of this, like the host's allocator does.
_GRANULE = 64
# Temporaries of an operator up to this size are ignored: which of them exist depends on the kernel it selects.
TRIFLE = 1024


@dataclass(frozen=True)
class Trace:
    """Allocations (key, bytes) and frees (key, FREED); keys count up from 0 in order of allocation.

    labels: by key, the operator that allocated, if known; used to match the allocations of two traces. marks: by name,
    the number of events before it (see `step_probes.record`). streams: by key, the stream of the GPU, each of which has
    a pool of its own; () if there is one. Frees of memory allocated before the trace are not included.
    """

    events: tuple[tuple[int, int], ...]
    labels: tuple[str, ...] = ()
    marks: dict[str, int] = field(default_factory=dict)
    streams: tuple[int, ...] = ()

    def until(self, mark: str) -> Trace:
        """The part before a mark; the whole trace if the mark does not exist."""
        return replace(self, events=self.events[: self.marks.get(mark, len(self.events))])

    def sizes(self) -> list[int]:
        """Bytes of each allocation, by key."""
        return [size for _, size in self.events if size >= 0]

    def all_labels(self) -> Sequence[str]:
        """A label for each allocation, by key; empty ones if they are not known."""
        count = len(self.sizes())
        return self.labels if len(self.labels) == count else [""] * count

    def ordered(self) -> Trace:
        """The same trace with consecutive frees sorted by key, since their order may vary and does not matter."""
        places = sorted(self.marks.values())
        events: list[tuple[int, int]] = []
        ends: list[tuple[int, int]] = []
        for place, event in enumerate(self.events):
            if event[1] >= 0 or (places and place == places[0]):
                events += sorted(ends)
                ends = []
            while places and places[0] <= place:
                places.pop(0)
            (ends if event[1] < 0 else events).append(event)
        return replace(self, events=(*events, *sorted(ends)))

    def collapsed(self) -> Trace:
        """The trace with the temporaries of each operator, and of each batch creation, merged into one allocation.

        Its size is the peak of the section minus what it leaves allocated, so the overall peak is unchanged. Operators
        and batch creation that loop over items allocate once per item; collapsed, traces of any batch size match.
        """
        out = _Rewritten(self)
        begin = 0
        for end, whole in self._stretches():
            out.take(begin, end, whole)
            begin = end
        return out.trace()

    def _stretches(self) -> Iterator[tuple[int, bool]]:
        """(end, whether it creates a batch) of each section: the events of one operator or one batch creation."""
        marks = sorted((place, name) for name, place in self.marks.items())
        edges = {place for place, _ in marks}
        data = {place for place, name in marks if name.startswith(DATA)}
        data_ends = {place for place, name in marks if name.startswith(DATA_END)}
        labels = self.labels if len(self.labels) == len(self.sizes()) else ()
        inside, previous = False, None
        for place, (key, _) in enumerate(self.events):
            label = labels[key] if labels else key
            if place and (place in edges or (label != previous and not inside)):
                yield place, inside
            if place in data_ends:
                inside = False
            if place in data - data_ends:
                inside = True
            previous = label
        yield len(self.events), inside

    def peak(self, granule: int = 1) -> int:
        """Peak bytes in use, with each allocation rounded up to a multiple of `granule`."""
        held: dict[int, int] = {}
        now = most = 0
        for key, size in self.events:
            if size < 0:
                now -= held.pop(key, 0)
                continue
            held[key] = _rounded(size, granule)
            now += held[key]
            most = max(most, now)
        return most

    def left(self) -> int:
        """Bytes still allocated at the end."""
        held = dict.fromkeys((key for key, size in self.events if size < 0), 0)
        return sum(size for key, size in self.events if size >= 0 and key not in held)

    def on_gpu(self, rules: Rules, cap: int | None = None, descending: bool = False) -> Allocator:
        """Replay the trace in the simulated CUDA allocator. Raises SimulatedOutOfMemoryError."""
        return Allocator(rules, cap, descending=descending).replay(self.events, self.streams)

    def on_any_gpu(self, rules: Rules, cap: int | None = None) -> list[Allocator]:
        """Replay it for ascending and for descending addresses of new segments. Raises SimulatedOutOfMemoryError.

        The order decides between free blocks of the same size; which one a driver uses is not known in advance.
        """
        return [self.on_gpu(rules, cap, descending) for descending in (False, True)]


@dataclass(frozen=True)
class Family:
    """The trace of a training step at any batch size: the bytes of each allocation are linear in the batch size.

    at: the two recorded sizes. aligned: their traces match allocation by allocation; if not, `loose` allocations have
    no counterpart and predictions have low confidence. nonlinear: why a recording at a third size does not confirm that
    the sizes are linear, or "".
    """

    at: tuple[int, int]
    first: Trace
    lines: tuple[tuple[float, float], ...]
    aligned: bool
    loose: int = 0
    nonlinear: str = ""

    def trace(self, size: int) -> Trace:
        """The trace at a batch size."""
        return replace(self.first, events=tuple(self._events(size)))

    def _events(self, size: int) -> Iterator[tuple[int, int]]:
        for key, bytes_ in self.first.events:
            if bytes_ < 0:
                yield key, FREED
            else:
                start, slope = self.lines[key]
                yield key, max(round(start + slope * size), 0)


class _Rewritten:
    """Builds a collapsed trace from sections of another one."""

    def __init__(self, of: Trace) -> None:
        self._of = of
        self._sizes = of.sizes()
        self._labels = of.all_labels()
        self._marks = sorted((place, name) for name, place in of.marks.items() if not name.startswith(DATA))
        self._keys: dict[int, int] = {}
        self.events: list[tuple[int, int]] = []
        self.labels: list[str] = []
        self.streams: list[int] = []
        self.marks: dict[str, int] = {}

    def take(self, begin: int, end: int, data: bool) -> None:
        """Add the section begin..end. data: it creates a batch."""
        self._mark(begin)
        stretch = self._of.events[begin:end]
        born = {key for key, size in stretch if size >= 0}
        gone = {key for key, size in stretch if size < 0}
        now = most = 0
        for key, size in stretch:
            now += _rounded(self._sizes[key]) * (1 if size >= 0 else -1)
            most = max(most, now)
        left = 0
        for key, size in stretch:
            if size >= 0 and key not in gone:
                self._request(key, size, self._labels[key], key)
                left += _rounded(size)
        if born & gone and most - left > TRIFLE:
            label = "batch" if data else self._labels[stretch[0][0]]
            self._request(-1, most - left, f"{label} (temporary)", stretch[0][0])
            self.events.append((len(self.labels) - 1, FREED))
        self.events += [(self._keys[key], FREED) for key, size in stretch if size < 0 and key not in born]

    def trace(self) -> Trace:
        self._mark(len(self._of.events))
        return Trace(tuple(self.events), tuple(self.labels), self.marks, tuple(self.streams))

    def _request(self, key: int, size: int, label: str, like: int) -> None:
        """like: the key of an allocation of the same stream."""
        self._keys[key] = len(self.labels)
        if self._of.streams:
            self.streams.append(self._of.streams[like])
        self.events.append((len(self.labels), size))
        self.labels.append(label)

    def _mark(self, upto: int) -> None:
        while self._marks and self._marks[0][0] <= upto:
            self.marks[self._marks.pop(0)[1]] = len(self.events)


def _rounded(size: int, granule: int = _GRANULE) -> int:
    return -(-size // granule) * granule


def fit(small: Trace, large: Trace, at: tuple[int, int]) -> Family:
    """Fit a line through two traces, recorded at the batch sizes `at` (smaller first).

    Traces that do not match are collapsed. If they still differ, allocations are matched by label and order, and those
    without a counterpart are assumed proportional to the batch size, which overestimates rather than underestimates.
    Raises ValueError unless the sizes increase.
    """
    small, large = small.ordered(), large.ordered()
    apart = at[1] - at[0]
    if apart <= 0:
        raise ValueError(f"cannot fit batch sizes {at[0]} and {at[1]}: they must increase")
    if _shape(small) != _shape(large):
        small, large = small.collapsed().ordered(), large.collapsed().ordered()
    if _shape(small) == _shape(large):
        pairs = zip(small.sizes(), large.sizes(), strict=True)
        lines = tuple(_line(first, second, at) for first, second in pairs)
        return Family(at, large, lines, aligned=True)
    partners = _partners(small, large)
    sizes = small.sizes()
    found, loose = [], 0
    for key, size in enumerate(large.sizes()):
        partner = partners.get(key)
        if partner is None:
            loose += size >= MIN_BLOCK
            found.append((0.0, size / at[1]))
        else:
            found.append(_line(sizes[partner], size, at))
    return Family(at, large, tuple(found), aligned=False, loose=loose)


def _line(first: int, second: int, at: tuple[int, int]) -> tuple[float, float]:
    slope = (second - first) / (at[1] - at[0])
    return second - slope * at[1], slope


def _shape(trace: Trace) -> list[tuple[int, bool]]:
    return [(key, size < 0) for key, size in trace.events]


def _partners(small: Trace, large: Trace) -> dict[int, int]:
    """Maps keys of the larger trace to the matching keys of the smaller one."""
    first, second = small.all_labels(), large.all_labels()
    # Most match at both ends; only the middle needs the slower matcher.
    head = common_start(first, second)
    tail = common_start(first[head:][::-1], second[head:][::-1])
    found = {place: place for place in range(head)}
    found.update({len(second) - back: len(first) - back for back in range(1, tail + 1)})
    inside = first[head : len(first) - tail], second[head : len(second) - tail]
    for a, b, length in SequenceMatcher(None, *inside, autojunk=False).get_matching_blocks():
        found.update({head + b + offset: head + a + offset for offset in range(length)})
    return found


def common_start(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Length of the common prefix."""
    pairs = zip(first, second, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


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
class ItemCounts:
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

    def host_s(self, micro: int) -> float:
        """Seconds until the host has launched a micro-batch."""
        return self._at(micro, "host_s")

    def measured(self, micro: int) -> bool:
        """Whether this micro-batch was measured."""
        return any(point.micro == micro for point in self.points)

    @property
    def doubt(self) -> str:
        """Why the times have low confidence, "" if they do not."""
        most = max((point.spread or 0.0 for point in self.points), default=0.0)
        if most <= NOISY:
            return ""
        slow = f"slow repetitions took {factor(1 + most)} times as long as fast ones"
        return f"{slow} (a busy machine, or items of different lengths)"

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
