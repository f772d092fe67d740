"""Intervals: no time is lost or counted twice, whatever overlaps."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ndd_engine.measure.intervals import Interval, by_cause, common, gaps, spans, total, union, waited_in

TIME = st.integers(-5, 60)
INTERVALS = st.lists(st.tuples(TIME, TIME), max_size=12)
MARKS = st.lists(st.tuples(TIME, st.sampled_from("abc")), min_size=1, max_size=10).map(sorted)
BEGIN, END = 0, 50


def moments(intervals: list[Interval]) -> set[int]:
    """The same as a set of unit steps: the slow way that is certainly right."""
    return {moment for begin, end in intervals for moment in range(begin, end)}


def disjoint(intervals: list[Interval]) -> bool:
    ends = [each for pair in intervals for each in pair]
    return ends == sorted(ends) and all(begin < end for begin, end in intervals)


@given(INTERVALS)
def test_union_and_gaps_divide_the_time(intervals: list[Interval]) -> None:
    covered = union(intervals, BEGIN, END)
    free = gaps(covered, BEGIN, END)
    assert disjoint(covered)
    assert disjoint(free)
    assert moments(covered) == moments(intervals) & set(range(BEGIN, END))
    assert moments(free) == set(range(BEGIN, END)) - moments(intervals)
    assert total(covered) + total(free) == END - BEGIN


@given(INTERVALS, INTERVALS)
def test_common_is_what_both_cover(first: list[Interval], second: list[Interval]) -> None:
    both = common(union(first, BEGIN, END), union(second, BEGIN, END))
    assert disjoint(both)
    assert moments(both) == moments(first) & moments(second) & set(range(BEGIN, END))


@given(INTERVALS, MARKS)
def test_every_idle_moment_has_one_cause(intervals: list[Interval], marks: list[tuple[int, str]]) -> None:
    done = spans(marks, BEGIN, END)
    assert total((low, high) for low, high, _ in done) == END - BEGIN
    idle = gaps(union(intervals, BEGIN, END), BEGIN, END)
    found = by_cause(idle, done)
    assert sum(found.values()) == total(idle)
    for what, spent in found.items():
        where = [(low, high) for low, high, name in done if name == what]
        assert spent == len(moments(where) & moments(idle))


@given(INTERVALS, INTERVALS)
def test_waits_explain_idle_time_and_nothing_else(work: list[Interval], waits: list[Interval]) -> None:
    idle = gaps(union(work, BEGIN, END), BEGIN, END)
    waiting = union(waits, BEGIN, END)
    found = waited_in(idle, waiting)
    assert disjoint(found)
    assert moments(found) <= moments(idle)
    assert moments(found) >= moments(idle) & moments(waiting)


def test_a_gap_that_begins_in_a_wait_counts_to_its_end() -> None:
    # The GPU ran out of work at 10 while the host waited until 12; the next kernel came at 30.
    assert waited_in([(10, 30)], [(5, 12)]) == [(10, 30)]
    # It ran dry before the host began to wait: only the wait itself counts.
    assert waited_in([(10, 30)], [(15, 18), (20, 21)]) == [(15, 18), (20, 21)]
    assert waited_in([(10, 30), (40, 45)], [(41, 50)]) == [(41, 45)]


def test_before_its_first_mark_time_belongs_to_it() -> None:
    assert spans([(5, "a"), (5, "b"), (9, "a")], 0, 12) == [(0, 5, "a"), (5, 9, "b"), (9, 12, "a")]
    assert spans([(0, "a"), (20, "b")], 3, 12) == [(3, 12, "a")]
