"""What torch's compiler does, and how it is kept out of the observer's own functions.

While a compiled function runs parts of it without the compiler, each Python function that is called there is compiled,
too. Ours are no part of the script's program.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

from .library import os

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
    return "".join(parts) if len(parts) < 2 else f"{parts[0]} ({os.path.basename(parts[-1])})"


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
