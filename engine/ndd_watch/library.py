"""Modules of Python's library with the functions that they had when Python started, or the observer was loaded.

A script may replace functions of the library later on, as tests do with clocks and files: hooks must neither run nor
disturb what stands in their place.
"""

from __future__ import annotations

import gc as _gc
import json as _json
import os as _os
import signal as _signal
import sys as _sys
import threading as _threading
import time as _time
from types import SimpleNamespace
from typing import Any

__all__ = ["dumps", "gc", "module_of", "open_file", "os", "signal", "threading", "time"]

# Set by `site/sitecustomize.py`.
_AT_START = getattr(_sys.modules[__package__], "AT_START", {})
open_file = open
gc: Any = SimpleNamespace(**vars(_gc))
os: Any = SimpleNamespace(**_AT_START.get("os", vars(_os)))
signal: Any = SimpleNamespace(**vars(_signal))
threading: Any = SimpleNamespace(**vars(_threading))
time: Any = SimpleNamespace(**_AT_START.get("time", vars(_time)))


_module: Any = type.__dict__["__module__"].__get__


def module_of(kind: type) -> str:
    """The name of the module of a class, whatever its metaclass says; "" without one."""
    found = _module(kind)
    return found if type(found) is str else ""


class _Encoder(_json.JSONEncoder):
    """Its methods are those of now. A value of the script that is no JSON costs its field only: it becomes null."""

    encode, iterencode = _json.JSONEncoder.encode, _json.JSONEncoder.iterencode

    def default(self, o: Any) -> None:
        return None


dumps = _Encoder().encode
