"""Keeps the observer and the script apart: Python's library, exceptions, and torch's compiler.

A script may replace functions of the library, as tests do with clocks and files: hooks must neither run nor disturb
what stands in their place. So modules are here with the functions that they had when Python started, or the observer
was loaded.

A signal handler of the script, or a thread that raises an exception in another one, may do so at any instruction, also
within a hook. Such an exception is the script's and continues.

While a compiled function of torch runs parts of it without the compiler, each Python function that is called there is
compiled, too. Ours are no part of the script's program, and are kept out.
"""

from __future__ import annotations

import gc as _gc
import json as _json
import os as _os
import signal as _signal
import sys
import sys as _sys
import threading as _threading
import time as _time
import types
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from .whose import _ENGINE, _OURS, _SILENT
from .whose import Dropped as Dropped
from .whose import module_of as module_of
from .whose import of_library as of_library
from .whose import ours as ours

# Set by `site/sitecustomize.py`.
_AT_START = getattr(_sys.modules[__package__], "AT_START", {})
open_file = open
gc: Any = SimpleNamespace(**vars(_gc))
os: Any = SimpleNamespace(**_AT_START.get("os", vars(_os)))
signal: Any = SimpleNamespace(**vars(_signal))
threading: Any = SimpleNamespace(**vars(_threading))
time: Any = SimpleNamespace(**_AT_START.get("time", vars(_time)))


class _Encoder(_json.JSONEncoder):
    """Its methods are those of now. A value of the script that is no JSON costs its field only: it becomes null."""

    encode, iterencode = _json.JSONEncoder.encode, _json.JSONEncoder.iterencode

    def default(self, o: Any) -> None:
        return None


dumps = _Encoder().encode


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
    """A context that drops whatever goes wrong in it; exceptions that code of the script has raised propagate."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        return isinstance(error, Exception) and not of_script(error)


_done: set[int] = set()


def skip_ours() -> None:
    """Have torch's compiler skip all functions of this package that are loaded by now."""
    skip = _skip()
    if skip is None:
        return
    package = __name__.rpartition(".")[0] + "."
    for name, module in list(sys.modules.items()):
        if name.startswith(package):
            for code in _codes(vars(module), module.__name__):
                if id(code) not in _done:
                    _done.add(id(code))
                    skip(code)


class WithoutCompiler:
    """Has torch's compiler leave functions of Python's library alone that ours call meanwhile.

    Within a compiled function it would count each of them. Helpers of `contextlib` would be some themselves.
    """

    def __init__(self) -> None:
        self._frames: Any = None
        self._before: Any = None

    def __enter__(self) -> None:
        frames: Any = sys.modules.get("torch._C._dynamo.eval_frame")
        try:
            self._before = frames.set_eval_frame(None)
            self._frames = frames
        except (AttributeError, TypeError):  # no compiler yet, or another version of it
            self._frames = None

    def __exit__(self, *_: object) -> None:
        if self._frames is not None:
            self._frames.set_eval_frame(self._before)


class Compilations:
    """What torch's compiler has compiled in this process, by its own records."""

    def __init__(self) -> None:
        self._last: Any = None
        self._function: dict[str, Any] = {}

    def take(self) -> list[tuple[str, str, dict[str, Any]]]:
        """What was compiled since the last call, as marks of the record: (kind, text, data) each.

        "compile": functions that were compiled for the first time; "recompile": these functions again, or that their
        number of compilations has reached the limit, so that they run uncompiled. Data of the latter: the file, line
        and function of the last one, and reason: the assumption that no longer held, and where it was made.
        """
        utilities: Any = sys.modules.get("torch._dynamo.utils")
        read = getattr(utilities, "get_compilation_metrics", None)
        records = list(read()) if read is not None else []
        if not records or records[-1] is self._last:
            return []
        begin = next((at + 1 for at, record in enumerate(records) if record is self._last), 0)
        self._last = records[-1]
        new: dict[str, Any] = {"seconds": 0.0, "graphs": 0}
        again: dict[str, Any] = {"seconds": 0.0, "graphs": 0, "reason": "", "limit": False}
        for record in records[begin:]:
            name, reason = getattr(record, "co_name", None), getattr(record, "recompile_reason", None)
            limit = _LIMIT in str(getattr(record, "fail_reason", None)).lower().replace("_", " ")
            known = again if reason or limit or _number(record) else new
            known["seconds"] += _seconds(record)
            if limit:
                again["limit"] = True
            elif name:  # a backward pass has none
                known["graphs"] += 1
            if name and known is again:
                self._function = {
                    "file": record.co_filename,
                    "line": record.co_firstlineno,
                    "function": name,
                }
            if reason:
                again["reason"] = guard(str(reason).partition("\n")[0])
        marks = []
        if new["graphs"]:
            marks.append(("compile", f"compiled {_graphs(new)}", new))
        if again["graphs"] or again["limit"]:
            again.update(self._function)
            text = f"recompiled {_graphs(again)}"
            if self._function:
                place = f"{os.path.basename(again['file'])}:{again['line']}"
                text += f": {again['function']} ({place})"
            if again["reason"]:
                text += f", since {again['reason']} no longer held"
            if again["limit"]:
                text += "; the limit of recompilations is reached, so it runs uncompiled from now on"
            marks.append(("recompile", text, again))
        return marks


def guard(reason: str) -> str:
    """The assumption and its place: "bins == 0 (train.py:13 in forward)"."""
    number, colon, rest = reason.partition(": ")
    text = rest if colon and number.replace("/", "").isdigit() else reason
    # The assumption, the line of code if torch has it, and its place.
    parts = [part.strip() for part in text.split("#") if part.strip()]
    if len(parts) < 2:
        return "".join(parts)
    # The place may be followed by one of torch, or be that alone, in brackets.
    place = parts[-1].partition(" (_")[0].strip("()")
    return f"{parts[0]} ({os.path.basename(place)})"


def _graphs(found: dict[str, Any]) -> str:
    return f"{found['graphs']:,} graph{'s' * (found['graphs'] != 1)} in {found['seconds']:.1f} s"


_LIMIT = "recompile limit"


def _number(record: Any) -> int:
    """How many times a function was compiled before, from an id such as "0/3"."""
    last = str(getattr(record, "compile_id", "")).rpartition("/")[2].partition("_")[0]
    return int(last) if last.isdigit() else 0


def _seconds(record: Any) -> float:
    spent = getattr(record, "duration_us", None)
    if spent is not None:  # from torch 2.6 on
        return float(spent) * 1e-6
    return float(getattr(record, "entire_frame_compile_time_s", None) or 0.0)


def _skip() -> Any:
    """torch's function that has a code object skipped; None if this torch has none."""
    try:
        frames: Any = sys.modules.get("torch._C._dynamo.eval_frame")
        if hasattr(frames, "skip_code"):
            return frames.skip_code
        strategy = frames._FrameExecStrategy(
            frames._FrameAction.SKIP,
            frames._FrameAction.DEFAULT,
        )
        return lambda code: frames.set_code_exec_strategy(code, strategy)
    except (AttributeError, TypeError):  # another version of it
        return None


def _codes(values: dict[str, Any], module: str) -> Iterator[Any]:
    for value in list(values.values()):
        if isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        if isinstance(value, property):
            value = value.fget
        value = getattr(value, "__wrapped__", value) if module else value
        if isinstance(value, type):
            if value.__module__ == module:
                yield from _codes(dict(vars(value)), module)
        elif isinstance(value, types.FunctionType) and value.__module__ == module:
            yield from _nested(value.__code__)


def _nested(code: Any) -> Iterator[Any]:
    yield code
    for item in code.co_consts:
        if isinstance(item, types.CodeType):
            yield from _nested(item)
