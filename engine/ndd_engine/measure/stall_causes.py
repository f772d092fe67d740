"""Why processes stand still, in words: which of them waits for what, and what to change."""

from __future__ import annotations

import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from ndd_engine.hardware.process_state import ProcessState, Waiting
from ndd_engine.record.process_events import DeathEvent, StallEvent
from ndd_engine.text import duration, printable, size

from .spy import Frame, own, place_of

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
    def waits_at(self) -> str:
        """ "the main process (pid 4710, train.py:24)"."""
        return f"{self.role} (pid {self.state.pid}{f', {self.where}' if self.where else ''})"

    @property
    def where(self) -> str:
        """ "train.py:11 in load", or ""."""
        place = place_of(self.stack)
        if place is None or not any(map(own, self.stack or ())):
            return ""
        function = "" if place[2] == "<module>" else f" in {place[2]}"
        return printable(f"{PurePath(place[0]).name}:{place[1]}{function}")

    @property
    def at(self) -> str:
        """ " at train.py:11 in load", or ""."""
        return f" at {self.where}" if self.where else ""

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
        inside = str(one.stack[0]["name"]) if one.stack and not own(one.stack[0]) else ""
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
            if own(frame):
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
        text = f"no step for {duration(seconds)}{inside}: {runs.name} computes{runs.at}"
        return StallEvent(step, seconds, "computing", text, "", runs.where, each)
    target = waits_for(main, children)
    if len(mains) > 1 and (behind := _behind(mains)) is not None:
        inside_one = next(one for one in mains if waits_for(one, ()) == "collective")
        reason = why(behind)
        text = (
            f"{head}{inside_one.name} waits in a collective{inside_one.at} that {behind.name} does not enter: "
            f"it {reason.words}{behind.at}"
        )
        return StallEvent(
            step, seconds, "collective", text, ADVICE[reason.advice or "collective"], behind.where, each
        )
    if target == "input":
        return StallEvent(
            step, seconds, "input", f"{head}{main.name} waits for input{main.at}", "", main.where, each
        )
    if target in ("loader", "join", "result"):
        found = _culprit(children)
        if found is not None and why(found).kind != "waits":
            return _for_child(main, found, head, step, seconds, each)
        if dead:
            last = dead[-1]
            how = f"was killed by {last.how}" if last.how.startswith("SIG") else f"has ended with {last.how}"
            text = f"{head}{main.waits_at} waits for {last.name} (pid {last.pid}), which {how}"
            return StallEvent(step, seconds, "dead", text, ADVICE["dead"], main.where, each)
        if found is not None:
            return _for_child(main, found, head, step, seconds, each)
    reason = why(main)
    # Whether others make progress is not known here.
    kind = "ranks" if target == "collective" and reason.kind == "waits" else reason.kind
    words = "waits in a collective for other ranks" if kind == "ranks" else reason.words
    advice = ADVICE.get(reason.advice or kind, "")
    return StallEvent(step, seconds, kind, f"{head}{main.name} {words}{main.at}", advice, main.where, each)


def _for_child(
    main: Standing, child: Standing, head: str, step: int, seconds: float, each: list[str]
) -> StallEvent:
    reason = why(child)
    since = ""
    if child.fresh:
        since = ", since its first batch" if child.role.startswith("loader") else ", since it began"
    text = f"{head}{main.waits_at} waits for {child.name}, which {reason.words}{child.at}{since}"
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
