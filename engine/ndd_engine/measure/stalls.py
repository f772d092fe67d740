"""Processes that make no progress: their stacks, what they wait for, and what to change.

Progress is a step or another phase. Processor time and transferred bytes of a process or its children are progress of
another kind: a compilation or an evaluation is told later, and as what it is. Stacks are read from outside with
py-spy, which neither stops nor changes the process.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, Protocol

from ndd_engine.hardware.process_state import (
    TICK_NS,
    ProcessState,
    Waiting,
    children_of,
    command_of,
    moved_bytes,
    own_memory,
    state_of,
    threads_cpu_s,
    waiting_of,
)
from ndd_engine.record.event import OVER, DeathEvent, StallEvent
from ndd_engine.text import duration, printable, size

# py-spy reads the symbols of the interpreter first.
LIMIT_S = 30.0
# Files of a Python and of installed packages, whichever Python runs the script.
_FOREIGN = re.compile(
    r"^<|/lib(64)?/python\d|/(site|dist)-packages/|/_?ndd_(watch|engine(?!/workloads)|console)/|/bin/[^/.]+$"
)
# A frame as py-spy describes it: filename, line, name.
Frame = dict[str, Any]


class UnreadableError(Exception):
    """Why a process cannot be read, in words."""


def find() -> str | None:
    """The path of py-spy: in the environment of this program, or else on PATH."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")


def threads(spy: str, pid: int, limit_s: float = LIMIT_S) -> list[dict[str, Any]]:
    """The threads of a process, as `py-spy dump --json` describes them. spy: its path. Raises UnreadableError."""
    try:
        done = subprocess.run(
            [spy, "dump", "--nonblocking", "--json", "--pid", str(pid)],
            stdin=subprocess.DEVNULL, capture_output=True, timeout=limit_s, check=False,
        )  # fmt: skip
        if not done.returncode:
            return list(json.loads(done.stdout))
    except (OSError, subprocess.SubprocessError, ValueError, TypeError) as error:
        raise UnreadableError(type(error).__name__) from error
    last = (done.stderr.decode(errors="replace").strip().splitlines() or [""])[-1]
    raise UnreadableError(printable(last)[:200])


def of_thread(identity: int) -> list[Frame]:
    """The stack of a thread of this process, the innermost frame first."""
    frame, found = sys._current_frames().get(identity), []
    while frame is not None:
        code = frame.f_code
        found.append({"filename": code.co_filename, "line": frame.f_lineno, "name": code.co_name})
        frame = frame.f_back
    return found


def of_process(stack: Sequence[Frame]) -> list[Frame]:
    """The frames of a process itself: a forked one has those of its parent below."""
    begins = [
        place
        for place, frame in enumerate(stack)
        if str(frame["name"]).endswith("_bootstrap") and "multiprocessing/" in str(frame["filename"])
    ]
    return list(stack[: begins[0]] if begins else stack)


def is_users(frame: Frame) -> bool:
    """Whether a frame is of the user's own code."""
    return not _FOREIGN.search(str(frame["filename"]))


def place_of(stack: Sequence[Frame] | None) -> tuple[str, int, str] | None:
    """File, line and function of the script's own code in a stack, or else of any."""
    if not stack:
        return None
    found = next((frame for frame in stack if is_users(frame)), stack[0])
    return str(found["filename"]), int(found["line"]), str(found["name"])


SPAWN = "use multiprocessing_context='forkserver' or 'spawn'"
# Kind of a stall -> what to change.
ADVICE = {
    "threads": (
        f"it was forked after threads were started, which do not exist in it: {SPAWN}, or torch.set_num_threads(1) in "
        "worker_init_fn"
    ),
    "lock": (
        f"a lock that another thread holds during a fork stays locked in the child: {SPAWN}, or start workers before "
        "other threads"
    ),
    "queue": "read the queue until it is empty before join(): a process ends only after its items were read",
    "dead": "check exitcode or is_alive() of the process while waiting, with a timeout: nobody answers in its place",
    "collective": "every rank has to call the same collectives in the same order: look at what decides about it there",
    "storage": "check the disk or mount; DataLoader(timeout=60) ends such a wait of a worker with an error",
    "fifo": "this file is a FIFO to which no process writes; DataLoader(timeout=60) ends such a wait with an error",
    "shared": "look at which process holds it: one that dies or exits early never releases it",
    "thread": (
        "see in the output whether the thread that fills the queue has ended with an error; have it put its exceptions "
        "into the queue as well, and get() with a timeout"
    ),
    "waits": "look at what this line waits for, and wait with a timeout",
}  # fmt: skip
STOPPED = "is stopped by a signal or a debugger"
# Files of a library in which a thread waits for a lock, wherever that was asked for.
_OF_SYSTEM = re.compile(r"^(lib(c|pthread|python[\d.]*)[.-]|ld-|python[\d.]*$|\[vdso\])")
_THREAD_POOLS = re.compile(r"^lib(gomp|iomp|omp|mkl|openblas|tbb)")
# Parts of file names, from the innermost frame that is not the user's, and what the thread then waits for.
_WAITS_FOR = (
    ("input", ("/pdb.py", "/bdb.py", "/code.py", "/IPython/", "/debugpy/")),
    ("loader", ("torch/utils/data/dataloader.py",)),
    ("collective", ("torch/distributed/", "torch/nn/parallel/distributed.py", "/ndd_watch/waits.py")),
    ("join", ("multiprocessing/process.py", "multiprocessing/popen_", "/subprocess.py")),
    ("result", ("multiprocessing/", "concurrent/futures/")),
)
# Functions of the kernel that wait for a file system, and for the other end of a FIFO.
_OF_STORAGE = re.compile(
    r"nfs|rpc_|fuse|request_wait|folio|io_schedule|wait_on_page|jbd2|xfs|ext4|ceph|lustre|wait_for_partner|fifo_open"
)
_TERMINAL = re.compile(r"^/dev/(pts/|tty|console)")


@dataclass(frozen=True)
class Standing:
    """A process that may stand still. role: "the main process", "rank 1", "loader worker 1" or "child process".

    stack: of the thread that matters, the innermost frame first; None if it is not known. others: those of its other
    threads. forked: made by a fork, without another program. crowd: threads of its parent. fresh: no step has ended
    since it began. holds_lock: Python's interpreter lock. private_bytes: memory of its own, None if it is not known.
    """

    state: ProcessState
    role: str
    waiting: Waiting
    stack: Sequence[Frame] | None = None
    others: Sequence[Sequence[Frame]] = ()
    forked: bool = False
    crowd: int = 1
    fresh: bool = False
    holds_lock: bool = False
    private_bytes: int | None = None

    @property
    def name(self) -> str:
        """ "loader worker 1 (pid 4711)"."""
        return f"{self.role} (pid {self.state.pid})"

    @property
    def placed(self) -> str:
        """ "the main process (pid 4710, train.py:24)"; the place comes early, before what a screen may cut."""
        return f"{self.role} (pid {self.state.pid}{f', {self.where}' if self.where else ''})"

    @property
    def where(self) -> str:
        """ "train.py:11 in load", or ""."""
        place = place_of(self.stack)
        if place is None or not any(map(is_users, self.stack or ())):
            return ""
        function = "" if place[2] == "<module>" else f" in {place[2]}"
        return printable(f"{PurePath(place[0]).name}:{place[1]}{function}")

    def calls(self, *parts: str, name: str = "") -> bool:
        """Whether its stack has a function of this name in a file whose path has one of the parts."""
        return any(
            any(part in str(frame["filename"]) for part in parts)
            and name in ("", str(frame["name"]).split(".")[-1])
            for frame in self.stack or ()
        )


@dataclass(frozen=True)
class Why:
    """kind: see StallEvent. words: "sleeps in …", without the process. advice: the key of ADVICE."""

    kind: str
    words: str
    advice: str = ""


def why(one: Standing) -> Why:
    """What a process by itself waits for."""
    waiting, call = one.waiting, one.waiting.call
    if one.state.letter in "Tt":
        return Why("stopped", STOPPED)
    asleep = f"sleeps in {waiting.kernel or call or 'the kernel'}"
    if one.holds_lock:
        inside = str(one.stack[0]["name"]) if one.stack and not is_users(one.stack[0]) else ""
        return Why("waits", f"holds Python's interpreter lock{f' in {printable(inside)}' if inside else ''}")
    if _puts(one):
        return Why("queue", "waits until somebody reads the multiprocessing queue that it writes to", "queue")
    if call == "sleep":
        return Why("sleep", "sleeps in time.sleep")
    if _TERMINAL.match(waiting.target) and call in ("read", "poll"):
        return Why("input", "waits for input")
    if waiting.target.startswith("/") or one.state.letter == "D" or _OF_STORAGE.search(waiting.kernel):
        target = f" of {printable(waiting.target)}" if waiting.target else ""
        return Why(
            "storage", f"waits in {call or waiting.kernel}{target}", "fifo" if _is_fifo(one) else "storage"
        )
    if call == "futex" or "futex" in waiting.kernel:
        return _lock(one, asleep)
    if waiting.target.startswith("socket:"):
        return Why("waits", f"waits for data of a network connection (in {call})")
    if call in ("read", "poll", "select") or "poll" in waiting.kernel:
        return Why("waits", f"waits for a message of another process or thread (in {waiting.kernel or call})")
    return Why("waits", asleep)


def _lock(one: Standing, asleep: str) -> Why:
    library = one.waiting.library
    if library and not _OF_SYSTEM.match(library):
        asleep = f"{asleep} of {printable(library)}"
        if one.forked and (_THREAD_POOLS.match(library) or one.crowd > 1):
            return Why("threads", asleep, "threads")
        return Why("waits", asleep)
    if one.calls("/queue.py", name="get"):
        return Why("waits", "waits for what another thread puts into a queue", "thread")
    if one.calls("/threading.py", name="wait") or one.calls("/threading.py", name="join"):
        return Why("waits", "waits for another thread")
    if one.waiting.shared:
        return Why("lock", "waits for a lock that is shared between processes", "shared")
    if one.forked and one.stack:
        return Why("lock", "waits for a lock that was held when it was forked", "lock")
    return Why("waits", asleep)


def _puts(one: Standing) -> bool:
    """Whether it waits until a queue of multiprocessing has room: itself, or its thread that writes what it has put."""
    if one.calls("multiprocessing/queues.py", name="put"):
        return one.waiting.call in ("futex", "write", "")
    feeds = [stack for stack in one.others if any(str(frame["name"]).endswith("_feed") for frame in stack)]
    ends = one.calls("multiprocessing/queues.py", name="_finalize_join")
    writes = one.waiting.call == "write" and one.waiting.target.startswith("pipe:")
    return writes or (ends and bool(feeds))


def _is_fifo(one: Standing) -> bool:
    if "wait_for_partner" in one.waiting.kernel or "fifo" in one.waiting.kernel:
        return True
    try:
        return stat.S_ISFIFO((Path(f"/proc/{one.state.pid}/cwd") / one.waiting.target).stat().st_mode)
    except OSError:
        return False


def waits_for(one: Standing, children: Sequence[Standing]) -> str:
    """What the main process waits for: "loader", "join", "result", "collective", "input", or "" for none of them."""
    if one.stack:
        library = []
        for frame in one.stack:
            if is_users(frame):
                break
            library.append(str(frame["filename"]))
        for kind, parts in _WAITS_FOR:
            if any(part in file for part in parts for file in library):
                return kind
        return ""
    if one.waiting.call == "wait" and children:
        return "join"
    if one.waiting.call in ("poll", "select", "read") and children:
        return "loader" if any(child.role.startswith("loader") for child in children) else "result"
    return ""


def explained(
    mains: Sequence[Standing],
    children: Sequence[Standing],
    dead: Sequence[DeathEvent],
    step: int,
    seconds: float,
    phase: str,
    busy: bool = False,
) -> StallEvent:
    """Which process waits for what.

    mains: the processes that train and stand still, which are several ranks or one. children: of the first of them.
    dead: its children that have died. phase: "?" if it is not known. busy: the processes compute.
    """
    main = mains[0]
    inside = "" if phase == "?" else f" in {printable(phase)}"
    head = f"no progress for {duration(seconds)}{inside}: "
    each = [_line(one) for one in (*mains, *children)]
    if busy:
        runs = next((one for one in (*mains, *children) if one.state.letter == "R"), main)
        text = f"no step for {duration(seconds)}{inside}: {runs.placed} computes"
        return StallEvent(step, seconds, "computing", text, "", runs.where, each)
    target = waits_for(main, children)
    if len(mains) > 1 and (behind := _behind(mains)) is not None:
        inside_one = next(one for one in mains if waits_for(one, ()) == "collective")
        reason = why(behind)
        text = (
            f"{head}{inside_one.placed} waits in a collective that {behind.placed} does not enter: "
            f"it {reason.words}"
        )
        return StallEvent(
            step, seconds, "collective", text, ADVICE[reason.advice or "collective"], behind.where, each
        )
    if target == "input":
        text = f"{head}{main.placed} waits for input"
        return StallEvent(step, seconds, "input", text, "", main.where, each)
    if target in ("loader", "join", "result"):
        found = _culprit(children)
        if found is not None and why(found).kind != "waits":
            return _for_child(main, found, head, step, seconds, each)
        if dead:
            last = dead[-1]
            how = f"was killed by {last.how}" if last.how.startswith("SIG") else f"has ended with {last.how}"
            text = f"{head}{main.placed} waits for {last.name} (pid {last.pid}), which {how}"
            return StallEvent(step, seconds, "dead", text, ADVICE["dead"], main.where, each)
        if found is not None:
            return _for_child(main, found, head, step, seconds, each)
    reason = why(main)
    # Whether others make progress is not known here.
    kind = "ranks" if target == "collective" and reason.kind == "waits" else reason.kind
    words = "waits in a collective for other ranks" if kind == "ranks" else reason.words
    advice = ADVICE.get(reason.advice or kind, "")
    return StallEvent(step, seconds, kind, f"{head}{main.placed} {words}", advice, main.where, each)


def _for_child(
    main: Standing, child: Standing, head: str, step: int, seconds: float, each: list[str]
) -> StallEvent:
    reason = why(child)
    since = ""
    if child.fresh:
        since = ", since its first batch" if child.role.startswith("loader") else ", since it began"
    text = f"{head}{main.placed} waits for {child.placed}, which {reason.words}{since}"
    advice = ADVICE.get(reason.advice or reason.kind, "")
    return StallEvent(step, seconds, reason.kind, text, advice, child.where or main.where, each)


def _culprit(children: Sequence[Standing]) -> Standing | None:
    """The child that its parent most likely waits for: not one that waits for work itself."""
    blocked = [one for one in children if not _idle(one)]
    return next((one for one in blocked if why(one).kind != "waits"), next(iter(blocked), None))


def _idle(one: Standing) -> bool:
    """Whether it waits for work."""
    if one.stack is None:
        return one.waiting.call in ("poll", "read", "select") and not one.waiting.target.startswith("/")
    return one.calls("multiprocessing/queues.py", name="get") or one.calls(
        "/forkserver.py", "/resource_tracker.py"
    )


def _behind(mains: Sequence[Standing]) -> Standing | None:
    """The rank that is in no collective while others are."""
    out = [one for one in mains if waits_for(one, ()) != "collective"]
    return out[0] if 0 < len(out) < len(mains) else None


def _line(one: Standing) -> str:
    """What a process does, in one line."""
    waiting = one.waiting
    does = " of ".join(part for part in (waiting.call or waiting.kernel, printable(waiting.target)) if part)
    stack = " < ".join(
        printable(f"{frame['name']} ({PurePath(str(frame['filename'])).name}:{frame['line']})")
        for frame in (one.stack or ())[:8]
    )
    memory = "" if one.private_bytes is None else f", {size(one.private_bytes)} of its own"
    return f"{one.name}, state {one.state.letter}{memory}, {does or 'running'}" + (
        f": {stack}" if stack else ""
    )


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
    """since: of the last progress, on the monotonic clock. reported_s: seconds after which it was reported."""

    progress: tuple[int, ...]
    since: float
    reported_s: float = 0.0


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
                if watched.reported_s:
                    text = f"training continues after step {subject.steps:,}"
                    yield StallEvent(subject.steps, now - watched.since, OVER, text)
                watched.progress, watched.since, watched.reported_s = subject.progress, now, 0.0
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
        due = [
            one for one in quiet if silent[one.name] >= max(after_s, 2 * self._watched[one.name].reported_s)
        ]
        if not due:
            return
        stuck = [one for one in quiet if silent[one.name] >= after_s / 2][:MOST_MAINS]
        for one in stuck:
            self._watched[one.name].reported_s = silent[one.name]
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
            # A script that has not begun to train may wait for anything.
            told = specific or stuck[0].phase != Untold.phase
            if told and self._watched[stuck[0].name].since == since:
                self._found.append(found)

    def _children(self, subject: Subject, parent: ProcessState, names: Mapping[int, str]) -> list[Standing]:
        states = [state for pid in children_of(subject.pid) if (state := state_of(pid)) is not None]
        alive = [one for one in states if one.letter not in "ZX" and not _helps(one)]
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
