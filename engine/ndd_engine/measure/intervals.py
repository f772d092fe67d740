"""Arithmetic of stretches of time: unions, gaps, and what somebody was at in them. Pure, in whole nanoseconds.

An interval is (begin, end). "Disjoint" intervals are sorted, not empty and do not overlap.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Interval = tuple[int, int]
# (begin, end, what): a stretch in which one thing was done.
Span = tuple[int, int, str]


def union(intervals: Iterable[Interval], begin: int, end: int) -> list[Interval]:
    """The time between `begin` and `end` that at least one of the intervals covers, disjoint."""
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
    """The rest of the time between `begin` and `end`; `covered` is disjoint and lies in it."""
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
    """The time that both cover; both are disjoint, and so is the result."""
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
    """Nanoseconds in disjoint intervals."""
    return sum(end - begin for begin, end in intervals)


def spans(marks: Sequence[tuple[int, str]], begin: int, end: int) -> list[Span]:
    """What was done when, from marks (time, what is done from now on) in their order.

    They cover the time between `begin` and `end` without a hole: before the first mark it is what that mark says.
    """
    out: list[Span] = []
    for index, (time, what) in enumerate(marks):
        low = begin if index == 0 else max(time, begin)
        high = end if index + 1 == len(marks) else min(marks[index + 1][0], end)
        if low < high:
            out.append((low, high, what))
    return out


def by_cause(idle: Sequence[Interval], done: Sequence[Span]) -> dict[str, int]:
    """Nanoseconds of the disjoint `idle` by what was done in them.

    Adds up to the whole of `idle` where `done` covers it.
    """
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
    """The part of the disjoint `idle` that waits brought about; the disjoint `waits` are of the host for the card.

    A gap that begins during a wait counts to its end: the card ran dry because the host stood still, and could not
    go on before the host had caught up. Of any other gap only the time inside waits counts.
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
