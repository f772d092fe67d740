"""Which line of the user's own code runs at any moment of a captured step: operators belong to the line that runs them.

Operators such as `a @ b` call no function that a profiler of Python would see, so the lines themselves are heard: by
`sys.monitoring`, and before Python 3.12 by a trace function. Code of libraries is not heard, apart from its calls.
A debugger or a tool of coverage has precedence, and so do handlers of signals: what they raise could be lost.
"""

from __future__ import annotations

import sys
from threading import get_ident
from typing import Any

from .clock import now
from .looks import own, user_file
from .mapped import FUNCTION_BEGINS, FUNCTION_ENDS, LINE_BEGINS, LINES_LOST
from .probes import SPARE_DEPTH, depth, free_tool, handles_signals, tool_id

# Lines up to which they are kept. Where more run, operators are the smaller part of the step.
MOST_LINES = 100_000
# Calls of functions after which it is looked whether the recursion limit leaves room for a trace function.
CALLS_BETWEEN = 100

# File, line and function.
Place = tuple[str, int, str]


def compiled() -> bool:
    """Whether torch has compiled something: its compiler reads the frames that a trace function has changed."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    return bool(counters is not None and counters.get("frames"))


class HeardLines:
    """Hears the lines of one thread between `begin` and `end`."""

    def __init__(self) -> None:
        # (nanoseconds on our clock, code, line, what it is).
        self._marks: list[tuple[int, Any, int, int]] = []
        self._on = False
        self._thread = self._calls = 0
        self._tool: int | None = None
        self._global, self._local = self._called, self._heard

    def begin(self, ours: bool = False) -> bool:
        """Begin on this thread; returns whether that is possible.

        ours: handlers of signals are this program's, which raise nothing.
        """
        self._marks = []
        handled = not ours and handles_signals()
        if compiled() or handled or depth() + SPARE_DEPTH > sys.getrecursionlimit():
            return False
        self._thread, self._calls = get_ident(), 0
        if hasattr(sys, "monitoring"):
            return self._begin_monitoring()
        if sys.gettrace() is not None:
            return False
        self._on = True
        frame: Any = sys._getframe(1)
        while frame is not None:
            if own(frame.f_code) and frame.f_trace is None:
                frame.f_trace = self._local
            frame = frame.f_back
        sys.settrace(self._global)
        return True

    def end(self) -> None:
        """End, and keep what was heard. Safe to call twice, and on the thread of `begin` only."""
        self._on = False
        if self._tool is not None:
            tool, self._tool = self._tool, None
            monitoring: Any = sys.monitoring  # type: ignore[attr-defined]
            monitoring.register_callback(tool, monitoring.events.LINE, None)
            free_tool(tool)
            monitoring.restart_events()  # of code of libraries, which others may want to hear
        elif sys.gettrace() is self._global:
            sys.settrace(None)
            frame: Any = sys._getframe(1)
            while frame is not None:
                if frame.f_trace is self._local:
                    frame.f_trace = None
                frame = frame.f_back

    def silence(self) -> None:
        """Hear nothing more, on any thread; that of `begin` ends it then."""
        self._on = False

    def take(self, places: dict[Place, int]) -> list[tuple[int, int, int]]:
        """(time, index of the line in `places`, what it is) of what was heard, which is forgotten.

        places: gets the lines that it lacks.
        """
        marks, self._marks = self._marks, []
        found = []
        for t, code, line, what in marks:
            place = code.co_filename, line, getattr(code, "co_qualname", code.co_name)
            found.append((t, places.setdefault(place, len(places)) if what == LINE_BEGINS else -1, what))
        return found

    # Before Python 3.12.

    def _called(self, frame: Any, event: str, _value: Any) -> Any:
        """The trace function of the thread: a function is called."""
        try:
            if not self._on:  # somebody has put it back
                if sys.gettrace() is self._global:
                    sys.settrace(None)
                return None
            self._calls += 1
            if not self._calls % CALLS_BETWEEN and depth() + SPARE_DEPTH > sys.getrecursionlimit():
                self.end()
                return None
            if event != "call" or not user_file(frame.f_code.co_filename):
                return None
            self._mark(frame.f_code, frame.f_lineno, FUNCTION_BEGINS)
        except Exception:  # noqa: BLE001
            self._lost(frame.f_code)
        return self._local

    def _heard(self, frame: Any, event: str, _value: Any) -> Any:
        """The trace function of functions of the user."""
        try:
            if self._on:
                if event == "line":
                    self._mark(frame.f_code, frame.f_lineno, LINE_BEGINS)
                elif event == "return":
                    self._mark(frame.f_code, frame.f_lineno, FUNCTION_ENDS)
        except Exception:  # noqa: BLE001
            self._lost(frame.f_code)
        return self._local

    def _lost(self, code: Any) -> None:
        """Hear nothing more, after an error of ours: what a trace function raises reaches the script."""
        self._on = False
        self._marks.append((now(), code, 0, LINES_LOST))

    def _mark(self, code: Any, line: int | None, what: int) -> None:
        if len(self._marks) >= MOST_LINES:
            self._marks.append((now(), code, 0, LINES_LOST))
            self.end()
        elif line is not None:
            self._marks.append((now(), code, line, what))

    # From Python 3.12 on.

    def _begin_monitoring(self) -> bool:
        tool = tool_id()
        if tool is None:
            return False
        monitoring: Any = sys.monitoring  # type: ignore[attr-defined]
        events, never, thread = monitoring.events, monitoring.DISABLE, self._thread
        monitoring.use_tool_id(tool, "ndd-console")
        self._tool, self._on = tool, True

        def hear(code: Any, line: int, what: int) -> Any:
            try:
                if not own(code):
                    return never
                if self._on and get_ident() == thread:
                    self._mark(code, line, what)
            except Exception:  # noqa: BLE001
                self._lost(code)
            return None

        def line_begins(code: Any, line: int) -> Any:
            return hear(code, line, LINE_BEGINS)

        def begins(code: Any, _offset: int) -> Any:
            return hear(code, code.co_firstlineno, FUNCTION_BEGINS)

        def ends(code: Any, _offset: int, _value: Any) -> Any:
            return hear(code, code.co_firstlineno, FUNCTION_ENDS)

        def unwinds(code: Any, _offset: int, _error: Any) -> None:  # cannot be told never to
            hear(code, code.co_firstlineno, FUNCTION_ENDS)

        wanted = 0
        for event, heard in (
            (events.LINE, line_begins), (events.PY_START, begins), (events.PY_RESUME, begins),
            (events.PY_RETURN, ends), (events.PY_YIELD, ends), (events.PY_UNWIND, unwinds),
        ):  # fmt: skip
            monitoring.register_callback(tool, event, heard)
            wanted |= event
        monitoring.set_events(tool, wanted)
        return True
