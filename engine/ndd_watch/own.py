"""Which code is the user's own, and where in it a thread is."""

from __future__ import annotations

import os
import sys
import sysconfig
from functools import lru_cache
from typing import Any, Callable

_FOREIGN = (
    *{os.path.join(sysconfig.get_paths()[key], "") for key in ("stdlib", "purelib", "platlib")},
    "<",
    os.path.join(os.path.dirname(os.path.abspath(__file__)), ""),
)


def own(code: Any) -> bool:
    """Whether a code object is the script's own: outside the standard library, installed packages and the observer."""
    if code is None or isinstance(code, str):  # a built-in function
        return False
    return own_file(code.co_filename)


@lru_cache(maxsize=4096)
def own_file(name: str) -> bool:
    """The same for the file of a code object."""
    return not (name.startswith(_FOREIGN) or "site-packages" in name or "dist-packages" in name)


def own_frame(frame: Any, own: Callable[[Any], bool]) -> Any:
    """The innermost frame of the user's own code, from this one outwards; None if there is none."""
    while frame is not None and not own(frame.f_code):
        frame = frame.f_back
    return frame


def innermost(thread: int, own: Callable[[Any], bool]) -> tuple[str, int, str] | None:
    """File, line and function in the user's own code that a thread is in; None if it is in none."""
    frame = own_frame(sys._current_frames().get(thread), own)
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
