"""Notices that training stands still, and names the rank that the others wait for.

Each rank watches itself from a thread. Nothing is sent while steps end. When no step has ended for the limit, a rank
leaves a note in the store of the ranks: its step, phase and line, and the collectives it has begun. The lowest rank
that left a note reads those of the others. A rank without a note is stopped, or holds the interpreter lock.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from ndd_engine.errors import shortened
from ndd_engine.files import write_text
from ndd_engine.measure.clock import PhaseClock
from ndd_engine.record.events import Event, MarkEvent
from ndd_engine.text import duration, printable

from .world import World

LOOK_S = 0.25
# From the first note to the verdict: the other ranks notice about as late.
PATIENCE_S = 2.0
_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parents[1])
_THREADING = str(Path(threading.__file__))
FILE = "hang.json"


@dataclass(frozen=True)
class Note:
    """What a rank that stands still knows: its step, phase and line; collectives begun, and the one it waits in."""

    rank: int
    step: int
    phase: str
    where: str
    begun: int | None
    waits_in: str


def verdict(notes: Mapping[int, Note], hosts: Sequence[str], stuck_s: float) -> str:
    """Who holds the others up, in words. notes: by rank; ranks without one are silent."""
    world = len(hosts)
    step = min(note.step for note in notes.values()) + 1
    head = f"step {step} has not ended for {duration(stuck_s)}"
    waiting = [note for note in notes.values() if note.waits_in]
    inside = waiting[0].waits_in if waiting else ""
    waits = f"; {len(waiting)} of {world} ranks wait in {inside}" if inside else ""
    if silent := [rank for rank in range(world) if rank not in notes]:
        names = ", ".join(f"rank {rank} ({hosts[rank]})" for rank in silent[:4])
        names += f" and {len(silent) - 4} more" if len(silent) > 4 else ""
        does = "does not answer (stopped" if len(silent) == 1 else "do not answer (stopped"
        return f"{head}: {names} {does}, or the interpreter lock is held){waits}"
    behind = _behind(notes)
    if behind is not None:
        return f"{head}: rank {behind.rank} ({hosts[behind.rank]}) is in {behind.phase}, at {behind.where}{waits}"
    different = {note.waits_in for note in waiting}
    if len(different) > 1:
        each = "; ".join(f"rank {note.rank} in {note.waits_in}, at {note.where}" for note in waiting[:3])
        return f"{head}: the ranks wait in different collectives: {each}"
    each = "; ".join(f"rank {note.rank} at {note.where}" for note in list(notes.values())[:3])
    return f"{head}, and no rank is behind the others: {each}{waits}"


def _behind(notes: Mapping[int, Note]) -> Note | None:
    """The rank that the others wait for: at an earlier step, or with fewer collectives, or in none."""
    every = list(notes.values())
    by_step = min(every, key=lambda note: note.step)
    if sum(note.step == by_step.step for note in every) < len(every):
        return by_step
    out = [note for note in every if not note.waits_in]
    if len(out) == 1 or (out and len(out) < len(every)):
        return out[0]
    counted = [note for note in every if note.begun is not None]
    if len(counted) == len(every):
        fewest = min(counted, key=lambda note: note.begun or 0)
        if sum(note.begun == fewest.begun for note in every) < len(every):
            same = {note.waits_in for note in every}
            return fewest if len(same) == 1 else None
    return None


class HangWatch:
    """Watches the steps of this rank. limit_s: how long a step may take before ranks are compared."""

    def __init__(
        self,
        world: World,
        step: Callable[[], int],
        clock: PhaseClock,
        put: Callable[[Event], None],
        limit_s: float,
        folder: Path | None = None,
    ) -> None:
        """folder: of the run; the verdict is also written there, since rank 0 may be the one that hangs."""
        self._world, self._step, self._clock, self._put = world, step, clock, put
        self.limit_s, self._folder = limit_s, folder
        self._main = threading.get_ident()
        self._quiet = 0
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._episode = 0

    def start(self) -> None:
        """Start watching; on the thread that trains."""
        self._main = threading.get_ident()
        self._thread = threading.Thread(target=self._work, name="ndd-hang", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop watching; does not wait."""
        self._stopping.set()

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """While a pause, an evaluation or a checkpoint keeps steps from ending."""
        self._quiet += 1
        try:
            yield
        finally:
            self._quiet -= 1

    def _work(self) -> None:
        with contextlib.suppress(Exception):  # the store is gone: so are the other ranks
            seen, since, told = self._step(), time.monotonic(), False
            while not self._stopping.wait(LOOK_S):
                step = self._step()
                if step != seen or self._quiet:
                    seen, since = step, time.monotonic()
                    if told:
                        told = False
                        self._put(MarkEvent("note", step, f"step {step} has ended; training continues"))
                elif not told and time.monotonic() - since >= self.limit_s:
                    told = True
                    self._tell(since)

    def _tell(self, since: float) -> None:
        world, step = self._world, self._step()
        store, key = world.store, f"hang/{step}"
        store.set(f"{key}/{world.rank}", json.dumps(asdict(self._note(step))))
        if self._stopping.wait(PATIENCE_S) or self._step() != step:
            return
        notes: dict[int, Note] = {}
        for rank in range(world.size):
            name = f"{key}/{rank}"
            if store.check([name]):
                notes[rank] = Note(**json.loads(store.get(name)))
        # A rank that is behind has a note of an earlier step.
        for rank in range(world.size):
            earlier = f"hang/{step - 1}/{rank}"
            if rank not in notes and store.check([earlier]):
                notes[rank] = Note(**json.loads(store.get(earlier)))
        text = verdict(notes, world.hosts, time.monotonic() - since)
        self._put(MarkEvent("warning", step, text, {"setting": "hang"}))
        if min(notes) == world.rank and self._folder is not None:
            with contextlib.suppress(OSError):
                body = {"t": time.time(), "step": step, "text": text}
                write_text(self._folder / FILE, json.dumps(body) + "\n")

    def _note(self, step: int) -> Note:
        begun, waits_in = collectives()
        return Note(self._world.rank, step, self._clock.current, self._place(), begun, waits_in)

    def _place(self) -> str:
        """File, line and function of the innermost frame outside torch, or of the engine if there is no other."""
        frame: FrameType | None = sys._current_frames().get(self._main)
        ours = ""
        while frame is not None:
            file = frame.f_code.co_filename
            if not file.startswith((_TORCH, "<")) and file != _THREADING:
                text = printable(f"{'/'.join(Path(file).parts[-2:])}:{frame.f_lineno} {frame.f_code.co_name}")
                if not file.startswith(_OURS):
                    return text
                ours = ours or text
            frame = frame.f_back
        return ours or "an unknown line"


def collectives() -> tuple[int | None, str]:
    """(collectives begun, the one this process waits in or ""), from torch's flight recorder; (None, "") without."""
    try:
        c10d: Any = importlib.import_module("torch._C._distributed_c10d")
        trace = json.loads(c10d._dump_fr_trace_json(True, False))
        begun = sum(int(status["last_enqueued_collective"]) for status in trace["pg_status"].values())
        open_ones = [entry for entry in trace.get("entries", ()) if not entry["retired"]]
        if not open_ones:
            return begun, ""
        # Votes are always in flight: the collective of the training came last.
        entry = open_ones[-1]
        name = str(entry["profiling_name"]).removeprefix("gloo:").removeprefix("nccl:")
        return begun, shortened(f"{name} of {entry['input_sizes']}", 120)
    except Exception:  # noqa: BLE001  an older torch, or nothing was recorded
        return None, ""
