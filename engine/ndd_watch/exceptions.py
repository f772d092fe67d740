"""Tells an exception of the observer from one of the script that was raised while the observer's code ran.

A signal handler of the script, or a thread that raises an exception in another one, may do so at any instruction, also
within a hook. Such an exception is the script's and goes on.
"""

from __future__ import annotations

import os
from typing import Any

from .library import module_of

_OURS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")
_ENGINE = os.path.join(os.path.dirname(os.path.dirname(_OURS)), "ndd_engine", "")
# What a defect of ours can raise; by exact type, since a subclass is somebody's own.
_RAISED = frozenset({
    TypeError, ValueError, AttributeError, KeyError, IndexError, LookupError, RuntimeError, NotImplementedError,
    AssertionError, NameError, UnboundLocalError, ImportError, ModuleNotFoundError, OSError, FileNotFoundError,
    FileExistsError, PermissionError, NotADirectoryError, IsADirectoryError, ZeroDivisionError, OverflowError,
    ArithmeticError, UnicodeDecodeError, UnicodeEncodeError, BufferError, RecursionError, MemoryError,
})  # fmt: skip
# Those of them that Python raises without a message. One that another thread raises in this one never has one.
_SILENT = frozenset({AssertionError, NotImplementedError, MemoryError})
_HANDLER = os.path.join("torch", "utils", "data", "_utils", "signal_handling.py")
# Code that our calls reach besides our own.
_CALLED = (os.sep + "torch" + os.sep, os.path.join(os.path.dirname(os.__file__), ""))


def ours(error: BaseException) -> bool:
    """Whether an exception that our code has caught can be its own."""
    # Classes of torch, as AcceleratorError, are errors of its own code.
    if type(error) not in _RAISED and module_of(type(error)) != "torch":
        return False
    if not error.args and type(error) not in _SILENT:
        return False
    trace: Any = error.__traceback__
    if trace is None:
        return True
    # A handler of the script may have raised it through the library: one frame of the script makes it the script's.
    while trace is not None:
        if not _reached(trace.tb_frame.f_code.co_filename):
            return False
        trace = trace.tb_next
    return True


def _reached(name: str) -> bool:
    """Whether a file is ours, or one whose functions ours call; torch's handler of a dead worker runs at any moment."""
    if name.endswith(_HANDLER):
        return False
    return of_library(name) or "-packages" + _CALLED[0] in name


def of_library(name: str) -> bool:
    """Whether a file is ours, or one of Python's library."""
    if name.startswith((_OURS, "<frozen ")):
        return True
    return name.startswith(_CALLED[1]) and "-packages" not in name


def of_script(error: BaseException) -> bool:
    """Whether code of the script has raised an exception, also one that packages of others could have raised."""
    if module_of(type(error)) == "__main__" or not (error.args or type(error) in _SILENT):
        return True
    trace: Any = error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if not (of_library(name) or name.startswith(_ENGINE) or "-packages" in name):
            return True
        trace = trace.tb_next
    return False


# As the interpreter reads them: a class of the script may have attributes of these names.
_LINKS: list[Any] = [BaseException.__cause__, BaseException.__context__]
_TRACE: Any = BaseException.__traceback__


def without_our_frames(error: BaseException) -> None:
    """Take our frames out of the tracebacks of an exception and of those before it.

    An exception that the script raised while our code ran has them. The first frame of each is the script's.
    """
    waiting, seen = [error], {id(error)}
    while waiting:
        error = waiting.pop()
        trace: Any = _TRACE.__get__(error)
        while trace is not None:
            following = trace.tb_next
            while following is not None and following.tb_frame.f_code.co_filename.startswith(_OURS):
                following = following.tb_next
            trace.tb_next = following
            trace = following
        for link in _LINKS:
            linked = link.__get__(error)
            if linked is not None and id(linked) not in seen:
                seen.add(id(linked))
                waiting.append(linked)


class Contained:
    """A context that drops whatever goes wrong in it, and lets exceptions go on that code of the script has raised."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        return isinstance(error, Exception) and not of_script(error)


class Dropped:
    """A context that drops our own errors of these classes, and lets those of the script go on."""

    def __init__(self, *kinds: type[BaseException]) -> None:
        self._kinds = kinds or (BaseException,)

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        return isinstance(error, self._kinds) and ours(error)
