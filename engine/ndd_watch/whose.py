"""Whose an exception, a class or a file is: the observer's, Python's library's, or the script's.

Loaded at the start of every Python process that may be observed, so it imports nothing that Python has not loaded.
"""

import os as _os

_module = type.__dict__["__module__"].__get__


def module_of(kind: type) -> str:
    """The name of the module of a class, whatever its metaclass says; "" without one."""
    found = _module(kind)
    return found if type(found) is str else ""


_OURS = _os.path.join(_os.path.dirname(_os.path.abspath(__file__)), "")
_ENGINE = _os.path.join(_os.path.dirname(_os.path.dirname(_OURS)), "ndd_engine", "")
# What a defect of ours can raise; by exact type, since a subclass is somebody's own.
_RAISED = frozenset({
    TypeError, ValueError, AttributeError, KeyError, IndexError, LookupError, RuntimeError, NotImplementedError,
    AssertionError, NameError, UnboundLocalError, ImportError, ModuleNotFoundError, OSError, FileNotFoundError,
    FileExistsError, PermissionError, ProcessLookupError, NotADirectoryError, IsADirectoryError, ZeroDivisionError,
    OverflowError, ArithmeticError, UnicodeDecodeError, UnicodeEncodeError, BufferError, RecursionError, MemoryError,
})  # fmt: skip
# Those of them that Python raises without a message. One that another thread raises in this one never has one.
_SILENT = frozenset({AssertionError, NotImplementedError, MemoryError})
_HANDLER = _os.path.join("torch", "utils", "data", "_utils", "signal_handling.py")
# Code that our calls reach besides our own.
_CALLED = (_os.sep + "torch" + _os.sep, _os.path.join(_os.path.dirname(_os.__file__), ""))


def ours(error: BaseException) -> bool:
    """Whether an exception that our code has caught can be its own."""
    # Classes of torch, as AcceleratorError, are errors of its own code.
    if type(error) not in _RAISED and module_of(type(error)) != "torch":
        return False
    if not error.args and type(error) not in _SILENT:
        return False
    trace = error.__traceback__
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


class Dropped:
    """A context that drops our own errors of these classes, and lets those of the script propagate."""

    def __init__(self, *kinds: type[BaseException]) -> None:
        self._kinds = kinds or (BaseException,)

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: "BaseException | None", trace: object) -> bool:
        return isinstance(error, self._kinds) and ours(error)
