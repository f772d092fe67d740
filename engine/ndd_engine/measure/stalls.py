"""Watches whether processes that train make progress, and names what they wait for where they do not.

Progress is a step or another phase. Processor time and transferred bytes of a process or its children are progress of
another kind: a compilation or an evaluation is told later, and as what it is.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from ndd_engine.hardware.process_state import (
    TICK_NS,
    ProcessState,
    children_of,
    command_of,
    moved_bytes,
    own_memory,
    state_of,
    threads_cpu_s,
    waiting_of,
)
from ndd_engine.record.process_events import OVER, DeathEvent, StallEvent

from .spy import Frame, UnreadableError, find, of_process, threads
from .stall_causes import Standing, explained

# Without progress and processor time for so long, processes are said to stand still; again when it has doubled.
STALLED_S = float(os.environ.get("NDD_WATCH_STALLED_S", "8"))
# Processes that compute are told after so many times as long.
TIMES_COMPUTING = 4.0
# Fewer cores and bytes per second are no progress.
BUSY_CORES, BUSY_BYTES_S = 0.03, 100e3
# From one look at processor times to the next, and the part of STALLED_S over which they are judged.
ACTIVITY_S, JUDGED = 1.0, 0.6
# If the watch itself could not run for so long, such as after Ctrl-Z, the processes most likely could not either.
PAUSED_S = 3.0
# Processes that train, and children of each, whose stacks are read; and seconds for each.
MOST_MAINS, MOST_CHILDREN, SPY_S = 8, 3, 5.0
LOADER_WORKER = "pt_data_worker"
# Helpers of Python and torch that no process waits for.
_HELPERS = ("resource_tracker", "forkserver import main", "compile_worker")


class Subject(Protocol):
    """A process that trains.

    progress: changes with every step and phase; begins with the time of the last change, in nanoseconds of
    time.perf_counter. () if the process does not tell.
    """

    @property
    def name(self) -> str: ...
    @property
    def pid(self) -> int: ...
    @property
    def thread(self) -> int: ...
    @property
    def phase(self) -> str: ...
    @property
    def progress(self) -> tuple[int, ...]: ...
    @property
    def steps(self) -> int: ...


@dataclass(frozen=True)
class Untold:
    """A process that has not told its progress: before the first backward pass of a script, and after its training."""

    pid: int
    phase: str = "?"
    progress: tuple[int, ...] = ()
    steps: int = 0

    @property
    def name(self) -> str:
        return f"pid-{self.pid}"

    @property
    def thread(self) -> int:
        return self.pid


@dataclass
class _Watched:
    """since: of the last progress, on the monotonic clock. told: seconds after which it was told."""

    progress: tuple[int, ...]
    since: float
    told: float = 0.0


@dataclass
class _Activity:
    """Processor time and bytes of the processes so far, by id, and the latest differences."""

    last: dict[int, tuple[float, int]] = field(default_factory=dict)
    at: float = 0.0
    steps: deque[tuple[float, float, float, int]] = field(default_factory=deque)


class Stalls:
    """roles: names the process of a Subject. Never raises.

    stack_of: the stack of a process that this one knows without py-spy. ignored: threads of this process that do not
    train.
    """

    def __init__(
        self,
        after_s: float = STALLED_S,
        stack_of: Callable[[Subject], Sequence[Frame] | None] = lambda _: None,
        ignored: Callable[[], frozenset[int]] = frozenset,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._after_s, self._stack_of, self._ignored, self._clock = after_s, stack_of, ignored, clock
        self._watched: dict[str, _Watched] = {}
        self._activity = _Activity()
        self._spy = find()
        self._looked = clock()
        self._job: threading.Thread | None = None
        self._found: list[StallEvent] = []

    def look(
        self,
        subjects: Sequence[Subject],
        dead: Sequence[DeathEvent] = (),
        names: Mapping[int, str] | None = None,
    ) -> Iterator[StallEvent]:
        """What is to be told now. dead: children that have died. names: of children and ranks, by their process."""
        now = self._clock()
        paused_s, self._looked = now - self._looked, now
        quiet: list[Subject] = []
        for subject in subjects:
            watched = self._watched.setdefault(subject.name, _Watched(subject.progress, now))
            if subject.progress != watched.progress:
                if watched.told:
                    text = f"training continues after step {subject.steps:,}"
                    yield StallEvent(subject.steps, now - watched.since, OVER, text)
                watched.progress, watched.since, watched.told = subject.progress, now, 0.0
            elif paused_s > PAUSED_S:
                watched.since = min(watched.since + paused_s, now)
            if now - watched.since >= min(ACTIVITY_S, self._after_s / 2):
                quiet.append(subject)
        for name in self._watched.keys() - {subject.name for subject in subjects}:
            del self._watched[name]
        if self._found:
            yield self._found.pop()
        if not quiet:
            self._activity = _Activity()
            return
        self._measure(quiet, now)
        busy = self._busy(now)
        if busy:
            for subject in quiet:
                if not subject.progress:
                    self._watched[subject.name].since = now
        self._judge(quiet, now, busy, dead, names or {})

    def _judge(
        self,
        quiet: Sequence[Subject],
        now: float,
        busy: bool | None,
        dead: Sequence[DeathEvent],
        names: Mapping[int, str],
    ) -> None:
        if busy is None or (self._job is not None and self._job.is_alive()):
            return
        after_s = self._after_s * (TIMES_COMPUTING if busy else 1.0)
        silent = {subject.name: now - self._watched[subject.name].since for subject in quiet}
        due = [one for one in quiet if silent[one.name] >= max(after_s, 2 * self._watched[one.name].told)]
        if not due:
            return
        stuck = [one for one in quiet if silent[one.name] >= after_s / 2][:MOST_MAINS]
        for one in stuck:
            self._watched[one.name].told = silent[one.name]
        arguments = (stuck, silent[due[0].name], busy, tuple(dead), dict(names))
        self._job = threading.Thread(target=self._name, args=arguments, name="ndd-spy", daemon=True)
        with suppress(RuntimeError):  # too many threads
            self._job.start()

    # Processor time.

    def _measure(self, subjects: Sequence[Subject], now: float) -> None:
        activity = self._activity
        if activity.last and now - activity.at < min(ACTIVITY_S, self._after_s / 4):
            return
        spent: dict[int, tuple[float, int]] = {}
        for subject in subjects:
            without = self._ignored() if subject.pid == os.getpid() else frozenset()
            spent[subject.pid] = threads_cpu_s(subject.pid, without), moved_bytes(subject.pid)
            for child in children_of(subject.pid):
                if (state := state_of(child)) is not None:
                    spent[child] = state.cpu_s, moved_bytes(child)
        if activity.last:
            changes = [(spent[pid], activity.last.get(pid, (0.0, 0))) for pid in spent]
            cpu_s = sum(max(new[0] - old[0], 0.0) for new, old in changes)
            moved = sum(max(new[1] - old[1], 0) for new, old in changes)
            activity.steps.append((now, now - activity.at, cpu_s, moved))
            while activity.steps[0][0] < now - JUDGED * self._after_s:
                activity.steps.popleft()
        activity.last, activity.at = spent, now

    def _busy(self, now: float) -> bool | None:
        """Whether the processes compute or transfer data; None if they have not been looked at for long enough."""
        steps = self._activity.steps
        seconds = sum(step[1] for step in steps)
        if seconds < JUDGED * self._after_s / 2:
            return None
        cores = sum(step[2] for step in steps) / seconds
        return cores >= BUSY_CORES or sum(step[3] for step in steps) / seconds >= BUSY_BYTES_S

    # Naming, in a thread.

    def _name(
        self,
        stuck: Sequence[Subject],
        silent_s: float,
        busy: bool,
        dead: Sequence[DeathEvent],
        names: Mapping[int, str],
    ) -> None:
        with suppress(Exception):  # processes may end at any moment
            mains, children = [], []
            for subject in stuck:
                if (state := state_of(subject.pid)) is None or state.letter in "ZX":
                    continue
                role = names.get(subject.pid, "the main process")
                mains.append(self._standing(state, subject.thread, role, self._stack_of(subject)))
                if subject is stuck[0]:
                    children = self._children(subject, state, names)
            if not mains:
                return
            since = self._watched[stuck[0].name].since
            found = explained(mains, children, dead, stuck[0].steps, silent_s, stuck[0].phase, busy)
            specific = found.kind not in ("waits", "computing", "input", "sleep")
            # What has not begun to train may wait for anything.
            told = specific if not stuck[0].progress else True
            if told and self._watched[stuck[0].name].since == since:
                self._found.append(found)

    def _children(self, subject: Subject, parent: ProcessState, names: Mapping[int, str]) -> list[Standing]:
        states = [state for pid in children_of(subject.pid) if (state := state_of(pid)) is not None]
        alive = [one for one in states if one.letter not in "ZX"]
        alive = [one for one in alive if not _helps(one)]
        alive.sort(key=lambda one: (one.name != LOADER_WORKER, one.began))
        found = []
        for state in alive[:MOST_CHILDREN]:
            fresh = bool(subject.progress) and state.began_ns >= subject.progress[0] - TICK_NS
            forked = state.parent == parent.pid and command_of(state.pid) == command_of(parent.pid)
            role = names.get(state.pid, "child process")
            found.append(self._standing(state, state.pid, role, None, forked, parent.threads, fresh))
        return found

    def _standing(
        self,
        state: ProcessState,
        thread: int,
        role: str,
        stack: Sequence[Frame] | None,
        forked: bool = False,
        crowd: int = 1,
        fresh: bool = False,
    ) -> Standing:
        others: list[Sequence[Frame]] = []
        holds = False
        if stack is None and self._spy is not None and state.letter not in "Tt":
            with suppress(UnreadableError, LookupError, TypeError, AttributeError, ValueError):
                told = threads(self._spy, state.pid, SPY_S)
                one = next((one for one in told if one.get("os_thread_id") == thread), told[0])
                stack, holds = of_process(one["frames"]), bool(one.get("owns_gil"))
                others = [list(each["frames"]) for each in told if each is not one]
        waiting = waiting_of(state.pid, thread)
        private = (own_memory(state.pid) or (None,))[0]
        return Standing(state, role, waiting, stack, others, forked, crowd, fresh, holds, private)


def _helps(state: ProcessState) -> bool:
    """Whether a process is a helper; what the fork server starts has the same command as it."""
    command = command_of(state.pid)
    helper = any(word in " ".join(command) for word in _HELPERS)
    return helper and state.name != LOADER_WORKER and command_of(state.parent) != command
