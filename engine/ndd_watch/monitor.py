"""Times code that cannot be replaced, such as a generator that exists already, through sys.monitoring (Python 3.12)."""

from __future__ import annotations

import sys
from threading import get_ident
from typing import Any, Callable

from .clock import CURRENT, DATA_WAIT, TIMED, S, enter
from .listening import free_tool, tool_id


def watch(code: Any) -> Callable[[], None] | None:
    """Count a function's time, up to each yield, as waiting for data. Returns how to end that; None if not possible."""
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
