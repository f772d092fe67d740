"""What a training step allocates and frees, in order: recorded at small batches, rebuilt for any other one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher

from .allocator import MIN_BLOCK, Allocator, Rules

FREED = -1
# Marks around the making of a batch, with a number behind them.
DATA, DATA_END = "data ", "data end "
# Collapsed requests are rounded up to this each, as the host's allocator does.
_GRANULE = 64
# Bytes that are left out when they live within one operator: whether there are any differs with the way that it takes.
TRIFLE = 1024


@dataclass(frozen=True)
class Trace:
    """Requests and their ends: (key, bytes) and (key, FREED); keys count up from 0 in the order of the requests.

    labels: of each request, by key: what asked for it, as far as that is known; it tells which requests of two traces
    belong together. marks: by name, how many of the events came before a moment (see `recording`). Ends of what was
    requested before the trace began are not in it.
    """

    events: tuple[tuple[int, int], ...]
    labels: tuple[str, ...] = ()
    marks: dict[str, int] = field(default_factory=dict)

    def until(self, mark: str) -> Trace:
        """The part before a mark; all of it where there is no such mark."""
        return Trace(self.events[: self.marks.get(mark, len(self.events))], self.labels, self.marks)

    def sizes(self) -> list[int]:
        """Bytes of each request, by key."""
        return [size for _, size in self.events if size >= 0]

    def ordered(self) -> Trace:
        """With ends that follow each other in the order of their keys.

        They commute for the allocator, and caches are cleared in the order of hashes.
        """
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
        return Trace((*events, *sorted(ends)), self.labels, self.marks)

    def collapsed(self) -> Trace:
        """With all that lives and dies within one operator, or within the making of a batch, as one request.

        Its size is what the stretch takes at its peak beyond what it leaves behind, so that the peaks of the whole
        stay. Operators that loop over the items of a batch, and batches that are made item by item, have as many
        requests as items; collapsed they line up whatever the batch.
        """
        out = _Rewritten(self)
        begin = 0
        for end, whole in self._stretches():
            out.take(begin, end, whole)
            begin = end
        return out.trace()

    def _stretches(self) -> Iterator[tuple[int, bool]]:
        """(end, whether it is the making of a batch) of each stretch: one operator's events, or a batch's."""
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
        """The most bytes that are in use at a time, each request rounded up to multiples of `granule`."""
        held: dict[int, int] = {}
        now = most = 0
        for key, size in self.events:
            if size < 0:
                now -= held.pop(key, 0)
                continue
            held[key] = -(-size // granule) * granule
            now += held[key]
            most = max(most, now)
        return most

    def left(self) -> int:
        """Bytes in use at the end."""
        held = dict.fromkeys((key for key, size in self.events if size < 0), 0)
        return sum(size for key, size in self.events if size >= 0 and key not in held)

    def on_gpu(self, rules: Rules, cap: int | None = None) -> Allocator:
        """Replayed through the model of a card's allocator. Raises allocator.OutOfMemoryError."""
        return Allocator(rules, cap).replay(self.events)


@dataclass(frozen=True)
class Family:
    """The trace of one training step for every size of its batch: each request's bytes as a line of that size.

    at: the sizes that were recorded. aligned: their traces are the same sequence, request by request; where they are
    not, `loose` requests were matched by nothing, and what is said is a guess that has to be measured.
    """

    at: tuple[int, int]
    first: Trace
    lines: tuple[tuple[float, float], ...]
    aligned: bool
    loose: int = 0

    def trace(self, size: int) -> Trace:
        """Rebuilt for a batch of that size."""
        return Trace(tuple(self._events(size)), self.first.labels, self.first.marks)

    def _events(self, size: int) -> Iterator[tuple[int, int]]:
        for key, bytes_ in self.first.events:
            if bytes_ < 0:
                yield key, FREED
            else:
                start, slope = self.lines[key]
                yield key, max(round(start + slope * size), 0)


class _Rewritten:
    """A trace under construction, from stretches of another one."""

    def __init__(self, of: Trace) -> None:
        self._of = of
        self._sizes = of.sizes()
        self._labels = of.labels if len(of.labels) == len(self._sizes) else ("",) * len(self._sizes)
        self._marks = sorted(
            (place, name) for name, place in of.marks.items() if not name.startswith("data ")
        )
        self._keys: dict[int, int] = {}
        self.events: list[tuple[int, int]] = []
        self.labels: list[str] = []
        self.marks: dict[str, int] = {}

    def take(self, begin: int, end: int, data: bool) -> None:
        """Add the stretch begin..end. data: it is the making of a batch."""
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
                self._request(key, size, self._labels[key])
                left += _rounded(size)
        if born & gone and most - left > TRIFLE:
            label = "a batch" if data else self._labels[stretch[0][0]]
            self._request(-1, most - left, f"{label}, for a while")
            self.events.append((len(self.labels) - 1, FREED))
        self.events += [(self._keys[key], FREED) for key, size in stretch if size < 0 and key not in born]

    def trace(self) -> Trace:
        self._mark(len(self._of.events))
        return Trace(tuple(self.events), tuple(self.labels), self.marks)

    def _request(self, key: int, size: int, label: str) -> None:
        self._keys[key] = len(self.labels)
        self.events.append((len(self.labels), size))
        self.labels.append(label)

    def _mark(self, upto: int) -> None:
        while self._marks and self._marks[0][0] <= upto:
            self.marks[self._marks.pop(0)[1]] = len(self.events)


def _rounded(size: int) -> int:
    return -(-size // _GRANULE) * _GRANULE


def fit(small: Trace, large: Trace, at: tuple[int, int]) -> Family:
    """The family behind two traces, recorded with batches of the sizes `at`, the smaller one first.

    Where they are different sequences, they are collapsed. Where that does not make them alike, the larger one is
    taken, requests are matched by their labels and order, and what has no partner grows in proportion to the batch: too
    much rather than too little.
    """
    small, large = small.ordered(), large.ordered()
    apart = at[1] - at[0]
    if apart <= 0:
        raise ValueError(f"a line through batches of {at[0]} and {at[1]} is none")
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
    """Requests of the larger trace with those of the smaller one that they are, by key."""
    first, second = (_signs(trace) for trace in (small, large))
    # Most of them are alike at both ends; what lies between is matched with patience.
    head = _alike(first, second)
    tail = _alike(first[head:][::-1], second[head:][::-1])
    found = {place: place for place in range(head)}
    found.update({len(second) - back: len(first) - back for back in range(1, tail + 1)})
    inside = first[head : len(first) - tail], second[head : len(second) - tail]
    for a, b, length in SequenceMatcher(None, *inside, autojunk=False).get_matching_blocks():
        found.update({head + b + offset: head + a + offset for offset in range(length)})
    return found


def _alike(first: Sequence[str], second: Sequence[str]) -> int:
    """Of how many elements both begin with the same."""
    pairs = zip(first, second, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def _signs(trace: Trace) -> Sequence[str]:
    count = len(trace.sizes())
    return trace.labels if len(trace.labels) == count else [""] * count
