"""Hears the calls of functions on one thread and how long they take.

Up to Python 3.11 this is Python's own profiler, which slows all bytecode down: a loop in pure Python took 1.7 times as
long. From 3.12 on, `sys.monitoring` does the same for one thread only.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any, Callable

from .apart import time
from .clock import now
from .probes import free_tool, tool_id

# This module is loaded when the first step is profiled: by then the script may have replaced functions of the library.
now_ns = time.perf_counter_ns


@dataclass
class CallEntry:
    """Of a function: calls, seconds with everything that it calls; and the same of each function that it calls."""

    code: Any
    callcount: int = 0
    totaltime: float = 0.0
    inside: dict[Any, CallEntry] = field(default_factory=dict)
    # Calls that have not ended: only the outermost one of a recursion counts its time.
    open: int = 0

    @property
    def calls(self) -> list[CallEntry]:
        """The functions that it calls."""
        return list(self.inside.values())


class Calls:
    """Arguments are those of `_lsprof.Profiler`; all but timer, of nanoseconds, are without effect."""

    def __init__(
        self,
        timer: Callable[[], int] = now_ns,
        timeunit: float = 1e-9,
        builtins: bool = True,
        subcalls: bool = True,
    ) -> None:
        self._time = timer
        self._entries: dict[Any, CallEntry] = {}
        # Open calls: function, when it began, entry, and its entry in the one that calls it.
        self._stack: list[tuple[Any, int, CallEntry, CallEntry | None]] = []
        self._tool: int | None = None
        self._thread = 0
        # Called once a function begins after this moment; 0 for never.
        self.until = 0
        self.late: Callable[[], None] | None = None

    def enable(self) -> None:
        """Begin on this thread. Raises ValueError if no tool id is free."""
        monitoring: Any = sys.monitoring  # type: ignore[attr-defined]
        tool = tool_id()
        if tool is None:
            raise ValueError("no tool id is free")
        monitoring.use_tool_id(tool, "ndd-console")
        self._tool, self._thread = tool, get_ident()
        events = monitoring.events
        wanted = 0
        for event, heard in (
            (events.PY_START, self._began), (events.PY_RESUME, self._began), (events.PY_THROW, self._thrown),
            (events.PY_RETURN, self._ended), (events.PY_YIELD, self._ended), (events.PY_UNWIND, self._ended),
            (events.CALL, self._called), (events.C_RETURN, self._returned), (events.C_RAISE, self._returned),
        ):  # fmt: skip
            monitoring.register_callback(tool, event, heard)
            wanted |= event
        # Those of C functions come with CALL.
        monitoring.set_events(tool, wanted & ~(events.C_RETURN | events.C_RAISE))

    def disable(self) -> None:
        """End; open calls end now."""
        tool, self._tool = self._tool, None
        if tool is not None:
            free_tool(tool)
        while self._stack:
            self._pop(self._time())

    def getstats(self) -> list[CallEntry]:
        """The functions so far."""
        return list(self._entries.values())

    def _push(self, what: Any) -> None:
        entry = self._entries.get(what)
        if entry is None:
            entry = self._entries[what] = CallEntry(what)
        inner = None
        if self._stack:
            inside = self._stack[-1][2].inside
            inner = inside.get(what)
            if inner is None:
                inner = inside[what] = CallEntry(what)
            inner.open += 1
        entry.open += 1
        t = self._time()
        self._stack.append((what, t, entry, inner))
        if self.until and t > self.until and self.late is not None:
            self.until = 0
            self.late()

    def _pop(self, t: int) -> None:
        _, begun, entry, inner = self._stack.pop()
        for one in (entry, inner):
            if one is not None:
                one.callcount += 1
                one.open -= 1
                if not one.open:
                    one.totaltime += (t - begun) * 1e-9

    def _began(self, code: Any, _offset: int) -> None:
        if get_ident() == self._thread:
            self._push(code)

    def _thrown(self, code: Any, _offset: int, _error: Any) -> None:
        if get_ident() == self._thread:
            self._push(code)

    def _ended(self, code: Any, _offset: int, _value: Any) -> None:
        t = self._time()
        # Functions that began before are not on the stack.
        if get_ident() == self._thread and any(one[0] is code for one in self._stack):
            while self._stack[-1][0] is not code:
                self._pop(t)
            self._pop(t)

    def _called(self, _code: Any, _offset: int, function: Any, _first: Any) -> None:
        # By its type alone: attributes of an object that is called could be code of the script.
        if get_ident() == self._thread and (name := _builtin_name(function)):
            self._push(name)

    def _returned(self, _code: Any, _offset: int, function: Any, _first: Any) -> None:
        t = self._time()
        if get_ident() == self._thread and self._stack and self._stack[-1][0] == _builtin_name(function):
            self._pop(t)


def _builtin_name(function: Any) -> str:
    """A function of C as profilers name it; "" for another object, whose description could be code of the script."""
    kind = type(function)
    if kind.__name__ == "method_descriptor":
        return repr(function)
    if kind.__name__ == "builtin_function_or_method":
        owner = function.__self__
        if owner is None or type(owner).__name__ == "module":
            return f"<built-in method {function.__module__}.{function.__name__}>"
        for base in type(owner).__mro__:
            if function.__name__ in base.__dict__:
                return f"<method '{function.__name__}' of '{base.__module__}.{base.__name__}' objects>"
    return ""


# Imported now: an exception of a signal handler can be lost in an import.
try:
    from _lsprof import Profiler as _Profiler
except ImportError:
    _Profiler = None  # type: ignore[assignment, misc]

# From Python 3.12 on there is one profiler in a process, and starting another one raises an error: ours would be in the
# way of one that the script starts. It listens by itself there.
MONITORING = sys.version_info >= (3, 12)
# The class of profilers; None if this Python has none.
KIND: Any = Calls if MONITORING else _Profiler
# Measurements of what the profiler adds to a call, and calls of each.
TRIALS, TRIAL_CALLS = 5, 100


def added_ns(profiler: Any, builtins: bool) -> float:
    """Nanoseconds that the profiler adds to a call that it records: of a built-in function, if it records those."""
    call: Any = len if builtins else _nothing
    given, least = (), [float("inf")] * 2
    for number in range(2 * TRIALS):
        watching = profiler(builtins=builtins, subcalls=True)
        if number % 2:
            watching.enable()
        t = now()
        for _ in range(TRIAL_CALLS):
            call(given)
        t = now() - t
        watching.disable()
        least[number % 2] = min(least[number % 2], t)
    return max((least[1] - least[0]) / TRIAL_CALLS, 0.0)


def _nothing(_: Any) -> None:
    return
