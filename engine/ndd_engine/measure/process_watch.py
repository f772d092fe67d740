"""Watches the processes of a run from outside: progress, the ends of their children, and open descriptors.

Of children such as loader workers it knows how they end, and what they had last; of descriptors how many are open, and
of which kind the newest are.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import signal
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath

from ndd_engine.hardware.gpus import oom_kills
from ndd_engine.hardware.process_state import (
    ProcessState,
    children_of,
    command_of,
    free_shared_memory,
    newest_files,
    open_files,
    open_files_limit,
    state_of,
)
from ndd_engine.record.event import DeathEvent, DescriptorsEvent
from ndd_engine.record.events import Event
from ndd_engine.text import printable

from .stalls import LOADER_WORKER, MOST_MAINS, Frame, Stalls, Subject, Untold
from .worker_watch import WorkerWatch

# From one count to the next: at first, for so long, and later.
FILES_LOOK_S, FILES_FIRST_S, FILES_RARE_LOOK_S = 0.2, 30.0, 1.0
# A number is recorded when it has changed by so many, and by this part.
LEAST_CHANGE, LEAST_PART = 8, 0.02
# Descriptors whose kind is looked at, and the part of them that decides it.
NEWEST, MOST_ALIKE = 64, 0.5
_DIGITS = re.compile(r"\d+")


class Descriptors:
    """Of one process at a time. Never raises.

    where: of a kind, such as "file", the line of the script that keeps them.
    """

    def __init__(self, where: Callable[[str], str] = lambda _: "") -> None:
        self._where = where
        self._begun = time.monotonic()
        self._next = 0.0
        self._pid = 0
        self.reported: DescriptorsEvent | None = None

    def look(self, pid: int, step: int) -> DescriptorsEvent | None:
        """What is to be recorded now, if anything is."""
        now = time.monotonic()
        if pid != self._pid:
            self._pid, self.reported, self._next = pid, None, 0.0
        if now < self._next:
            return None
        self._next = now + (FILES_LOOK_S if now - self._begun < FILES_FIRST_S else FILES_RARE_LOOK_S)
        count = open_files(pid)
        if not count:
            return None
        limit = open_files_limit(pid)
        if self.reported is None:
            self.reported = DescriptorsEvent(step, count, limit)
            return self.reported
        if abs(count - self.reported.open) < max(LEAST_CHANGE, LEAST_PART * self.reported.open):
            return None
        before = self.reported
        kinds, path = before.kinds, before.path
        if count > before.open:  # those that are left after a fall, as at the end of a process, are others
            kinds, path = kinds_of(newest_files(pid, min(NEWEST, max(count - before.open, LEAST_CHANGE))))
        where = before.where or (self._where(max(kinds, key=kinds.__getitem__)) if kinds else "")
        self.reported = DescriptorsEvent(step, count, limit, kinds, path, where)
        return self.reported

    def full(self, step: int) -> DescriptorsEvent | None:
        """What is recorded at the end of a process that has reached the limit."""
        newest = self.reported
        if newest is None or newest.limit is None:
            return None
        return DescriptorsEvent(step, newest.limit, newest.limit, newest.kinds, newest.path, newest.where)


def kinds_of(files: Sequence[str]) -> tuple[dict[str, int], str]:
    """(kind -> number, what the paths have in common) of what descriptors refer to."""
    special = ("shared memory", "socket", "pipe", "anon_inode")
    kinds = Counter(file if file in special else "file" for file in files)
    paths = [file for file in files if file not in special]
    alike = Counter(_DIGITS.sub("N", file) for file in paths)
    path = ""
    if alike:
        common, times = alike.most_common(1)[0]
        if times >= MOST_ALIKE * len(paths):
            path = _common([file for file in paths if _DIGITS.sub("N", file) == common])
    return dict(kinds), printable("/".join(PurePath(path).parts[-2:]))


def _common(paths: Sequence[str]) -> str:
    """Paths that differ in digits only as one, with N for those."""
    numbers = zip(*(_DIGITS.findall(path) for path in paths), strict=True)
    told = iter([found[0] if len(set(found)) == 1 else "N" for found in numbers])
    return _DIGITS.sub(lambda _: next(told), paths[0])


_WAIT_S = 1.0
# From one search for children to the next: at first, for so long, and later.
LOOK_S, FIRST_S, RARE_LOOK_S = 0.15, 30.0, 1.0
# What torch says in the process whose loader worker has died: process ids, and a signal or a status.
DIED = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\)"
    r"(?: is killed by signal: ([\w ]+)| exited unexpectedly(?: with status (\d+))?)?"
)
# PIDFD_GET_INFO of linux/pidfd.h: its number, struct pidfd_info, and the bit of the mask for its last field.
_GET_INFO, _INFO, _EXIT = 0xC040FF0B, struct.Struct("=QQ11Ii"), 8
# Signals by which a parent ends its workers, and statuses of an end on request.
_ASKED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Gone:
    """times: process id -> Unix time at which it was gone; codes: its wait status, if it could be read.

    Linux only; elsewhere both stay empty. Never raises.
    """

    def __init__(self) -> None:
        self.times: dict[int, float] = {}
        self.codes: dict[int, int] = {}
        self._watched: dict[int, int] = {}
        self._epoll: select.epoll | None = None
        self._closed = False

    def watch(self, pid: int) -> None:
        """Notice the end of this process."""
        with contextlib.suppress(OSError, AttributeError, RuntimeError):
            handle = os.pidfd_open(pid)
            if self._epoll is None:
                self._epoll = select.epoll()
                threading.Thread(target=self._wait, name="ndd-gone", daemon=True).start()
            self._watched[handle] = pid
            self._epoll.register(handle, select.EPOLLIN)

    def close(self) -> None:
        """End the thread."""
        self._closed = True

    def _wait(self) -> None:
        epoll = self._epoll
        assert epoll is not None
        while not self._closed:
            with contextlib.suppress(OSError):
                for handle, _ in epoll.poll(_WAIT_S):
                    pid = self._watched.pop(handle)
                    if (code := _wait_status(handle, pid)) is not None:
                        self.codes[pid] = code
                    self.times[pid] = time.time()
                    epoll.unregister(handle)
                    os.close(handle)
        epoll.close()
        for handle in self._watched:
            os.close(handle)


def _wait_status(handle: int, pid: int) -> int | None:
    """The wait status of a process that has ended. handle: its descriptor."""
    state = state_of(pid)
    if state is not None and state.exit_code is not None:
        return state.exit_code  # its parent has not taken note of its end yet
    told = bytearray(_INFO.pack(_EXIT, *[0] * 13))
    with contextlib.suppress(OSError):  # before Linux 6.15
        fcntl.ioctl(handle, _GET_INFO, told)
        mask, *_, code = _INFO.unpack(told)
        return int(code) if mask & _EXIT else None
    return None


@dataclass
class _Child:
    """parent: process id. steps: of the parent before it was seen first. told: its end was judged."""

    parent: int
    name: str
    steps: int
    resident_bytes: int
    reported: bool = False


class Children:
    """names: of children that were seen, "loader worker 1". deaths: so far. Never raises."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        self.deaths: list[DeathEvent] = []
        self._gone = Gone()
        self._children: dict[int, _Child] = {}
        self._parents: set[int] = set()
        self._begun, self._next = time.monotonic(), 0.0
        self._kills = oom_kills()

    def close(self) -> None:
        """Watch no more."""
        self._gone.close()

    def look(self, parents: Sequence[Subject]) -> Iterator[DeathEvent]:
        """Look for new children of these processes, and for those that have died."""
        if (now := time.monotonic()) >= self._next:
            self._next = now + (LOOK_S if now - self._begun < FIRST_S else RARE_LOOK_S)
            for parent in parents:
                self._search(parent)
        for pid, child in list(self._children.items()):
            if pid in self._gone.times and not child.reported:
                child.reported = True
                if (how := self._unclean(pid, child)) is not None:
                    steps = next((one.steps for one in parents if one.pid == child.parent), child.steps)
                    yield self._death(pid, child, how, steps)

    def told_by(self, error: str, steps: int) -> tuple[DeathEvent, bool] | None:
        """(the death that the text of an error is about, whether it is a new one); None for any other error."""
        found = DIED.search(error)
        if found is None:
            return None
        pid = int(found[1].replace(",", " ").split()[0])
        known = next((one for one in self.deaths if one.pid == pid), None)
        if known is not None:
            return known, False
        how = f"status {found[3]}" if found[3] else ""
        if found[2]:
            named = (one.name for one in signal.Signals if signal.strsignal(one) == found[2].strip())
            how = next(named, found[2].strip())
        how = how or how_of(self._gone.codes.get(pid, 0)) or ""
        child = self._children.setdefault(pid, _Child(0, "loader worker", steps, 0))
        child.reported = True
        return self._death(pid, child, how, steps), True

    def _search(self, parent: Subject) -> None:
        if parent.pid not in self._parents:
            self._parents.add(parent.pid)
            self._gone.watch(parent.pid)
        own = command_of(parent.pid)
        workers = 0
        for pid in children_of(parent.pid):
            state = state_of(pid)
            if state is None:
                continue
            if state.letter in "ZX":
                self._ended_before(parent, own, state)
                continue
            works = state.name == LOADER_WORKER
            workers += works
            known = self._children.get(pid)
            if known is not None:
                known.resident_bytes = state.resident_bytes
                if works and not known.name.startswith("loader"):  # it has just begun to work
                    known.name = self.names[pid] = f"loader worker {workers}"
                continue
            command = command_of(pid)
            if works or command == own or "multiprocessing" in " ".join(command):
                name = f"loader worker {workers}" if works else "child process"
                self._children[pid] = _Child(parent.pid, name, parent.steps, state.resident_bytes)
                self.names[pid] = name
                self._gone.watch(pid)

    def _ended_before(self, parent: Subject, command: tuple[str, ...], state: ProcessState) -> None:
        """A child that has ended before it was seen, and that its parent has not taken note of."""
        if state.pid in self._children or state.exit_code is None or state.parent != parent.pid:
            return
        # Its command is gone; a forked child has the name of its parent.
        if state.name == LOADER_WORKER or (command and state.name in command[0]):
            name = "loader worker" if state.name == LOADER_WORKER else "child process"
            self._children[state.pid] = _Child(parent.pid, name, parent.steps, 0)
            self._gone.codes[state.pid], self._gone.times[state.pid] = state.exit_code, time.time()

    def _unclean(self, pid: int, child: _Child) -> str | None:
        """How a child has ended: "SIGKILL", "status 3"; None if nothing is wrong with that, or it is not known."""
        times = self._gone.times
        if child.parent in times and times[child.parent] <= times[pid]:
            return None
        return how_of(self._gone.codes.get(pid, 0))

    def _death(self, pid: int, child: _Child, how: str, steps: int) -> DeathEvent:
        before, self._kills = self._kills, oom_kills()
        rose = None if before is None or self._kills is None else max(self._kills - before, 0)
        memory = child.resident_bytes or None
        found = DeathEvent(steps, pid, child.name, how, memory, free_shared_memory(), rose)
        self.deaths.append(found)
        return found


def how_of(code: int) -> str | None:
    """ "SIGKILL" or "status 3" for a wait status; None for an end without an error, or on request."""
    if os.WIFSIGNALED(code):
        number = os.WTERMSIG(code)
        return None if number in _ASKED else name_of(number)
    return f"status {os.WEXITSTATUS(code)}" if os.WEXITSTATUS(code) else None


def name_of(number: int) -> str:
    """ "SIGKILL"."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"


_LAUNCHERS = re.compile(
    r"(^|/)(torchrun|accelerate|deepspeed|lightning)$|^torch\.distributed\.|^accelerate\.commands"
)


class ProcessWatch:
    """stack_of, ignored: see Stalls. where: see Descriptors. workers: what loader workers tell. Never raises."""

    def __init__(
        self,
        stack_of: Callable[[Subject], Sequence[Frame] | None] = lambda _: None,
        ignored: Callable[[], frozenset[int]] = frozenset,
        where: Callable[[str], str] = lambda _: "",
        workers: WorkerWatch | None = None,
    ) -> None:
        self.children = Children()
        self._workers = workers
        self.descriptors = Descriptors(where)
        self._stalls = Stalls(stack_of=stack_of, ignored=ignored)

    def look(self, subjects: Sequence[Subject], names: Mapping[int, str] | None = None) -> Iterator[Event]:
        """What is new. subjects: the processes that are to make progress. names: of them, such as "rank 1"."""
        children = self.children
        if subjects:  # else they are paused, or asked to end: so are their children
            for death in children.look(subjects):
                doing = death.doing if self._workers is None else self._workers.told_of(death.pid)
                yield replace(death, doing=doing)
            if self._workers is not None:
                seeds = [seed for one in subjects for seed in getattr(one, "loader_seeds", ())]
                yield from self._workers.look(seeds, subjects[0].steps)
        if subjects and (event := self.descriptors.look(subjects[0].pid, subjects[0].steps)) is not None:
            yield event
        yield from self._stalls.look(subjects, children.deaths, {**children.names, **(names or {})})

    def finish(self, step: int, seeds: Sequence[int] = ()) -> Iterator[Event]:
        """What is known at the end of the run. seeds: see `WorkerWatch.look`."""
        if self._workers is not None:
            yield from self._workers.look(seeds, step, final=True)

    def close(self) -> None:
        """Watch no more."""
        self.children.close()


def untold(root: int) -> list[Untold]:
    """The Python programs among a process and its descendants, without launchers, helpers and forked workers."""
    found: list[Untold] = []
    commands: dict[int, tuple[str, ...]] = {}
    for pid in (root, *children_of(root)):
        command = commands[pid] = command_of(pid)
        state = state_of(pid)
        if state is None or not command or "python" not in command[0].rpartition("/")[2]:
            continue
        forked = commands.get(state.parent) == command
        helps = any("multiprocessing" in word or "_inductor" in word for word in command)
        if not forked and not helps and not any(_LAUNCHERS.search(word) for word in command[1:4]):
            found.append(Untold(pid))
    return found[:MOST_MAINS]
