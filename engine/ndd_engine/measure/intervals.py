"""Interval arithmetic: unions, gaps, and their time by label. Pure functions, in whole nanoseconds.

An interval is (begin, end). "Disjoint" intervals are sorted, non-empty and do not overlap.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Interval = tuple[int, int]
# (begin, end, label)
Span = tuple[int, int, str]


def union(intervals: Iterable[Interval], begin: int, end: int) -> list[Interval]:
    """The union of the intervals, clipped to begin..end, as disjoint intervals."""
    out: list[Interval] = []
    last: Interval | None = None
    for low, high in sorted(intervals):
        low, high = max(low, begin), min(high, end)
        if low >= high:
            continue
        if last is not None and low <= last[1]:
            last = (last[0], max(last[1], high))
        else:
            if last is not None:
                out.append(last)
            last = (low, high)
    if last is not None:
        out.append(last)
    return out


def gaps(covered: Sequence[Interval], begin: int, end: int) -> list[Interval]:
    """The time in begin..end that `covered` leaves free; `covered` is disjoint and lies inside."""
    out: list[Interval] = []
    at = begin
    for low, high in covered:
        if low > at:
            out.append((at, low))
        at = high
    if at < end:
        out.append((at, end))
    return out


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
    out: list[Span] = []
    for index, (time, what) in enumerate(marks):
        low = begin if index == 0 else max(time, begin)
        high = end if index + 1 == len(marks) else min(marks[index + 1][0], end)
        if low < high:
            out.append((low, high, what))
    return out


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
