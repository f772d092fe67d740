"""Hears functions of a thread: by `sys.monitoring`; before Python 3.12 by a profile function, for a while.

`Learning` learns from a single step where its batches come from, and `watch` times code that cannot be replaced.

A profiler of the script has precedence: where there is one, nothing is heard; where one begins, ours ends before it.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from threading import get_ident
from typing import Any, Callable

from .clock import CURRENT, DATA_WAIT, TIMED, S, enter, now
from .exceptions import Dropped, ours
from .library import signal
from .looks import Looks
from .own import own, own_frame

# Signals whose handlers raise exceptions again and again, as time limits do.
ALARMS = signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF
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

# Functions around a step that may call the one that makes batches.
MOST_CALLERS = 4

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

    @property
    def ended(self) -> bool:
        """Whether it does not listen, perhaps since a profiler of the script has begun."""
        return self not in _active

    def end(self) -> None:
        """End; safe to call twice, also by two threads at once."""
        try:
            _active.remove(self)
        except ValueError:
            return
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


def _callers(loop: Any) -> list[Any]:
    """Code of a function that runs on this thread, and of the script's own functions that have called it."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code is not loop:
        frame = frame.f_back
    found = [loop]
    while frame is not None and len(found) < MOST_CALLERS:
        frame = own_frame(frame.f_back, own)
        if frame is not None:
            found.append(frame.f_code)
    return found


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


def handles_alarms() -> bool:
    """Whether functions of the script handle alarms."""
    return handles_signals(ALARMS)


def handles_signals(numbers: Iterable[int] | None = None) -> bool:
    """Whether functions of the script handle any of these signals (default: all); the usual one for Ctrl-C is none.

    An exception that such a function raises while Python calls ours is lost in some calls, and crashes others: a
    profile function, a callback of the garbage collector, and one of sys.monitoring in Python 3.13.
    """
    usual = signal.Handlers, type(signal.default_int_handler), type(None)
    numbers = signal.valid_signals() if numbers is None else numbers
    return any(not isinstance(signal.getsignal(number), usual) for number in numbers)


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


class Learning:
    """Learns which function returned the first tensor of the model's input, from every call in a step.

    It keeps nothing of the script's: tensors are remembered weakly. source: code of the function, and its globals by
    `names`; None before it is known.
    """

    def __init__(self, looks: Looks) -> None:
        self._looks = looks
        self.source: Any = None
        self.names: dict[str, Any] = {}
        self.reported: set[Any] = set()
        self._loops: list[Any] = []
        self._until = 0
        self._returned: dict[int, tuple[weakref.ref[Any], Any, dict[str, Any]]] = {}
        self._listening = Listening(self._returns)

    def listen(self, loop: Any, usual_ns: int) -> bool:
        """Learn until `deaf`, or for much longer than a step usually takes: the training may be over.

        loop: code of the function that trains; its callers may make the batches. False under another profiler, and
        where the script handles alarms.
        """
        if handles_alarms():
            return False
        self._loops, self._returned = _callers(loop), {}
        self._until = now() + LONGER * usual_ns + SPARE_NS
        return self._listening.begin()

    def deaf(self) -> None:
        """End `listen`."""
        self._listening.end()
        self._returned = {}

    def received(self, tensor: Any) -> None:
        """A model receives this tensor first."""
        found = self._returned.get(id(tensor))
        if self.source is None and found is not None and found[0]() is tensor:
            self.source, self.names = found[1:]

    def _returns(self, frame: Any, value: Any) -> None:
        """A function returns this value."""
        try:
            if now() > self._until:
                self.deaf()
                return
            if value is None or frame.f_back is None:
                return
            caller = frame.f_back.f_code
            if not any(one is caller for one in self._loops):
                return
            if not self._looks.allowed():
                return
            for tensor in self._looks.tensors(value):
                known = self._returned.get(id(tensor))
                if known is None or known[0]() is not tensor:
                    # Its first returner made it; later ones pass it on.
                    self._returned[id(tensor)] = weakref.ref(tensor), frame.f_code, frame.f_globals
        except Exception as error:
            with Dropped():
                self.deaf()
            if not ours(error):
                raise


def watch(code: Any) -> Callable[[], None] | None:
    """Count a function's time, up to each yield, as waiting for data: also that of a generator which exists already.

    Returns how to end that; None if not possible.
    """
    tool = tool_id()
    if tool is None:
        return None
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined]
    outer = -1

    def entered(_code: Any, _offset: int) -> None:
        nonlocal outer
        # If it ended with an exception, that was not heard.
        if S[TIMED] == get_ident() and (outer < 0 or S[CURRENT] != DATA_WAIT):
            outer = S[CURRENT]
            enter(DATA_WAIT)

    def left(_code: Any, _offset: int, _value: Any) -> None:
        nonlocal outer
        if outer >= 0 and S[TIMED] == get_ident():
            if S[CURRENT] == DATA_WAIT:
                enter(outer)
            outer = -1

    events = monitoring.events
    monitoring.use_tool_id(tool, "ndd-console")
    for event, heard in (
        (events.PY_START, entered), (events.PY_RESUME, entered), (events.PY_YIELD, left), (events.PY_RETURN, left),
    ):  # fmt: skip
        monitoring.register_callback(tool, event, heard)
    wanted = events.PY_START | events.PY_RESUME | events.PY_YIELD | events.PY_RETURN
    monitoring.set_local_events(tool, code, wanted)

    def undo() -> None:
        monitoring.set_local_events(tool, code, 0)
        free_tool(tool)

    return undo
