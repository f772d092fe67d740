"""Notices that training stands still, and names the rank that the others wait for.

Each rank watches itself from a thread. Nothing is sent while it makes progress. The first rank that makes none for the
limit asks all ranks, by a note, where they are: step, phase and stack, and the collective they wait in, from torch's
flight recorder. It tells all of them what it concludes.

A rank that holds the interpreter lock in a call outside of Python cannot answer. A signal to its watching thread, which
waits for that lock, makes faulthandler write the stacks of all threads; no call of the training is interrupted. A rank
that was stopped runs nothing at all: its stack is read from outside with py-spy, if it is there.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import json
import os
import re
import secrets
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any

import psutil

from ndd_engine.errors import shortened
from ndd_engine.files import write_text
from ndd_engine.measure import stalls
from ndd_engine.measure.stalls import ADVICE, Frame
from ndd_engine.record.event import OVER
from ndd_engine.record.events import Event, StallEvent
from ndd_engine.record.rundir import RunDir
from ndd_engine.text import duration, printable
from ndd_watch.clock import PhaseClock

from .rank_place import Member
from .world import World

# How often a rank looks for progress and for a question, how long all of them have to answer one, and how often the
# rank that asks looks for answers.
LOOK_S = 1.0
PATIENCE_S = 2.5
ANSWERS_S = 0.25
_QUESTION, _VERDICT, _LISTENS = "hang/question", "hang/verdict", "hang/listens"
# By rank, the frames of its stack in words, the innermost first.
Stacks = dict[str, list[str]]
# Ranks whose stacks are told.
MOST_STACKS = 8
# Silent ranks whose stacks are read from outside, which takes a while.
MOST_READ = 3
# Frames of a stack that are told, the innermost first.
MOST_FRAMES = 12
# For the stacks to be written.
WRITTEN_S = 0.5
# For py-spy; a rank that hangs is to be named within a few seconds.
SPY_S = 3.0
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)")
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')


@dataclass(frozen=True)
class Note:
    """Where a rank is: step, phase, line and stack; collectives begun, and the one it waits in or ""."""

    rank: int
    step: int
    phase: str
    where: str
    begun: int | None
    waits_in: str
    stack: Sequence[str] = ()


def verdict(
    notes: Mapping[int, Note], silent: Mapping[int, str], hosts: Sequence[str], stuck_s: float
) -> str:
    """Who holds the others up, in words. notes: by rank. silent: of the other ranks, what is known about each."""
    world = len(hosts)
    step = min(note.step for note in notes.values()) + 1
    head = f"step {step:,} has not ended for {duration(stuck_s)}"
    waiting = [note for note in notes.values() if note.waits_in]
    inside = waiting[0].waits_in if waiting else ""
    waits = f"; {len(waiting):,} of {world:,} ranks wait in {inside}" if inside else ""
    if silent:
        names = [f"rank {rank} ({hosts[rank]}) {state}" for rank, state in silent.items()]
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        return f"{head}: {', '.join(names[:4])}{more}{waits}"
    behind = _behind(notes)
    if behind is not None:
        return f"{head}: rank {behind.rank} ({hosts[behind.rank]}) is in {behind.phase}, at {behind.where}{waits}"
    if len({note.waits_in for note in waiting}) > 1:
        each = "; ".join(f"rank {note.rank} in {note.waits_in}, at {note.where}" for note in waiting[:3])
        return f"{head}: the ranks wait in different collectives: {each}"
    each = "; ".join(f"rank {note.rank} at {note.where}" for note in list(notes.values())[:3])
    return f"{head}, and no rank is behind the others: {each}{waits}"


def _behind(notes: Mapping[int, Note]) -> Note | None:
    """The rank that the others wait for: in no collective, at an earlier step, or with fewer collectives begun."""
    every = list(notes.values())
    if 0 < len(out := [note for note in every if not note.waits_in]) < len(every):
        return min(out, key=lambda note: note.step)
    by_step = min(every, key=lambda note: note.step)
    if sum(note.step == by_step.step for note in every) < len(every):
        return by_step
    if len({note.waits_in for note in every}) == 1 and all(note.begun is not None for note in every):
        fewest = min(every, key=lambda note: note.begun or 0)
        if sum(note.begun == fewest.begun for note in every) < len(every):
            return fewest
    return None


class HangWatch:
    """Watches the progress of this rank: its steps, and what `moved` is called for.

    limit_s: how long there may be none before the ranks are compared.
    """

    def __init__(
        self,
        world: World,
        step: Callable[[], int],
        clock: PhaseClock,
        put: Callable[[Event], None],
        limit_s: float,
        run: RunDir,
    ) -> None:
        """run: where the verdict is also written if rank 0, which records the run, does not answer."""
        self._world, self._step, self._clock, self._put = world, step, clock, put
        self.limit_s, self._run = limit_s, run
        self._main = threading.get_ident()
        self._moves = self._quiet = 0
        self._stopping = threading.Event()
        self._listening: StackRequests | None = None
        self._question = self._answered = self._told_question = ""

    def start(self) -> None:
        """Start watching; on the thread that trains."""
        self._main = threading.get_ident()
        if self._world.place.first:
            with contextlib.suppress(OSError):
                self._run.hang.unlink(missing_ok=True)
        self._stopping = threading.Event()
        thread = threading.Thread(target=self._work, args=(self._stopping,), name="ndd-hang", daemon=True)
        thread.start()
        self._listening = StackRequests(self._main, thread.native_id or 0)
        self._world.notes.put(f"{_LISTENS}/{self._world.rank}", json.dumps(self._listening.address))

    def stop(self) -> None:
        """Stop watching; does not wait."""
        self._stopping.set()
        if self._listening is not None:
            self._listening.stop()

    def moved(self) -> None:
        """Progress between two steps: a batch of an evaluation, or an agreement during a pause."""
        self._moves += 1

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """While the caller keeps the ranks from ending steps."""
        self._quiet += 1
        try:
            yield
        finally:
            self._quiet -= 1

    def _work(self, stopping: threading.Event) -> None:
        seen, since = (-1, 0), 0.0
        while not stopping.wait(LOOK_S):
            now = self._step(), self._moves
            if now != seen or self._quiet:
                seen, since = now, time.monotonic()
                self._goes_on(now[0])
            elif not self._question and time.monotonic() - since >= self.limit_s:
                self._ask(since)
            self._answer()

    def _goes_on(self, step: int) -> None:
        notes = self._world.notes
        if self._question:
            if notes.get(_QUESTION) == self._question:
                notes.put(_QUESTION, "")
            self._question = ""
        if self._told_question:
            self._told_question = ""
            self._put(StallEvent(step, 0.0, OVER, f"training continues after step {step:,}"))
            with contextlib.suppress(OSError):
                self._run.hang.unlink(missing_ok=True)

    def _ask(self, since: float) -> None:
        """Ask all ranks where they are, unless another one did, and conclude."""
        notes = self._world.notes
        self._question = notes.get(_QUESTION) or ""
        if self._question:
            return
        self._question = secrets.token_hex(6)
        notes.put(_QUESTION, self._question)
        self._answer()
        deadline = time.monotonic() + PATIENCE_S
        found = {self._world.rank: self._note()}  # also if no note can be left
        while len(found) < self._world.size and time.monotonic() < deadline:
            for rank in range(self._world.size):
                told = json.loads(notes.get(f"hang/{rank}") or "[0, 0]")
                if told[0] == self._question:
                    found[rank] = Note(**told[1])
            if self._stopping.wait(ANSWERS_S):
                return
        stuck_s = time.monotonic() - since
        silent: dict[int, str] = {}
        stacks: Stacks = {}
        for member in self._world.members:
            if member.rank not in found:
                stack = self._stack_of(member) if len(silent) < MOST_READ else []
                silent[member.rank] = member.state() + (f", at {place(stack)}" if stack else "")
                stacks |= {str(member.rank): told_frames(stack)} if stack else {}
        text, behind = verdict(found, silent, self._world.hosts, stuck_s), _behind(found)
        for note in sorted(
            found.values(), key=lambda note: note is not behind
        ):  # the one they wait for first
            stacks[str(note.rank)] = list(note.stack)
        stacks = dict(islice(stacks.items(), MOST_STACKS))
        notes.put(_VERDICT, json.dumps([self._question, text, stacks]))
        self._tell(self._question, text, stacks)
        if 0 in silent:
            self._log(text, stacks)
            body = {"t": time.time(), "step": self._step(), "text": text}
            with contextlib.suppress(Exception):  # a full disk
                write_text(self._run.hang, json.dumps(body) + "\n")

    def _answer(self) -> None:
        """Answer the question of another rank, and record what it concluded."""
        notes = self._world.notes
        question = notes.get(_QUESTION)
        if not question:
            return
        if question != self._answered:
            self._answered = question
            notes.put(f"hang/{self._world.rank}", json.dumps([question, asdict(self._note())]))
        found = json.loads(notes.get(_VERDICT) or "[0, 0, 0]")
        if found[0] == question:
            self._tell(question, found[1], found[2])

    def _note(self) -> Note:
        """Where this rank is."""
        begun, waits_in = waiting_in()
        stack, phase = stalls.of_thread(self._main), self._clock.current
        told = told_frames(stack)
        return Note(self._world.rank, self._step(), phase, place(stack), begun, waits_in, told)

    def _tell(self, question: str, text: str, stacks: Stacks) -> None:
        """Record what was concluded, once."""
        if question != self._told_question:
            self._told_question = question
            each = [shortened(f"rank {rank}: {' < '.join(stack)}", 400) for rank, stack in stacks.items()]
            event = StallEvent(
                self._step(), self.limit_s, "collective", text, ADVICE["collective"], processes=each
            )
            self._put(event)
            if self._world.place.first:
                self._log(text, stacks)

    def _log(self, text: str, stacks: Stacks) -> None:
        """Write the stacks into console.log."""
        lines = [text]
        for rank, stack in stacks.items():
            lines += [f"stack of rank {rank}, innermost call first:", *(f"  {frame}" for frame in stack)]
        with contextlib.suppress(OSError), self._run.console_log.open("a", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")

    def _stack_of(self, member: Member) -> list[Frame]:
        """The stack of a rank that does not answer, as far as this one can read it."""
        told = self._world.notes.get(f"{_LISTENS}/{member.rank}")
        found: Any = json.loads(told) if told and member.here else None
        with contextlib.suppress(psutil.Error):
            return [] if found is None else stack_of(found, member.stopped)
        return []


def waiting_in() -> tuple[int | None, str]:
    """(collectives begun, the one this process waits in or ""); (None, "") where torch does not record them."""
    traces = list(_traces())
    open_entries = [entry for trace in traces for entry in trace["entries"] if not entry["retired"]]
    begun = [
        int(status["last_enqueued_collective"]) for trace in traces for status in trace["pg_status"].values()
    ]
    if not traces:
        return None, ""
    if not open_entries:
        return sum(begun), ""
    name = str(open_entries[0]["profiling_name"]).removeprefix("gloo:").removeprefix("nccl:")
    return sum(begun), shortened(f"{name} of {open_entries[0]['input_sizes']}", 120)


def _traces() -> Iterator[Any]:
    """What was recorded. NCCL has a recorder of its own, beside that of the other backends, with groups of its own."""
    with contextlib.suppress(ImportError):
        c10d: Any = importlib.import_module("torch._C._distributed_c10d")
        for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
            with contextlib.suppress(
                Exception
            ):  # another torch, a backend that is missing, or nothing was recorded
                trace = json.loads(getattr(c10d, name)(True, False))
                if trace["entries"] and trace["pg_status"] is not None:
                    yield trace


def place(stack: Sequence[Frame]) -> str:
    """File, line and function of the user's own code in a stack, or else of any, in words."""
    found = stalls.place_of(stack)
    return "an unknown line" if found is None else words(*found)


def words(file: str, line: int, name: str) -> str:
    """A frame in words."""
    return printable(f"{'/'.join(Path(file).parts[-2:])}:{line} {name}")


def told_frames(stack: Sequence[Frame]) -> list[str]:
    """The innermost frames of a stack, in words."""
    return [words(frame["filename"], frame["line"], frame["name"]) for frame in stack[:MOST_FRAMES]]


class StackRequests:
    """Lets other processes ask for the stack of a thread of this one.

    address: what they need for that; None where the signal is used for something else, or there is no such signal.
    """

    def __init__(self, thread: int, asked: int) -> None:
        """thread: its identifier. asked: the native id of a thread that waits in Python, which receives the signal."""
        self.address: dict[str, int] | None = None
        self._file: IO[bytes] | None = None
        number = getattr(signal, "SIGRTMAX", 0) - 2
        with contextlib.suppress(OSError, ValueError, RuntimeError, AttributeError):
            if number > 0 and signal.getsignal(number) == signal.SIG_DFL:
                self._file = tempfile.TemporaryFile()  # noqa: SIM115  as long as this listens
                faulthandler.register(number, self._file, all_threads=True)
                self._number = number
                self.address = {
                    "pid": os.getpid(), "asked": asked, "thread": thread,
                    "signal": number, "file": self._file.fileno(),
                }  # fmt: skip

    def stop(self) -> None:
        """Listen no more."""
        if self.address is not None:
            faulthandler.unregister(self._number)
            self.address = None
        if self._file is not None:
            self._file.close()


def stack_of(told: dict[str, Any], stopped: bool) -> list[Frame]:
    """The stack of the thread that trains of another rank on this host, the innermost frame first; [] if unknown.

    told: see Listening. stopped: it does not react to signals.
    """
    found: list[Frame] = []
    with contextlib.suppress(Exception):  # it may end at any moment
        if not stopped:
            found = _asked(told)
        if not found and (path := stalls.find()) is not None:
            for thread in stalls.threads(path, told["pid"], SPY_S):
                if thread["thread_id"] == told["thread"]:
                    found = list(thread["frames"])
    return found


def _asked(told: dict[str, Any]) -> list[Frame]:
    """Ask by the signal. Raises OSError."""
    pid, number = int(told["pid"]), int(told["signal"])
    if not _catches(pid, number):
        return []  # it would end
    path = Path(f"/proc/{pid}/fd/{told['file']}")
    before = path.stat().st_size
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.tgkill(pid, int(told["asked"]), number):
        return []
    deadline, size = time.monotonic() + WRITTEN_S, before
    while time.monotonic() < deadline:
        time.sleep(0.05)
        last, size = size, path.stat().st_size
        if size == last > before:
            break
    with path.open("rb") as file:
        file.seek(before)
        return parsed(file.read(1 << 20).decode(errors="replace"), int(told["thread"]))


def _catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def parsed(text: str, thread: int) -> list[Frame]:
    """The stack of a thread in what faulthandler wrote, the innermost frame first. thread: its identifier."""
    found: list[Frame] = []
    inside = False
    for line in text.splitlines():
        if (head := _THREAD.match(line)) is not None:
            inside = int(head[1], 16) == thread
        elif inside and (frame := _FRAME.match(line)) is not None:
            found.append({"filename": frame[1], "line": int(frame[2]), "name": frame[3]})
    return found
