"""To which function the time of a profile belongs, and what it is spent with: of a step as of a worker's batch.

A profiler knows how long each function took, and how much of that for each function that calls it. Some functions are
told apart, such as the user's own. What another one does for one of its callers is assumed to be that caller's part of
everything that it does.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Callable, Union

# The folder of this program, with a separator at the end: its functions are nobody's.
OURS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")
# Code inside a function, which is called by that function's name.
INLINE = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>", "<lambda>"})
# What time is spent with. Functions of C by parts of their descriptions; the first part that is found decides.
COMPUTES, DEVICE, COLLECTS = "computes", "device", "collects"
COLLECT = "<built-in method gc.collect>"
_KINDS = (
    ("sleeps", ("time.sleep",)),
    ("lock", (
        "SemLock", "'acquire' of '_thread", "'__enter__' of '_thread", "allocate_lock", "fcntl.flock", "fcntl.lockf",
        "posix.waitpid",
    )),
    ("connection", ("_socket", "select.", "_ssl")),
    ("storage", (
        "_io.FileIO", "_io.Buffered", "io.open", "_io.open", "posix.open", "posix.read", "posix.pread", "posix.stat",
        "posix.lstat", "posix.fsync", "posix.scandir", "posix.listdir", "'readinto'", "_io.TextIOWrapper",
        "posix.fadvise", "posix.posix_fadvise", "numpy.fromfile", "read_file", "h5py", "h5d",
    )),
    ("pickle", ("_pickle.",)),
    (DEVICE, ("'synchronize' of 'torch.Stream'", "'synchronize' of 'torch.Event'")),
    (COLLECTS, (COLLECT,)),
)  # fmt: skip
# Functions of torch in Python that wait for the device: of torch.cuda and torch.accelerator, of their streams and
# events. `Blocking` knows those of tensors.
_OF_DEVICE = frozenset({"synchronize", "empty_cache"})
# Rounds in which the time of functions that call each other in a circle is divided.
_ROUNDS = 8

Function = tuple[str, int, str]  # of Python: file, line, name
Key = Union[Function, str]  # or the description of one of C


def in_torch(file: str) -> bool:
    """Whether a file is torch's."""
    return os.sep + "torch" + os.sep in file


def kind_of(key: Key) -> str:
    """What a function spends its own time with."""
    if not isinstance(key, str):
        return DEVICE if key[2] in _OF_DEVICE and in_torch(key[0]) else COMPUTES
    return next((kind for kind, parts in _KINDS if any(part in key for part in parts)), COMPUTES)


def key_of_code(code: Any) -> Key:
    """What a function is told by, from its code or the description of one of C."""
    return code if isinstance(code, str) else (code.co_filename, code.co_firstlineno, name_of(code))


def name_of(code: Any) -> str:
    """ "Clips.__getitem__", also for a comprehension in it; "median.<lambda>". Before Python 3.11 without the class."""
    name = str(getattr(code, "co_qualname", code.co_name))
    while "." in name and name.rpartition(".")[2] in INLINE - {"<lambda>"}:
        name = name.rpartition(".<locals>.")[0]
    outer, within, last = name.rpartition(".<locals>.")
    if last == "<lambda>" and within:
        return f"{outer.rpartition('<locals>.')[2]}.<lambda>"
    return last


class TimeShares:
    """How the time of functions is divided.

    entries: those of a profiler by their code, or by anything else that tells functions. apart: whether a function is
    told apart. kind: what its own time is spent with. own_s: seconds of its own, None for all without what it calls.
    """

    def __init__(
        self,
        entries: Mapping[Any, Any],
        apart: Callable[[Any], bool],
        kind: Callable[[Any], str] = lambda _: COMPUTES,
        own_s: Callable[[Any], float] | None = None,
    ) -> None:
        self._entries, self._apart, self._kind = entries, apart, kind
        self._own_s = own_s or _own_s
        # Function -> seconds by kind, and those within functions that are told apart.
        self._known: dict[Any, tuple[dict[str, float], float]] = {}

    def spent(self, code: Any) -> dict[str, float]:
        """Seconds by kind that a function takes, with what others do for it that are not told apart."""
        return self._of(code)[0]

    def apart_in(self, code: Any) -> float:
        """Seconds of a function within those that are told apart."""
        return self._of(code)[1]

    def apart_of(self, call: Any) -> float:
        """Seconds of a call within them. call: an entry within that of the function that calls."""
        if self._apart(call.code):
            return float(call.totaltime)
        return self.apart_in(call.code) * self._part(call)

    def _part(self, call: Any) -> float:
        entry = self._entries.get(call.code)
        return min(call.totaltime / entry.totaltime, 1.0) if entry is not None and entry.totaltime else 0.0

    def _of(self, code: Any) -> tuple[dict[str, float], float]:
        if code not in self._known:
            below, circle = self._below(code)
            for one in below:  # where functions call each other: until it is known better
                self._known[one] = {self._kind(one): self._entries[one].totaltime}, 0.0
            looked = [self._look(one) for one in below]
            for _ in range(_ROUNDS if circle else 1):
                for one, total, first, apart, parts in looked:
                    self._known[one] = self._divided(total, first, apart, parts)
        return self._known.get(code, ({}, 0.0))

    def _look(self, code: Any) -> tuple[Any, float, dict[str, float], float, list[tuple[Any, float]]]:
        """(function, seconds, those of its own by kind, those in functions told apart, parts of others)."""
        entry = self._entries[code]
        calls = [call for call in entry.calls or () if call.code != code]
        apart = sum(call.totaltime for call in calls if self._apart(call.code))
        parts = [
            (call.code, part)
            for call in calls
            if call.code in self._known and not self._apart(call.code) and (part := self._part(call))
        ]
        return code, entry.totaltime, {self._kind(code): self._own_s(entry)}, apart, parts

    def _divided(
        self, total: float, first: dict[str, float], apart: float, parts: list[tuple[Any, float]]
    ) -> tuple[dict[str, float], float]:
        kinds = dict(first)
        for code, part in parts:
            inner, inner_apart = self._known[code]
            apart += inner_apart * part
            for kind, seconds in inner.items():
                kinds[kind] = kinds.get(kind, 0.0) + seconds * part
        # A function that calls itself through others has the time of the inner calls in several of its calls.
        if (found := sum(kinds.values()) + apart) > total > 0:
            kinds = {kind: seconds * total / found for kind, seconds in kinds.items()}
            apart *= total / found
        return kinds, apart

    def _below(self, code: Any) -> tuple[list[Any], bool]:
        """(functions that one calls, directly or not, without those told apart; itself comes last; whether some call
        each other in a circle)."""
        found: list[Any] = []
        begun: set[Any] = set()
        circle, waiting = False, [(code, False)]
        within: set[Any] = set()
        while waiting:
            one, ended = waiting.pop()
            if ended:
                found.append(one)
                within.discard(one)
                continue
            if one in within:
                circle = True
            if one in begun or one in self._known or one not in self._entries:
                continue
            begun.add(one)
            within.add(one)
            waiting.append((one, True))
            inner = (call.code for call in self._entries[one].calls or ())
            waiting += [(code, False) for code in inner if code != one and not self._apart(code)]
        return found, circle


def _own_s(entry: Any) -> float:
    inside = sum(call.totaltime for call in entry.calls or () if call.code != entry.code)
    return max(float(entry.totaltime - inside), 0.0)
