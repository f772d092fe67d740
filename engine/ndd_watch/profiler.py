"""Profiles one step, an evaluation and a checkpoint: which functions of the user's own code take long.

A thread that reads the stack of another one sees its code only where it releases the interpreter lock. A profiler sees
every call, and slows down the one step for which it is on.

The first long evaluation is profiled from LATE_NS on, or else the second one from its beginning, or its end if it is
long; of checkpoints the second one. After that, so rarely that it costs little.
"""

from __future__ import annotations

import sys
from threading import get_ident
from typing import Any, Callable

from .attribution import COLLECTS, DEVICE, INLINE, OURS, in_torch, key_of_code, kind_of, name_of
from .blocking import Blocking
from .call_times import KIND, MONITORING, added_ns
from .called import Called, Place, key, text_of
from .clock import CHECKPOINT, EVALUATE, NAMES, OTHER, now
from .collecting import Collecting
from .looks import own_frame
from .probes import LONGER, SPARE_NS, handles_alarms, profiled

# Functions of the user's own code, and waits for the device, that a profiled step names.
MOST_FUNCTIONS = 12
# Phase changes of a step up to which functions are assigned to phases: each costs a fraction of a millisecond.
MOST_PHASES = 64
ANOTHER = "another profiler is active"


class StepProfiler:
    """own: whether a code object is the user's own. ours: folders, with a separator at the end, of the program that
    calls this code; its time is no part of the functions that call it."""

    def __init__(self, own: Callable[[Any], bool], ours: tuple[str, ...] = ()) -> None:
        self._own, self._ours = own, (OURS, *ours)
        self._profiler: Any = None
        self.blocking = Blocking()
        # Code of the function that trains, if it is the user's own, and the user's functions around the step with
        # their lines, the innermost one first.
        self._loop: Any = None
        self._places: list[Place] = []
        self._replaced: Any = None
        self._begun = self._left_out = self._marks = 0
        # Nanoseconds that the profiler adds to a call; measured once with built-in functions, and once without.
        self._added: float | None = None
        self._measured: dict[bool, float] = {}
        # By id of a code object: seconds so far, and those of each phase.
        self._spent: dict[int, float] = {}
        self._phases: dict[int, dict[str, float]] = {}
        # Nanoseconds of each phase, and when the present one began.
        self._lengths: dict[str, int] = {}
        self._changed = self._until = self._thread = 0

    def begin(self, usual_ns: int = 0) -> str:
        """Begin on this thread. Returns why that is not possible, or "".

        usual_ns: how long a step usually takes. It ends where this one takes much longer: the training may be over.
        """
        if self._profiler is not None or profiled():
            return ANOTHER
        self._until, self._thread = now() + LONGER * usual_ns + SPARE_NS if usual_ns else 0, get_ident()
        kind = KIND
        if kind is None:
            return "this Python has no profiler"
        self._left_out = self._marks = 0
        self._places = []
        self._spent, self._phases, self._lengths = {}, {}, {}
        try:
            # Python's profiler loses what a signal handler raises while it names a method of C that it meets first.
            builtins = MONITORING or not handles_alarms()
            self._added = self._measured.get(builtins)
            if self._added is None:
                self._added = self._measured[builtins] = added_ns(kind, builtins)
            profiler = kind(builtins=builtins, subcalls=True)
            if MONITORING:
                profiler.until, profiler.late = self._until, self.overdue
            self._begun = self._changed = now()
            profiler.enable()
        except ValueError:
            return ANOTHER
        self.blocking.begin()
        self._loop = self._own_loop()
        frame: Any = own_frame(sys._getframe(1), self._own)
        while frame is not None:
            self._places.append((frame.f_code, frame.f_lineno))
            frame = own_frame(frame.f_back, self._own)
        self._profiler = profiler
        return ""

    def make_way(self) -> None:
        """A profile function is about to be set by the script: ours ends before."""
        if not MONITORING and sys.getprofile() is self._profiler:
            self.drop()

    def drop(self) -> None:
        """End, and forget what was measured. Safe to call twice."""
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            self.blocking.end()
            if MONITORING or sys.getprofile() is profiler:
                profiler.disable()

    def overdue(self) -> None:
        """Something was heard: end where the step takes much longer than usual; its functions stay unknown."""
        if self._profiler is not None and 0 < self._until <= now() and get_ident() == self._thread:
            self.drop()

    def leave_out(self, ns: int) -> None:
        """Time of a look at something within the step."""
        self._left_out += ns

    def mark(self, phase: str) -> None:
        """A phase ends: functions that have ended since the last mark belong to it."""
        if self._profiler is None:
            return
        t = now()
        self._lengths[phase] = self._lengths.get(phase, 0) + t - self._changed
        self._changed = t
        if self._marks >= MOST_PHASES:
            return
        self._marks += 1
        for entry in self._profiler.getstats():
            code = entry.code
            if not self._own(code):
                continue
            grown = entry.totaltime - self._spent.get(id(code), 0.0)
            if grown > 0:
                self._spent[id(code)] = entry.totaltime
                phases = self._phases.setdefault(id(code), {})
                phases[phase] = phases.get(phase, 0.0) + grown
        self._changed = now()
        self._left_out += self._changed - t

    def end(
        self, roots: dict[Any, str] | None = None, lengths: dict[str, int] | None = None, inside: str = ""
    ) -> dict[str, Any]:
        """End, and return the fields of the record's functions event but its step; wall_ns is 0 if unknown.

        functions: [file, line, name, calls, ns, own ns, caller, phase]. Here, ns includes everything that the function
        calls, and own ns leaves out torch and other functions of the user's own code. The phase is that of most of its
        time, or "" if it is unknown. waits: [file, line, name, method, calls, ns] of what waits for the device or
        collects garbage. The method is a name, or "float", "int", "bool" and "format" of a tensor. The line is that of
        the call, or of its function. phases: nanoseconds by phase. What the profiler adds to the calls is subtracted.
        calls: see `Called.rows`.

        Without marks, roots: code objects and the phase of what they call; what none of them calls is "other".
        lengths: nanoseconds by phase. inside: "evaluate" or "checkpoint" for (a part of) one of these, "" for a step.
        """
        self.blocking.end()
        profiler, self._profiler = self._profiler, None
        nothing: dict[str, Any] = {"wall_ns": 0, "functions": [], "waits": [], "phases": {}, "calls": []}
        places, self._places = self._places, []
        if profiler is None:
            return nothing
        step_ns = now() - self._begun - self._left_out
        if not MONITORING and sys.getprofile() is not profiler:
            # The step has begun a profiler of its own, which ours must not end: not even by being deleted.
            self._replaced = profiler
            return nothing
        profiler.disable()
        added, stats = self._added or 0.0, profiler.getstats()
        lengths = dict(self._lengths if lengths is None else lengths)
        entries = [entry for entry in stats if self._own(entry.code)]
        own = {entry.code for entry in entries}
        functions, waits = [], []
        callers, calls_from = _calls_from(entries), _calls_from(stats) if roots is not None else {}

        roots = None if roots is None else {key(code): phase for code, phase in roots.items()}

        def phase_of(code: Any) -> str:
            if roots is not None:
                return _phase(code, roots, calls_from)
            phases = self._phases.get(id(code), {"": 0.0})
            return max(phases, key=phases.__getitem__)

        called = Called(stats, self._own, self._is_ours, roots or {}, phase_of, bool(inside))
        for entry in entries:
            code, inner, calls = entry.code, 0.0, 0
            caller = name_of(callers[code][1]) if code in callers else ""
            inline = code.co_name in INLINE and caller
            at = [code.co_filename, code.co_firstlineno, caller if inline else name_of(code)]
            for call in entry.calls or ():
                if call.code is not code:
                    whole = call.code in own or self._of_torch(call.code)
                    inner += call.totaltime if whole else called.shares.apart_of(call)
                calls += call.callcount
                if method := self._waiting(call.code):
                    waits.append([*at, method, call.callcount, round(call.totaltime * 1e9)])
            own_ns = max((entry.totaltime - inner) * 1e9 - calls * added, 0.0)
            phase = phase_of(code)
            if phase in lengths:
                lengths[phase] = max(lengths[phase] - round(calls * added), 1)
            functions.append([
                *at, entry.callcount, round(entry.totaltime * 1e9), round(own_ns), "" if inline else caller, phase,
            ])  # fmt: skip
        for (code, line, name), (count, ns) in self.blocking.spent.items():
            if self._own(code):
                waits.append([code.co_filename, line, name_of(code), name, count, ns])
        if self._loop is not None:
            at = [self._loop.co_filename, self._loop.co_firstlineno, name_of(self._loop)]
            waits += [[*at, *wait] for wait in self._waits_of_loop(stats)]
        is_loop, self.blocking.spent, self._loop = self._loop is not None, {}, None
        functions.sort(key=lambda item: -item[5])
        waits.sort(key=lambda item: -item[5])
        step_ns -= round(added * sum(entry.callcount for entry in stats))
        return {
            "wall_ns": max(step_ns, 1), "functions": functions[:MOST_FUNCTIONS], "waits": waits[:MOST_FUNCTIONS],
            "phases": lengths, "calls": called.rows(step_ns * 1e-9, places, is_loop),
        }  # fmt: skip

    def _waiting(self, code: Any) -> str:
        """What waits for the device or collects garbage, if this function does; "" otherwise."""
        waits = kind_of(key_of_code(code)) in (DEVICE, COLLECTS)
        return text_of(code).rpartition(".")[2] if waits else ""

    def _waits_of_loop(self, stats: Any) -> list[list[Any]]:
        """[name, calls, ns] of waits that no function has called which began within the step: the loop has."""
        known: dict[Any, list[float]] = {}
        for entry in stats:
            for call in entry.calls or ():
                one = known.setdefault(call.code, [0, 0.0])
                one[0] += call.callcount
                one[1] += call.totaltime
        found = []
        for entry in stats:
            if name := self._waiting(entry.code):
                count, seconds = known.get(entry.code, (0, 0.0))
                if entry.callcount > count:
                    found.append([name, entry.callcount - count, round((entry.totaltime - seconds) * 1e9)])
        return found

    def _own_loop(self) -> Any:
        """Code of the function that trains, if it is the user's own: it was called before the step."""
        frame: Any = sys._getframe(1)
        while frame is not None and (
            frame.f_code.co_filename.startswith(OURS) or in_torch(frame.f_code.co_filename)
        ):
            frame = frame.f_back
        return frame.f_code if frame is not None and self._own(frame.f_code) else None

    def _of_torch(self, code: Any) -> bool:
        """Whether a function belongs to torch or to the program; that of a built-in is its description."""
        if isinstance(code, str):
            return "torch" in code
        return in_torch(code.co_filename) or self._is_ours(code)

    def _is_ours(self, code: Any) -> bool:
        """Whether a function belongs to the program."""
        return not isinstance(code, str) and code.co_filename.startswith(self._ours)


def _calls_from(stats: Any) -> dict[Any, tuple[float, Any]]:
    """Function -> seconds of its calls from the one that calls it for most of its time, and which one that is.

    Not where most of its time is called by what has begun before, such as the loop: `next` has many callers.
    """
    found: dict[Any, tuple[float, Any]] = {}
    left = {entry.code: entry.totaltime for entry in stats}
    for entry in stats:
        for call in entry.calls or ():
            if call.code is not entry.code:
                left[call.code] = left.get(call.code, 0.0) - call.totaltime
                if call.totaltime > found.get(call.code, (-1.0, None))[0]:
                    found[call.code] = call.totaltime, entry.code
    return {code: caller for code, caller in found.items() if left[code] <= caller[0]}


def _phase(code: Any, roots: dict[Any, str], calls_from: dict[Any, tuple[float, Any]]) -> str:
    """The phase of the outermost of the roots that calls a function, directly or not."""
    seen, phase = set(), NAMES[OTHER]
    while code is not None and code not in seen:
        phase = roots.get(key(code), phase)
        seen.add(code)
        code = calls_from.get(code, (0.0, None))[1]
    return phase


# Closer looks may take so much processor time at once, and ALLOWED_NS in the time from one profiled step to the next.
FREE_NS, ALLOWED_NS = 10**8, 6 * 10**8


class Allowance:
    """What all closer looks at a training may cost together. every_ns: from one profiled step to the next."""

    def __init__(self, every_ns: int) -> None:
        self._share = ALLOWED_NS / max(every_ns, 1)
        self._began = self._spent = 0

    def add(self, ns: int) -> None:
        """A look has taken this time."""
        self._spent += max(ns, 0)

    def due(self, t: int) -> int:
        """When the next look is within the allowance, on the clock: not before `t`, which is now."""
        self._began = self._began or t
        return max(t, self._began + round((self._spent - FREE_NS) / self._share))


# An evaluation of unknown length is profiled from this time on, and an evaluation for no longer than this.
LATE_NS, MOST_NS = 2 * 10**9, 10 * 10**9
# From one profile to the next: so many times its length.
RARELY = 100
# A profile of less than this part of an evaluation is taken again with the next one.
SHORT = 4


class Asides:
    """begin: begins a profile; whether that is possible. end: ends it; returns its figures. put: records them."""

    def __init__(
        self,
        begin: Callable[[], bool],
        end: Callable[[str], dict[str, Any]],
        put: Callable[[dict[str, Any]], None],
    ) -> None:
        self._begin, self._end, self._put = begin, end, put
        # The phase that continues, when it and its profile began; 0 for none.
        self._open: int | None = None
        self._since = self._profiled = 0
        # Nanoseconds of the last one, and when the next one is profiled, by phase.
        self._lengths: dict[int, int] = {}
        self._due: dict[int, int] = {EVALUATE: 0, CHECKPOINT: 0}
        self._found: dict[str, Any] = {}
        # Looks at what an evaluation keeps; None where nobody looks.
        self.collecting: Collecting | None = None

    def begins(self, phase: int) -> None:
        """An evaluation or a checkpoint begins."""
        if self._open is None:
            self._open, self._since = phase, now()
            if self.collecting is not None:
                self.collecting.begins()
            self.goes_on()

    def goes_on(self) -> None:
        """It makes progress: a time to begin or to end."""
        phase, t = self._open, now()
        if phase is None:
            return
        if self._profiled:
            self.overdue()
            return
        if phase == EVALUATE and self.collecting is not None:
            self.collecting.goes_on(t)
            if t < self.collecting.until:
                return
        known = self._lengths.get(phase)
        after = LATE_NS if known is None else known - MOST_NS
        if t > self._due[phase] and t - self._since >= after and self._begin():
            self._profiled = now()

    def overdue(self) -> None:
        """Something was heard: end a profile that is long enough."""
        if self._profiled and self._open is not None and now() - self._profiled > MOST_NS:
            self._take(self._open)

    def ends(self, phase: int) -> None:
        """It ends."""
        if phase == self._open:
            if self._profiled:
                self._take(phase)
            self._lengths[phase] = now() - self._since
            self._open = None
            if self.collecting is not None:
                self.collecting.ends()

    def settle(self, are_steps: bool) -> None:
        """Record the profile, unless what looked like evaluations turned out to be parts of steps."""
        found, self._found = self._found, {}
        if found and not (are_steps and found["inside"] == NAMES[EVALUATE]):
            self._put(found)

    def finish(self) -> None:
        """The process ends."""
        if self._open is not None:
            self.ends(self._open)
        self.settle(False)

    def _take(self, phase: int) -> None:
        begun, self._profiled = self._profiled, 0
        found = {**self._end(NAMES[phase]), "inside": NAMES[phase]}
        t = now()
        if SHORT * (t - begun) > t - self._since:  # else it began too late to tell
            self._due[phase] = t + RARELY * (t - begun)
        if found["functions"] or found["calls"]:
            self._found = found
