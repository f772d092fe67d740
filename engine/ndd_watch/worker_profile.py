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
from .attribution import COLLECT, INLINE, OURS, Key, TimeShares, key_of_code, kind_of
from .call_times import KIND, MONITORING, CallEntry, added_ns
from .looks import attributes, bases, class_name, namespace, own
from .mapped import _text, used_by_thread
from .probes import SPARE_DEPTH, depth, handles_alarms, profiled
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
_FETCH = os.path.join("torch", "utils", "data", "_utils", "fetch.py")

# Methods of transforms, of which the class itself has one.
_METHODS = ("transform", "_transform", "apply", "forward", "__call__")


class _Sums:
    """Of the profiles by one clock: nanoseconds that the batches took, of processor time and without a processor; those
    of the system, and pages that were touched first."""

    def __init__(self) -> None:
        self.count = self.wall_ns = self.cpu_ns = self.late_ns = self.system_ns = self.faults = 0
        self.entries: dict[Key, CallEntry] = {}
        # Seconds that the profiler adds to a call; those of garbage collections by the function that they are in.
        self.added = 0.0
        self._collecting: dict[Key, float] = {}

    def add(self, stats: Any) -> int:
        """The functions of a profile. Returns the calls."""
        all_calls = 0
        for entry in stats:
            if (key := _key(entry.code)) is None:
                continue
            all_calls += entry.callcount
            into = self.entries.setdefault(key, CallEntry(key))
            for call in (entry, *(entry.calls or ())):
                callee = key_of_code(call.code)
                one = into if call is entry else into.inside.setdefault(callee, CallEntry(callee))
                one.callcount += call.callcount
                one.totaltime += call.totaltime
        return all_calls

    def own_s(self, entry: CallEntry) -> float:
        """Seconds of a function without what it calls, garbage collections, and the profiler."""
        # Half of what the profiler adds to a call is in the function, and half in the one that calls it.
        calls = entry.callcount + sum(call.callcount for call in entry.calls)
        inside = sum(call.totaltime for call in entry.calls if call.code != entry.code)
        less = self._collecting.get(entry.code, 0.0)
        return max(entry.totaltime - inside - self.added * calls / 2 - less, 0.0)

    def python_s(self) -> float:
        """Seconds of all functions in Python."""
        return sum(self.own_s(one) for one in self.entries.values() if not isinstance(one.code, str))

    def less(self, keys: Sequence[Key], seconds: float) -> None:
        """Take a garbage collection out. keys: the function in which it began, and the one that called that.

        It is in the time of one of them, or of a built-in function that they called.
        """
        within = [self.entries[key] for key in keys if key in self.entries]
        built_in = [one.code for entry in within for one in entry.calls if isinstance(one.code, str)]
        known = [*within, *(self.entries[code] for code in built_in if code in self.entries)]
        if known:
            longest = max(known, key=self.own_s).code
            self._collecting[longest] = self._collecting.get(longest, 0.0) + seconds

    def spent(self, users: set[Key], kept: float) -> dict[Key, dict[str, float]]:
        """Seconds by kind of the functions that are told: the user's, and what torch itself calls.

        kept: the part of the time of bytecode that is not ours.
        """
        fetching = [entry for entry in self.entries.values() if _fetches(entry.code)]
        first = {call.code for entry in fetching for call in entry.calls if not isinstance(call.code, str)}
        told = {key for key in users | first if key in self.entries and not _fetches(key)}
        shares = TimeShares(
            self.entries, lambda key: key in told or _fetches(key), kind_of,
            lambda entry: self.own_s(entry) * (1.0 if isinstance(entry.code, str) else kept),
        )  # fmt: skip
        return {key: shares.spent(key) for key in told}


class BatchProfiles:
    """Those of one worker, by turns by the clock on the wall and by that of the processor. A worker that has to wait
    for a processor would otherwise have this time in whichever function it hits.

    dataset, collate: their lists of transforms are told apart. first: the clock of the first profile, 0 or 1.
    """

    def __init__(self, dataset: Any, collate: Any, first: int) -> None:
        self._transforms = transforms(dataset, collate)
        self._profiler: Any = None
        self._clock = first % 2
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
        if not PROFILE_NS or looked < BEFORE + self._count * (EVERY - 1) or KIND is None:
            return False
        # On a busy machine, the time on the wall says little of what the worker has used.
        used_ns = cpu_ns + WAITED * wall_ns
        if self._count > 1 and self._spent_ns > SHARE * used_ns:
            return False
        if profiled() or handles_alarms() or depth() + SPARE_DEPTH > sys.getrecursionlimit():
            return False
        kind = _by_processor if self._clock else KIND
        if not self._sums[self._clock].added:
            self._sums[self._clock].added = added_ns(kind, True) * 1e-9
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
        if profiler is not None and (MONITORING or sys.getprofile() is profiler):
            profiler.disable()

    def end(self, wall_ns: int, cpu_ns: int, usual_ns: float) -> None:
        """The batch is made. usual_ns: processor time of one."""
        profiler, self._profiler = self._profiler, None
        self._hear_no_collections()
        if profiler is None or (not MONITORING and sys.getprofile() is not profiler):
            self._replaced = profiler  # the script has begun one of its own, which ours must not end
            return
        profiler.disable()
        (system_ns, faults), begin = used_by_thread(), time.thread_time_ns()
        stats, sums = profiler.getstats(), self._sums[self._clock]
        entries = {entry.code: entry for entry in stats}
        self._users.update(key_of_code(code) for code in entries if own(code) and not _inline(code))
        more = round(sums.add(stats) * sums.added * 1e9)
        # What the script itself has asked for is a part of the batch.
        for keys, wall, cpu in () if COLLECT in entries else self._collections:
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
        python = sum(sums.python_s() for sums in self._sums)
        slowed = self._extra_ns * 1e-9 / max(python, 1e-9) if not MONITORING else 0.0
        kept = min(max(1.0 - slowed, LEAST_KEPT), 1.0)
        on_wall, of_processor = (sums.spent(self._users, kept) for sums in self._sums)
        rows: list[list[Any]] = []
        for key in on_wall.keys() | of_processor.keys():
            wall, processor = (sums.entries.get(key, CallEntry(key)) for sums in self._sums)
            rows.append([
                *key, wall.callcount + processor.callcount, round(wall.totaltime * 1e9),
                _nanoseconds(on_wall.get(key)), _nanoseconds(of_processor.get(key)),
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
    return KIND(timer=time.thread_time_ns, timeunit=1e-9, builtins=builtins, subcalls=subcalls)


def _late_ns() -> int:
    """For how long this thread was ready to run so far, and had no processor; 0 if that is not known."""
    with Dropped(OSError, ValueError, IndexError):
        return int(_text("/proc/thread-self/schedstat").split()[1])
    return 0


def _inline(code: Any) -> bool:
    """Whether a code is a part of the function around it."""
    return code.co_name in INLINE and code.co_name != "<lambda>"


def _fetches(key: Key) -> bool:
    """Whether a function is torch's own around the dataset."""
    return not isinstance(key, str) and key[0].endswith(_FETCH)


def _key(code: Any) -> Key | None:
    """A function; None for ours."""
    ours = "_lsprof" in code if isinstance(code, str) else code.co_filename.startswith(OURS)
    return None if ours else key_of_code(code)


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
