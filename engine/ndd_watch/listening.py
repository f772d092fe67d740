"""Hears what functions of a thread return, for a while: by `sys.monitoring`; before Python 3.12 by a profile function.

A profiler of the script has precedence: where there is one, nothing is heard; where one begins, ours ends before it.
"""

from __future__ import annotations

import sys
from threading import get_ident
from typing import Any, Callable

from .library import signal

# Tool ids of sys.monitoring that nobody has reserved, and that of profilers.
_IDS = (4, 3)
_PROFILERS = 2
# Events that ours listen to.
_EVENTS = (
    "PY_START", "PY_RESUME", "PY_THROW", "PY_RETURN", "PY_YIELD", "PY_UNWIND", "CALL", "C_RETURN", "C_RAISE",
)  # fmt: skip

# Calls within each other after which a profile function is taken out, and how many more have to be possible. Where the
# recursion limit leaves no room for a profile function, Python 3.11 crashes.
MOST_DEPTH, SPARE_DEPTH = 100, 400

# To look closely at a step ends after so many usual ones, and nanoseconds.
LONGER, SPARE_NS = 10, 20_000_000

# Everything that listens in this process, at most one at a time.
_active: list[Listening] = []


class Listening:
    """returns: called with the frame of each function that returns, and what it returns."""

    def __init__(self, returns: Callable[[Any, Any], None]) -> None:
        self._returns = returns
        self._tool: int | None = None
        self._thread = self._depth = 0
        self._heard_by: Any = None

    def begin(self) -> bool:
        """Begin on this thread; returns whether that is possible."""
        if _active or profiled() or _depth() + SPARE_DEPTH > sys.getrecursionlimit():
            return False
        self._depth = 0
        self._thread = get_ident()
        if hasattr(sys, "monitoring"):
            if not self._begin_monitoring():
                return False
            _active.append(self)
            return True
        heard = self._heard
        _active.append(self)
        sys.setprofile(heard)
        self._heard_by = heard  # from now on it makes way
        return True

    def end(self) -> None:
        """End; safe to call twice."""
        if self not in _active:
            return
        _active.remove(self)
        if self._tool is not None:
            tool, self._tool = self._tool, None
            free_tool(tool)
        elif sys.getprofile() is self._heard_by:
            sys.setprofile(None)
        self._heard_by = None

    def _heard(self, frame: Any, event: str, value: Any) -> None:
        if self not in _active:  # somebody has put it back
            sys.setprofile(None)
        elif event == "return":
            self._depth -= 1
            self._returns(frame, value)
        elif event == "call":
            self._depth += 1
            if self._depth > MOST_DEPTH:
                self.end()

    def _begin_monitoring(self) -> bool:
        monitoring: Any = sys.monitoring  # type: ignore[attr-defined]
        tool = tool_id()
        if tool is None:
            return False
        monitoring.use_tool_id(tool, "ndd-console")
        self._tool = tool
        returns, thread = self._returns, self._thread

        def returned(_code: Any, _offset: int, value: Any) -> None:
            if get_ident() == thread:
                returns(sys._getframe(1), value)

        wanted = (monitoring.events.PY_RETURN, monitoring.events.PY_YIELD)
        for event in wanted:
            monitoring.register_callback(tool, event, returned)
        monitoring.set_events(tool, wanted[0] | wanted[1])
        return True


def _depth() -> int:
    """Frames of Python on this thread."""
    frame: Any = sys._getframe()
    count = 0
    while frame is not None:
        frame, count = frame.f_back, count + 1
    return count


def tool_id() -> int | None:
    """An id of sys.monitoring that nobody uses; None without one, before Python 3.12, and where signals are handled."""
    monitoring: Any = getattr(sys, "monitoring", None)
    if monitoring is None or handles_signals():
        return None
    return next((one for one in _IDS if monitoring.get_tool(one) is None), None)


def free_tool(tool: int) -> None:
    """Give an id of sys.monitoring back, and forget its callbacks: Python keeps them, and all that they refer to."""
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined]
    monitoring.set_events(tool, 0)
    for name in _EVENTS:
        monitoring.register_callback(tool, getattr(monitoring.events, name), None)
    monitoring.free_tool_id(tool)


def handles_signals() -> bool:
    """Whether functions of the script handle signals; the usual one for Ctrl-C is none of them.

    An exception that such a function raises while Python calls ours is lost in some calls, and crashes others: a
    callback of the garbage collector, and one of sys.monitoring in Python 3.13.
    """
    usual = signal.Handlers, type(signal.default_int_handler), type(None)
    return any(not isinstance(signal.getsignal(number), usual) for number in signal.valid_signals())


def profiled() -> bool:
    """Whether a profiler of somebody else is active on this thread."""
    if sys.getprofile() is not None:
        return True
    # Profilers use sys.monitoring from 3.12 on.
    monitoring: Any = getattr(sys, "monitoring", None)
    return monitoring is not None and monitoring.get_tool(_PROFILERS) is not None


def make_way() -> None:
    """A profile function is about to be set by the script: ours ends before."""
    for listening in _active:
        if listening._heard_by is not None and listening._thread == get_ident():
            listening.end()
