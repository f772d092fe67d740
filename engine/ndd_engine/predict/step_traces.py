"""The allocations and frees of a training step, recorded at small batch sizes and extrapolated to others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher

from .allocator import MIN_BLOCK, Allocator, Rules

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
    head = _alike(first, second)
    tail = _alike(first[head:][::-1], second[head:][::-1])
    found = {place: place for place in range(head)}
    found.update({len(second) - back: len(first) - back for back in range(1, tail + 1)})
    inside = first[head : len(first) - tail], second[head : len(second) - tail]
    for a, b, length in SequenceMatcher(None, *inside, autojunk=False).get_matching_blocks():
        found.update({head + b + offset: head + a + offset for offset in range(length)})
    return found


def _alike(first: Sequence[str], second: Sequence[str]) -> int:
    """Length of the common prefix."""
    pairs = zip(first, second, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
