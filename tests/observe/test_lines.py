"""Which line runs at any moment: heard without a change to the code that runs, and only on one thread."""

from __future__ import annotations

import sys
import threading
from typing import Any

from ndd_watch.lines import HeardLines
from ndd_watch.mapped import FUNCTION_BEGINS, FUNCTION_ENDS, LINE_BEGINS


def inner(value: float) -> float:
    return value * 2


def outer() -> float:
    total = 0.0
    for number in range(3):
        total += inner(number)
    return total


def heard(work: Any, thread: bool = False) -> list[tuple[int, str, int]]:
    """(what it is, function, line) of the marks while something runs."""
    lines, places = HeardLines(), {}  # type: ignore[var-annotated]
    assert lines.begin(ours=True)
    if thread:
        other = threading.Thread(target=work)
        other.start()
        other.join()
    else:
        work()
    lines.end()
    marks = lines.take(places)
    names = list(places)
    assert [time for time, _, _ in marks] == sorted(time for time, _, _ in marks)
    return [(what, *((names[at][2], names[at][1]) if at >= 0 else ("", 0))) for _, at, what in marks]


def test_lines_of_the_users_functions_are_heard_in_their_order() -> None:
    first = outer.__code__.co_firstlineno
    found = heard(outer)
    lines = [line - first for what, name, line in found if what == LINE_BEGINS and name == "outer"]
    assert lines == [1, 2, 3, 2, 3, 2, 3, 2, 4]
    assert sum(name == "inner" for what, name, _ in found if what == LINE_BEGINS) == 3
    begun, ended = (sum(what == one for what, _, _ in found) for one in (FUNCTION_BEGINS, FUNCTION_ENDS))
    assert begun >= 4 and ended >= 4
    assert sys.gettrace() is None and sys._getframe().f_trace is None


def test_other_threads_are_not_heard() -> None:
    assert not any(name == "outer" for _, name, _ in heard(outer, thread=True))


def test_a_trace_function_of_the_script_has_precedence() -> None:
    def theirs(_frame: Any, _event: str, _value: Any) -> Any:
        return None

    before = sys.gettrace()
    lines = HeardLines()
    try:
        sys.settrace(theirs)
        begun = lines.begin(ours=True)
        kept = sys.gettrace()
        lines.end()
    finally:
        sys.settrace(before)
    if not hasattr(sys, "monitoring"):
        assert not begun
    assert kept is theirs


def test_one_that_the_script_sets_meanwhile_stays() -> None:
    def theirs(_frame: Any, _event: str, _value: Any) -> Any:
        return None

    lines = HeardLines()
    assert lines.begin(ours=True)
    ours = sys.gettrace()
    try:
        sys.settrace(theirs)
        lines.end()
        assert sys.gettrace() is theirs
        sys.settrace(ours)  # put back after its end: it takes itself out
        outer()
        assert sys.gettrace() is None
    finally:
        sys.settrace(None)
