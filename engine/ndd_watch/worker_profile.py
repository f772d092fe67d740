"""Profiles whole batches in a worker of a loader: which functions of the user's own code take long, and with what.

The time of a library's function belongs to the user's functions that call it, directly or not, in the proportion of
what it does for each. Built-in functions tell what time is spent with: computing, waiting for storage, for a lock or
for a connection, sleeping, or pickling. At most one batch in nine is profiled, and profiling takes at most a stated
part of the worker's processor time, except for the first one.

Up to Python 3.11, Python's profiler slows bytecode down: what a profiled batch takes of processor time beyond a usual
one is taken out of the functions in Python.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from .apart import Dropped, gc, module_of, time
from .looks import attributes, bases, class_name, namespace, own
from .mapped import _text, used_by_thread
from .probes import SPARE_DEPTH, depth, handles_alarms, profiled
from .profiler import _KIND, _MONITORING, INLINE, _added_ns, _name
from .steps import PROFILE_NS

# Batches between two that are profiled, at least; those that are looked at before the first one.
EVERY, BEFORE = 9, 2
# Of the processor time of the worker: what profiling adds.
SHARE = 0.002
# The part of the time on the wall that counts besides: a worker that waits uses no processor time.
WAITED = 0.05
# What is told: functions, transforms.
MOST_FUNCTIONS, MOST_TRANSFORMS = 12, 16
# The part that the profiler leaves of the time of bytecode, at least.
LEAST_KEPT = 0.5
# Rounds in which time goes from functions of libraries to those that call them; recursion makes circles.
_ROUNDS = 8
_COLLECT = "<built-in method gc.collect>"
_FETCH = os.path.join("torch", "utils", "data", "_utils", "fetch.py")

COMPUTES = "computes"
# What the name of a built-in function tells; the first part that is found decides.
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
)  # fmt: skip
# Methods of transforms, of which the class itself has one.
_METHODS = ("transform", "_transform", "apply", "forward", "__call__")

Key = Any  # (file, line, name) of a function in Python, or the description of a built-in one


def kind_of(key: Key) -> str:
    """What a function spends its own time with."""
    if not isinstance(key, str):
        return COMPUTES
    return next((kind for kind, parts in _KINDS if any(part in key for part in parts)), COMPUTES)


class _Sums:
    """Of the profiles by one clock: nanoseconds that the batches took, of processor time and without a processor; those
    of the system, and pages that were touched first."""

    def __init__(self) -> None:
        self.count = self.wall_ns = self.cpu_ns = self.late_ns = self.system_ns = self.faults = 0
        # Of functions: seconds of their own, with all that they call, and calls; and (caller, function) -> seconds.
        self.own_s: dict[Key, float] = {}
        self.whole: dict[Key, float] = {}
        self.calls: dict[Key, int] = {}
        self.edges: dict[tuple[Key, Key], float] = {}

    def add(self, stats: Any, added: float) -> int:
        """The functions of a profile; added: seconds that the profiler adds to a call. Returns the calls."""
        all_calls = 0
        for entry in stats:
            key = _key(entry.code)
            if key is None:
                continue
            inside, inner = 0.0, 0
            for call in entry.calls or ():
                callee = _key(call.code)
                if call.code is not entry.code:
                    inside += call.totaltime
                inner += call.callcount
                if callee is not None and callee != key:
                    edge = key, callee
                    self.edges[edge] = self.edges.get(edge, 0.0) + call.totaltime
            # Half of what the profiler adds to a call is in the function, and half in the one that calls it.
            mine = entry.totaltime - inside - added * (entry.callcount + inner) / 2
            all_calls += entry.callcount
            self.own_s[key] = self.own_s.get(key, 0.0) + max(mine, 0.0)
            self.whole[key] = self.whole.get(key, 0.0) + entry.totaltime
            self.calls[key] = self.calls.get(key, 0) + entry.callcount
        return all_calls

    def less(self, keys: Sequence[Key], seconds: float) -> None:
        """Take a garbage collection out. keys: the function in which it began, and the one that called that.

        It is in the time of one of them, or of a built-in function that they called.
        """
        inside = [callee for caller, callee in self.edges if caller in keys and isinstance(callee, str)]
        longest = max((*keys, *inside), key=lambda one: self.own_s.get(one, 0.0))
        self.own_s[longest] = max(self.own_s.get(longest, 0.0) - seconds, 0.0)

    def spent(self, users: set[Key], kept: float) -> dict[Key, dict[str, float]]:
        """Seconds by kind of the functions that are told. kept: the part of the time of bytecode that is not ours."""
        found: dict[Key, dict[str, float]] = {}
        owners = _owners(self, users)
        for key, seconds in self.own_s.items():
            seconds *= 1.0 if isinstance(key, str) else kept
            kind = kind_of(key)
            for owner, part in owners.get(key, {}).items():
                kinds = found.setdefault(owner, {})
                kinds[kind] = kinds.get(kind, 0.0) + seconds * part
        return found


class BatchProfiles:
    """Those of one worker, by turns by the clock on the wall and by that of the processor. A worker that has to wait
    for a processor would otherwise have this time in whichever function it hits.

    dataset, collate: their lists of transforms are told apart. first: the clock of the first profile, 0 or 1.
    """

    def __init__(self, dataset: Any, collate: Any, first: int) -> None:
        self._transforms = transforms(dataset, collate)
        self._profiler: Any = None
        self._clock = first % 2
        self._added: list[float | None] = [None, None]
        self._sums = _Sums(), _Sums()
        self._late_ns = self._extra_ns = self._spent_ns = 0
        self._used = 0, 0
        # Garbage collections in the present profile: functions, nanoseconds on the wall, and of processor time.
        self._collections: list[tuple[list[Key], int, int]] = []
        self._collecting = 0, 0
        self._users: set[Key] = set()
        self._of_transforms: dict[str, float] = {}
        self._answer: dict[str, Any] = {}
        self._answered = 0

    @property
    def _count(self) -> int:
        return self._sums[0].count + self._sums[1].count

    def begin(self, looked: int, cpu_ns: float, wall_ns: int) -> bool:
        """Profile the batch that begins now, if one is due. looked: batches so far that were looked at.

        cpu_ns: processor time of all batches so far. wall_ns: since the worker began.
        """
        if not PROFILE_NS or looked < BEFORE + self._count * (EVERY - 1) or _KIND is None:
            return False
        # On a busy machine, the time on the wall says little of what the worker has used.
        used_ns = cpu_ns + WAITED * wall_ns
        if self._count > 1 and self._spent_ns > SHARE * used_ns:
            return False
        if profiled() or handles_alarms() or depth() + SPARE_DEPTH > sys.getrecursionlimit():
            return False
        kind = _by_processor if self._clock else _KIND
        if self._added[self._clock] is None:
            self._added[self._clock] = _added_ns(kind, True) * 1e-9
        profiler = kind(builtins=True, subcalls=True)
        try:
            self._late_ns, self._used, self._collections = _late_ns(), used_by_thread(), []
            gc.callbacks.append(self._collects)
            profiler.enable()
        except ValueError:  # there is another one
            self._hear_no_collections()
            return False
        self._profiler = profiler
        return True

    def _collects(self, moment: str, _info: Any) -> None:
        """A garbage collection begins or ends. It comes once in many batches, and profiling may bring it about."""
        with Dropped():
            begun = time.perf_counter_ns(), time.thread_time_ns()
            if moment == "start":
                self._collecting = begun
                return
            frame: Any = sys._getframe(1)
            found: list[Key] = []
            while frame is not None and len(found) < 2:
                if (key := _key(frame.f_code)) is not None:
                    found.append(key)
                frame = frame.f_back
            if found and self._profiler is not None:
                wall, cpu = (now - before for now, before in zip(begun, self._collecting))
                self._collections.append((found, wall, cpu))

    def _hear_no_collections(self) -> None:
        with Dropped(ValueError):
            gc.callbacks.remove(self._collects)

    def drop(self) -> None:
        """End, and forget the present profile."""
        profiler, self._profiler = self._profiler, None
        self._hear_no_collections()
        if profiler is not None and (_MONITORING or sys.getprofile() is profiler):
            profiler.disable()

    def end(self, wall_ns: int, cpu_ns: int, usual_ns: float) -> None:
        """The batch is made. usual_ns: processor time of one."""
        profiler, self._profiler = self._profiler, None
        self._hear_no_collections()
        if profiler is None or (not _MONITORING and sys.getprofile() is not profiler):
            self._replaced = profiler  # the script has begun one of its own, which ours must not end
            return
        profiler.disable()
        (system_ns, faults), begin = used_by_thread(), time.thread_time_ns()
        stats, sums, added = profiler.getstats(), self._sums[self._clock], self._added[self._clock] or 0.0
        entries = {entry.code: entry for entry in stats}
        self._users.update(_key(code) for code in entries if own(code) and not _inline(code))
        more = round(sums.add(stats, added) * added * 1e9)
        # What the script itself has asked for is a part of the batch.
        for keys, wall, cpu in () if _COLLECT in entries else self._collections:
            wall_ns, cpu_ns = wall_ns - wall, cpu_ns - cpu
            sums.less(keys, (cpu if self._clock else wall) * 1e-9)
        sums.count += 1
        sums.wall_ns += max(wall_ns - more, 1)
        sums.cpu_ns += max(cpu_ns - more, 0)
        sums.late_ns += max(_late_ns() - self._late_ns, 0)
        sums.system_ns += system_ns - self._used[0]
        sums.faults += faults - self._used[1]
        self._extra_ns += round(cpu_ns - more - usual_ns)
        if not self._clock:
            for name, codes in self._transforms:
                taken = [entries[code].totaltime for code in codes if code in entries]
                if taken:
                    self._of_transforms[name] = self._of_transforms.get(name, 0.0) + max(taken)
        self._clock = 1 - self._clock
        self._spent_ns += max(int(cpu_ns - usual_ns), 0) + time.thread_time_ns() - begin

    def fields(self) -> dict[str, Any]:
        """profiles: [number, ns that they took, of processor time, without a processor, of the system, pages touched
        first] by the clock on the wall, and by that of the processor. functions: [file, line, name, calls, ns with all
        that it calls, {kind: ns} on the wall, {kind: ns} of processor time]; the latter two without other functions of
        the list that it calls. transforms: [name, ns]. Worked out anew only after a tenth more of profiles.
        """
        if self._count >= 1.1 * self._answered + 1:
            begin = time.thread_time_ns()
            self._answered, self._answer = self._count, self._worked_out()
            self._spent_ns += time.thread_time_ns() - begin
        return {"profiling_ns": self._spent_ns, **self._answer}

    def _worked_out(self) -> dict[str, Any]:
        python = sum(
            seconds for sums in self._sums for key, seconds in sums.own_s.items() if not isinstance(key, str)
        )
        slowed = self._extra_ns * 1e-9 / max(python, 1e-9) if not _MONITORING else 0.0
        kept = min(max(1.0 - slowed, LEAST_KEPT), 1.0)
        on_wall, of_processor = (sums.spent(self._users, kept) for sums in self._sums)
        wall = self._sums[0]
        rows: list[list[Any]] = []
        keys: dict[Key, Any] = {**on_wall, **of_processor}
        for key in keys:
            calls = sum(sums.calls.get(key, 0) for sums in self._sums)
            at = ["", 0, key] if isinstance(key, str) else list(key)
            rows.append([
                *at, calls, round(wall.whole.get(key, 0.0) * 1e9), _nanoseconds(on_wall.get(key)),
                _nanoseconds(of_processor.get(key)),
            ])  # fmt: skip
        rows.sort(key=lambda row: -sum(row[5].values()) - sum(row[6].values()))
        parts = sorted(self._of_transforms.items(), key=lambda item: -item[1])
        return {
            "profiles": [
                [sums.count, sums.wall_ns, sums.cpu_ns, sums.late_ns, sums.system_ns, sums.faults]
                for sums in self._sums
            ],
            "functions": rows[:MOST_FUNCTIONS],
            "transforms": [[name, round(seconds * 1e9)] for name, seconds in parts[:MOST_TRANSFORMS]],
        }


def _nanoseconds(kinds: dict[str, float] | None) -> dict[str, int]:
    return {kind: round(seconds * 1e9) for kind, seconds in (kinds or {}).items() if seconds > 1e-6}


def _by_processor(builtins: bool = True, subcalls: bool = True) -> Any:
    """A profiler whose clock is the processor time of the thread."""
    return _KIND(timer=time.thread_time_ns, timeunit=1e-9, builtins=builtins, subcalls=subcalls)


def _late_ns() -> int:
    """For how long this thread was ready to run so far, and had no processor; 0 if that is not known."""
    with Dropped(OSError, ValueError, IndexError):
        return int(_text("/proc/thread-self/schedstat").split()[1])
    return 0


def _inline(code: Any) -> bool:
    """Whether a code is a part of the function around it."""
    return code.co_name in INLINE and code.co_name != "<lambda>"


def _owners(sums: _Sums, users: set[Key]) -> dict[Key, dict[Key, float]]:
    """Function -> parts of its own time by the function that is told: the user's, or else what torch has called."""
    into: dict[Key, list[tuple[Key, float]]] = {}
    for (caller, callee), seconds in sums.edges.items():
        into.setdefault(callee, []).append((caller, max(seconds, 1e-9)))
    owners: dict[Key, dict[Key, float]] = {key: {key: 1.0} for key in users}
    for key in sums.own_s:
        first = any(_fetches(caller) for caller, _ in into.get(key, ()))
        if key not in owners and not _fetches(key) and first and not isinstance(key, str):
            owners[key] = {key: 1.0}
    fixed = set(owners)
    for _ in range(_ROUNDS):
        for key in sums.own_s:
            if key in fixed or _fetches(key) or key not in into:
                continue
            found: dict[Key, float] = {}
            total = sum(seconds for _, seconds in into[key])
            for caller, seconds in into[key]:
                for owner, part in owners.get(caller, {}).items():
                    found[owner] = found.get(owner, 0.0) + part * seconds / total
            owners[key] = found
    return owners


def _fetches(key: Key) -> bool:
    """Whether a function is torch's own around the dataset."""
    return not isinstance(key, str) and key[0].endswith(_FETCH)


def _key(code: Any) -> Key | None:
    """A function; a comprehension is a part of the function around it. None for ours."""
    if isinstance(code, str):
        return None if "_lsprof" in code else code
    if code.co_filename.startswith(_OURS):
        return None
    return code.co_filename, code.co_firstlineno, _name(code)


_OURS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")


def transforms(dataset: Any, collate: Any) -> list[tuple[str, list[Any]]]:
    """(name, codes) of callables in lists of transforms, "Compose[0] RandomCrop". Runs no code of theirs."""
    found: list[tuple[str, list[Any]]] = []
    seen: set[int] = set()
    waiting = [(dataset, 0), (collate, 0)]
    while waiting and len(seen) < 200:
        one, deep = waiting.pop(0)
        held = attributes(one)
        if id(one) in seen or deep > 4 or type(held) is not dict:
            continue
        seen.add(id(one))
        for name, value in list(held.items()):
            kind = class_name(type(value))
            if "transform" in str(name) and kind in ("list", "tuple", "ModuleList", "Sequential"):
                listed: Any = value
                if kind not in ("list", "tuple"):
                    modules: Any = attributes(value) or {}
                    listed = modules.get("_modules", {}).values()
                for place, part in enumerate(list(listed)[:32]):
                    title = class_name(type(part))
                    if title == "function":
                        title = part.__name__
                    codes = _codes(part)
                    if codes:
                        found.append((f"{class_name(type(one))}[{place}] {title}", codes))
                    waiting.append((part, deep + 1))
            elif not isinstance(value, type) and type(attributes(value)) is dict:
                waiting.append((value, deep + 1))
    return found


def _codes(part: Any) -> list[Any]:
    """Code that only this kind of transform runs."""
    held = attributes(part)
    if type(held) is dict and "lambd" in held:
        part = held["lambd"]
    if type(part).__name__ == "function":
        return [part.__code__]
    for kind in bases(type(part)):
        if module_of(kind).startswith("torch.nn") or kind is object:
            continue
        names = namespace(kind)
        codes = [names[name].__code__ for name in _METHODS if type(names.get(name)).__name__ == "function"]
        if codes:
            return codes
    return []
