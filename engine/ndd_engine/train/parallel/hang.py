"""Notices that training stands still, and names the rank that the others wait for.

Each rank watches itself from a thread. Nothing is sent while it makes progress. The first rank that makes none for the
limit asks all ranks, by a note, where they are: step, phase and line, and the collective they wait in. It tells all of
them what it concludes. A rank that does not answer is stopped, or holds the interpreter lock.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

import torch

from ndd_engine.files import write_text
from ndd_engine.measure.clock import PhaseClock
from ndd_engine.record.events import Event, MarkEvent
from ndd_engine.record.rundir import RunDir
from ndd_engine.text import duration, printable

from .flight import waiting_in
from .world import World

LOOK_S = 0.25
# A rank looks for a question after so many looks, and all of them have so long to answer.
ASKED_EVERY = 4
PATIENCE_S = 2.5
_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parents[1]), "/ndd_console/"
_THREADING = str(Path(threading.__file__))
_QUESTION, _VERDICT = "hang/question", "hang/verdict"


@dataclass(frozen=True)
class Note:
    """Where a rank is: its step, phase and line; collectives begun, and the one it waits in or ""."""

    rank: int
    step: int
    phase: str
    where: str
    begun: int | None
    waits_in: str


def verdict(
    notes: Mapping[int, Note], silent: Mapping[int, str], hosts: Sequence[str], stuck_s: float
) -> str:
    """Who holds the others up, in words. notes: by rank. silent: of the other ranks, what is known about each."""
    world = len(hosts)
    step = min(note.step for note in notes.values()) + 1
    head = f"step {step} has not ended for {duration(stuck_s)}"
    waiting = [note for note in notes.values() if note.waits_in]
    inside = waiting[0].waits_in if waiting else ""
    waits = f"; {len(waiting)} of {world} ranks wait in {inside}" if inside else ""
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
        self._question = self._answered = self._told = ""

    def start(self) -> None:
        """Start watching; on the thread that trains."""
        self._main = threading.get_ident()
        if self._world.place.first:
            with contextlib.suppress(OSError):
                self._run.hang.unlink(missing_ok=True)
        self._stopping = threading.Event()
        threading.Thread(target=self._work, args=(self._stopping,), name="ndd-hang", daemon=True).start()

    def stop(self) -> None:
        """Stop watching; does not wait."""
        self._stopping.set()

    def moved(self) -> None:
        """Progress between two steps: a batch of an evaluation, or a vote during a pause."""
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
        seen, since, looks = (-1, 0), 0.0, 0
        while not stopping.wait(LOOK_S):
            looks += 1
            now = self._step(), self._moves
            if now != seen or self._quiet:
                seen, since = now, time.monotonic()
                self._goes_on(now[0])
            elif not self._question and time.monotonic() - since >= self.limit_s:
                self._ask(since)
            if looks % ASKED_EVERY == 0:
                self._answer()

    def _goes_on(self, step: int) -> None:
        notes = self._world.notes
        if self._question:
            if notes.get(_QUESTION) == self._question:
                notes.put(_QUESTION, "")
            self._question = ""
        if self._told:
            self._told = ""
            self._put(MarkEvent("note", step, f"training continues after step {step}"))
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
            found |= {
                rank: note for rank in range(self._world.size) if (note := self._answer_of(rank)) is not None
            }
            if self._stopping.wait(LOOK_S):
                return
        silent = {rank: self._state_of(rank) for rank in range(self._world.size) if rank not in found}
        text = verdict(found, silent, self._world.hosts, time.monotonic() - since)
        notes.put(_VERDICT, json.dumps([self._question, text]))
        self._tell(self._question, text)
        if 0 in silent:
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
        self._hear(question)

    def _note(self) -> Note:
        """Where this rank is."""
        begun, waits_in = waiting_in(self._world.control, self._frame())
        return Note(self._world.rank, self._step(), self._clock.current, self._place(), begun, waits_in)

    def _hear(self, question: str) -> None:
        found = json.loads(self._world.notes.get(_VERDICT) or "[0, 0]")
        if found[0] == question:
            self._tell(question, found[1])

    def _tell(self, question: str, text: str) -> None:
        """Record what was concluded, once."""
        if question != self._told:
            self._told = question
            self._put(MarkEvent("warning", self._step(), text))

    def _answer_of(self, rank: int) -> Note | None:
        found = json.loads(self._world.notes.get(f"hang/{rank}") or "[0, 0]")
        return Note(**found[1]) if found[0] == self._question else None

    def _state_of(self, rank: int) -> str:
        """What the system says about the process of a rank that does not answer."""
        return self._world.members[rank].state()

    def _frame(self) -> FrameType | None:
        """The innermost frame of the thread that trains."""
        return sys._current_frames().get(self._main)

    def _place(self) -> str:
        """File, line and function of the innermost frame outside torch, or of the engine if there is no other."""
        frame, ours = self._frame(), ""
        while frame is not None:
            file = frame.f_code.co_filename
            if not file.startswith((_TORCH, "<")) and file != _THREADING:
                text = printable(f"{'/'.join(Path(file).parts[-2:])}:{frame.f_lineno} {frame.f_code.co_name}")
                if not any(folder in file for folder in _OURS):
                    return text
                ours = ours or text
            frame = frame.f_back
        return ours or "an unknown line"
