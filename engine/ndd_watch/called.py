"""What the user's lines call that is not their own: which function of a library takes the time under a profiler.

How the time of a library is divided among those that call it: see `attribution`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dis import get_instructions
from typing import Any

from .attribution import TimeShares, in_torch, name_of

# Functions with these names record what they are given: `self.log`, `writer.add_scalar`, `wandb.log`, `print`.
LOGS = frozenset({
    "log", "log_dict", "log_metrics", "log_metric", "log_scalar", "log_scalars", "on_log", "add_scalar", "add_scalars",
    "add_histogram", "add_image", "print", "write_metrics", "report_scalar", "set_postfix", "set_postfix_str",
    "set_description",
})  # fmt: skip
# Libraries that do nothing else, and ends of the names of classes that do.
_LOGGERS = frozenset({
    "wandb", "tensorboard", "tensorboardX", "mlflow", "comet_ml", "neptune", "aim", "clearml", "rich", "tqdm",
})  # fmt: skip
_RECORDERS = ("Logger", "LoggerConnector", "Writer", "ProgressBar", "ProgressCallback", "Progress")
# `math.log` and `torch.log` are something else.
_NUMBERS = frozenset({"math", "cmath", "torch", "Tensor"})
# A function is named instead of the one that calls it if it takes this part of the whole.
_BIG = 0.05
# Calls that take less of the whole are left out; a built-in function is named with the one that it takes most of.
_LEAST, _MOSTLY = 0.01, 0.5
_MOST_CALLS = 16
# Calls within calls that are looked at.
_DEEP = 60
_WRAPPER = "decorate_context"  # torch's, around each function with @torch.no_grad()
_OPTIMIZERS = os.path.join("torch", "optim", "optimizer.py")
_FUNCTIONAL = os.path.join(
    "torch", "nn", "functional.py"
)  # layers and losses, also where no module calls them

# Phases whose calls of torch are the model's.
_OF_MODEL = ("forward", "loss", "backward")
# What `data[i]` calls, and properties of pandas that are read so.
_SUBSCRIPT, _INDEXED = "__getitem__", frozenset({"iloc", "loc", "iat", "at"})

# Code and line of the user's function that calls.
Place = tuple[Any, int]


def logs(name: str, package: str) -> bool:
    """Whether a function records values or draws a progress bar. name: "Writer.add_scalar"."""
    owner, _, last = name.partition(" ")[0].rpartition(".")
    if owner in _NUMBERS:
        return False
    return last in LOGS or package in _LOGGERS or owner.endswith(_RECORDERS)


def key(code: Any) -> Any:
    """What a function has in common with itself with probes."""
    return code if isinstance(code, str) else (code.co_filename, code.co_name, code.co_firstlineno)


def library(code: Any) -> str:
    """The package of a function: "transformers"; "" for one of Python, or a built-in one of it."""
    if isinstance(code, str):
        return "torch" if "torch" in code else ""
    _, found, inside = code.co_filename.replace(os.sep, "/").rpartition("-packages/")
    return inside.partition("/")[0].removesuffix(".py") if found else ""


class Called:
    """The calls of a profile.

    own: whether a code object is the user's own. hidden: whether it is the program's, whose calls are nobody's.
    roots: keys of code objects and the phase of what they call. phase_of: that of a function of the user. whole:
    functions inside libraries are of interest as well, as in an evaluation; otherwise what the user's functions call.
    """

    def __init__(
        self,
        stats: Any,
        own: Callable[[Any], bool],
        hidden: Callable[[Any], bool],
        roots: dict[Any, str],
        phase_of: Callable[[Any], str],
        whole: bool,
    ) -> None:
        self._entries = {entry.code: entry for entry in stats}
        self._own, self._hidden, self._roots, self._whole = own, hidden, roots, whole
        self._phase_of = phase_of
        # Told apart are the user's own functions, and the model and the optimizer of a step.
        self.shares = TimeShares(
            self._entries, lambda code: own(code) or (not whole and bool(self._root(code)))
        )
        self._lines: dict[int, _Lines] = {}
        self._least = 0.0

    def rows(self, seconds: float, places: list[Place], is_loop: bool) -> list[list[Any]]:
        """[file, line, name, function, library, calls, ns, phase] of each, the longest first.

        file, line, name: the user's own. seconds: of the whole profile. places: the user's functions that were called
        before it began, the innermost one first; is_loop: it calls what nothing else has called, and not a library.
        """
        self._least = _BIG * seconds
        found: dict[tuple[Any, ...], list[float]] = {}
        for user, code, calls, taken in self._outermost():
            around = self._phase_of(user) if user is not None else "other"
            if user is None and not places and not self._phase(code):
                continue
            descends = self._whole or (user is None and not is_loop)
            if user is not None:
                at, line = user, self._line(user, code) or user.co_firstlineno
            elif is_loop:
                at, line = next(
                    ((one, line) for one, _ in places if (line := self._line(one, code))),
                    (places[0][0], places[0][0].co_firstlineno if self._whole else 0),
                )
                if not line:  # what it called before the step began
                    continue
            elif places:
                at, line = places[0]
            elif isinstance(code, str):  # a function in C, which nothing of the user's has called
                continue
            else:
                at, line = code, code.co_firstlineno
            for inner, text, count, ns in self._inside(code, calls, taken, descends, set()):
                if self._usual(inner, around, user is None and not is_loop):
                    continue
                row = at.co_filename, line, name_of(at), text, library(inner), self._phase(inner) or around
                one = found.setdefault(row, [0, 0.0])
                one[0] += count
                one[1] += ns
        rows = [
            [file, line, user_name, text, package, int(count), round(taken * 1e9), phase]
            for (file, line, user_name, text, package, phase), (count, taken) in found.items()
            if taken >= _LEAST * seconds
        ]
        return sorted(rows, key=lambda row: -row[6])[:_MOST_CALLS]

    def _usual(self, code: Any, around: str, in_library: bool) -> bool:
        """Whether a call belongs to the model or the loop of a step: torch, which phases tell of. around: its phase."""
        if self._whole or library(code) != "torch":
            return False
        return in_library or around in _OF_MODEL or bool(self._phase(code))

    def _outermost(self) -> Iterator[tuple[Any, Any, int, float]]:
        """(the user's function that calls, or None; what; calls; seconds) of what is not the user's own.

        In an evaluation of our own, it is this program that calls the model and the loader.
        """
        known: dict[Any, list[float]] = {}
        for entry in self._entries.values():
            for call in entry.calls or ():
                one = known.setdefault(call.code, [0, 0.0])
                one[0] += call.callcount
                one[1] += call.totaltime
                by_user = self._own(entry.code)
                if (by_user or (self._whole and self._hidden(entry.code))) and not (
                    self._own(call.code) or self._hidden(call.code)
                ):
                    yield entry.code if by_user else None, call.code, call.callcount, call.totaltime
        for code, entry in self._entries.items():
            count, taken = known.get(code, (0, 0.0))
            if entry.callcount > count and not self._own(code) and not self._hidden(code):
                yield None, code, int(entry.callcount - count), entry.totaltime - taken

    def _inside(
        self, code: Any, calls: int, taken: float, descends: bool, seen: set[Any]
    ) -> Iterator[tuple[Any, str, int, float]]:
        """(function, its name, calls, seconds) of a call, without the user's own functions inside."""
        entry, text = self._entries.get(code), text_of(code)
        if entry is None or isinstance(code, str) or not entry.totaltime:
            yield code, text, calls, taken
            return
        part = min(taken / entry.totaltime, 1.0)
        rest = taken - self.shares.apart_in(code) * part
        inner = in_torch(code.co_filename) and code.co_name != _WRAPPER
        if descends and len(seen) < _DEEP and not inner and not logs(text, library(code)):
            for call in entry.calls or ():
                spent = (call.totaltime - self.shares.apart_of(call)) * part
                if (
                    spent < self._least
                    or self._own(call.code)
                    or call.code in seen
                    or self._hidden(call.code)
                ):
                    continue
                if isinstance(call.code, str) or (
                    in_torch(call.code.co_filename) and not self._special(call.code)
                ):
                    continue
                rest -= spent
                yield from self._inside(call.code, call.callcount, call.totaltime * part, True, seen | {code})
        if rest > 0:
            mostly = max(
                (one for one in entry.calls or () if isinstance(one.code, str) and library(one.code) == "torch"),
                key=lambda one: one.totaltime, default=None,
            )  # fmt: skip
            if mostly is not None and not inner and mostly.totaltime * part >= _MOSTLY * rest:
                text += f" ({text_of(mostly.code)})"
            yield code, text, calls, rest

    def _line(self, code: Any, callee: Any) -> int | None:
        """The line in which a function names another one; None if nowhere."""
        if id(code) not in self._lines:
            self._lines[id(code)] = _Lines(code)
        return self._lines[id(code)].names(callee)

    def _special(self, code: Any) -> bool:
        """Whether a function of torch is more than a part of the one that calls it."""
        return bool(self._phase(code)) or getattr(code, "co_name", "") == _WRAPPER

    def _phase(self, code: Any) -> str:
        """The phase of a function that is known, or that does little else than call one; "" for others."""
        entry = self._entries.get(code)
        if (found := self._root(code)) or entry is None:
            return found
        for call in entry.calls or ():
            if call.totaltime >= _MOSTLY * entry.totaltime and (found := self._root(call.code)):
                return found
        return ""

    def _root(self, code: Any) -> str:
        """The phase of a function that has one by itself; "" for others."""
        if isinstance(code, str):
            return ""
        if code.co_name == "wrapper" and code.co_filename.endswith(_OPTIMIZERS):
            return "optimizer"  # around each step
        if not self._whole and code.co_filename.endswith(_FUNCTIONAL):
            return "forward"
        return self._roots.get(key(code), "")


def text_of(code: Any) -> str:
    """ "torch.cat", "Tensor.cpu", "DataFrame.iloc"."""
    if not isinstance(code, str):
        return name_of(code)
    words = code.strip("<>").removeprefix("built-in method ").removeprefix("method ")
    method, _, kind = words.partition(" of ")
    owner = kind.strip("'").partition("'")[0].rpartition(".")[2].replace("TensorBase", "Tensor")
    return f"{owner}.{method.strip(chr(39))}" if kind else method.removeprefix("builtins.").removeprefix("_")


class _Lines:
    """Which lines of a function name others. Reading its instructions takes a millisecond: once per function."""

    def __init__(self, code: Any) -> None:
        # (offset, name, line) of what is loaded; (offset, its first instruction) of each loop's end.
        self._loads: list[tuple[int, Any, int]] = []
        self._loops: list[tuple[int, int]] = []
        self._subscripts: set[int] = set()
        line = code.co_firstlineno
        for one in get_instructions(code):
            starts = getattr(
                one, "line_number", one.starts_line
            )  # from Python 3.13 on, the latter says whether
            line = starts if type(starts) is int else line
            if one.opname.startswith("LOAD_"):
                self._loads.append((one.offset, one.argval, line))
            if "JUMP" in one.opname and type(one.argval) is int and one.argval < one.offset:
                self._loops.append((one.offset, one.argval))
            if one.opname == "BINARY_SUBSCR" or one.argrepr == "[]":
                self._subscripts.add(line)

    def names(self, callee: Any) -> int | None:
        """The line that names a function first, in a loop if one does; None if there is none.

        A subscript names nothing: it is that of a property of pandas, or the only one of the function.
        """
        wanted = text_of(callee).rpartition(".")[2]
        indexed = _INDEXED if wanted == _SUBSCRIPT and library(callee) == "pandas" else frozenset()
        named = [(at, line) for at, name, line in self._loads if name == wanted or name in indexed]
        for end, begin in self._loops:
            for at, line in named:
                if begin <= at < end:
                    return line
        if named:
            return named[0][1]
        found = self._subscripts if wanted == _SUBSCRIPT else set()
        return next(iter(found)) if len(found) == 1 else None
