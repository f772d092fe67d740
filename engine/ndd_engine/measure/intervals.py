"""Interval arithmetic: unions, gaps, and their time by label. Pure functions, in whole nanoseconds.

An interval is (begin, end). "Disjoint" intervals are sorted, non-empty and do not overlap.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, pairwise

Interval = tuple[int, int]
# (begin, end, label)
Span = tuple[int, int, str]


def union(intervals: Iterable[Interval], begin: int, end: int) -> list[Interval]:
    """The union of the intervals, clipped to begin..end, as disjoint intervals."""
    out: list[Interval] = []
    for low, high in sorted(intervals):
        low, high = max(low, begin), min(high, end)
        if low >= high:
            continue
        if out and low <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], high))
        else:
            out.append((low, high))
    return out


def gaps(covered: Sequence[Interval], begin: int, end: int) -> list[Interval]:
    """The time in begin..end that `covered` leaves free; `covered` is disjoint and lies inside."""
    edges = [begin, *chain.from_iterable(covered), end]
    return [(low, high) for low, high in zip(edges[::2], edges[1::2], strict=True) if low < high]


def common(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """The intersection of two lists of disjoint intervals."""
    out: list[Interval] = []
    i = j = 0
    while i < len(first) and j < len(second):
        low, high = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if low < high:
            out.append((low, high))
        if first[i][1] <= second[j][1]:
            i += 1
        else:
            j += 1
    return out


def total(intervals: Iterable[Interval]) -> int:
    """Total length of disjoint intervals."""
    return sum(end - begin for begin, end in intervals)


def spans(marks: Sequence[tuple[int, str]], begin: int, end: int) -> list[Span]:
    """Spans that cover begin..end, from marks (time, label that starts here) in order.

    The first mark's label also covers the time before it.
    """
    edges = [begin, *(min(max(time, begin), end) for time, _ in marks[1:]), end]
    return [
        (low, high, what)
        for (low, high), (_, what) in zip(pairwise(edges), marks, strict=False)
        if low < high
    ]


def by_cause(idle: Sequence[Interval], done: Sequence[Span]) -> dict[str, int]:
    """Nanoseconds of the disjoint `idle` intervals by label; adds up to all of `idle` if `done` covers it."""
    out: dict[str, int] = {}
    place = 0
    for begin, end in idle:
        while place < len(done) and done[place][1] <= begin:
            place += 1
        index = place
        while index < len(done) and done[index][0] < end:
            low, high, what = done[index]
            out[what] = out.get(what, 0) + min(high, end) - max(low, begin)
            index += 1
    return out


def waited_in(idle: Sequence[Interval], waits: Sequence[Interval]) -> list[Interval]:
    """The part of the disjoint `idle` intervals that is caused by `waits`, in which the host waits for the GPU.

    A gap that begins during a wait counts to its end: the GPU ran out of work because the host was blocked. Of any
    other gap only the time inside waits counts.
    """
    out: list[Interval] = []
    place = 0
    for begin, end in idle:
        while place < len(waits) and waits[place][1] < begin:
            place += 1
        if place < len(waits) and waits[place][0] <= begin:
            out.append((begin, end))
        else:
            out += common([(begin, end)], waits[place:])
    return out
