"""Keeps torch's compiler out of the observer's own functions.

While a compiled function runs parts of it without the compiler, each Python function that is called there is compiled,
too. Ours are no part of the script's program.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

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
