"""Samples of the stacks of observed processes, from outside: which lines they are at, by phase."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ndd_engine.measure.stalls import UnreadableError, find, place_of, threads

from .records import VERSION, Line, Process

# From one look at the stack to the next: at first, for so many looks, and later.
LOOK_S, FEW_LOOKS, RARE_LOOK_S = 1.0, 15, 5.0
# Looks of a line of the record, and places that it names.
LOOKS, TOP = 5, 12
# Processes whose stacks are looked at.
MOST_PROCESSES = 4
# Functions of torch, with their files, and the phase of what they call.
_PHASES = {
    ("torch/autograd/__init__.py", "backward"): "backward",
    ("torch/utils/data/dataloader.py", "__next__"): "data_wait",
    ("torch/utils/data/dataloader.py", "__iter__"): "data_wait",
    ("torch/nn/modules/module.py", "_wrapped_call_impl"): "forward",
    ("torch/nn/modules/module.py", "zero_grad"): "zero_grad",
    ("torch/optim/optimizer.py", "zero_grad"): "zero_grad",
    ("torch/optim/optimizer.py", "wrapper"): "optimizer",
    ("torch/serialization.py", "save"): "checkpoint",
}


@dataclass
class _Watched:
    looks: int = 0
    next_look: float = 0.0
    seen: Counter[tuple[str, str, int, str]] = field(default_factory=Counter)


class _Look(threading.Thread):
    """Asks py-spy where a process is. stack: frames of the thread that trains, innermost first; None if unknown."""

    def __init__(self, spy: str, process: Process) -> None:
        super().__init__(name="ndd-samples", daemon=True)
        self.process, self.phase, self._spy = process, process.phase, spy
        self._pid, self._thread = process.pid, process.thread
        self.stack: list[dict[str, Any]] | None = None

    def run(self) -> None:
        with suppress(UnreadableError, LookupError, TypeError, AttributeError, ValueError):
            found = threads(self._spy, self._pid)
            one = next((one for one in found if one.get("os_thread_id") == self._thread), None)
            if one is None:
                one = next((one for one in found if one.get("owns_gil")), found[0])
            self.stack = list(one["frames"])


class Samples:
    """The processes of this host. Never raises."""

    def __init__(self) -> None:
        self._watched: dict[str, _Watched] = {}
        self._looks: list[_Look] = []
        self._spy = find()
        # Where batches are made, as a process has told: file and function.
        self.sources: set[tuple[str, str]] = set()

    def look(self, processes: Sequence[Process]) -> Iterator[tuple[Process, Line]]:
        """(process, line) with samples of the stacks of the first processes."""
        now = time.monotonic()
        for process in processes[:MOST_PROCESSES] if self._spy is not None else ():
            watched = self._watched.setdefault(process.name, _Watched())
            if process.trains and now >= watched.next_look:
                watched.looks += 1
                watched.next_look = now + (LOOK_S if watched.looks <= FEW_LOOKS else RARE_LOOK_S)
                self._ask(process)
        for look in [one for one in self._looks if not one.is_alive()]:
            self._looks.remove(look)
            yield from self._answered(look)

    def _ask(self, process: Process) -> None:
        if self._spy is not None and all(one.process.name != process.name for one in self._looks):
            look = _Look(self._spy, process)
            look.start()
            self._looks.append(look)

    def _answered(self, look: _Look) -> Iterator[tuple[Process, Line]]:
        if not look.stack:
            return
        watched = self._watched[look.process.name]
        phase = "evaluate" if look.phase == "evaluate" else phase_of(look.stack, self.sources)
        file, at, name = place_of(look.stack) or ("?", 0, "?")
        watched.seen[(phase, file, at, name)] += 1
        if sum(watched.seen.values()) >= LOOKS:
            seen, watched.seen = watched.seen, Counter()
            frames = [[*place, count, int(place[1] != "?")] for place, count in seen.most_common(TOP)]
            yield look.process, {
                "v": VERSION, "type": "stacks", "t": time.time(), "step": look.process.steps,
                "looks": sum(seen.values()), "frames": frames,
            }  # fmt: skip


def readable_by(pid: int) -> dict[str, str]:
    """The environment of a script whose stack this process and what it starts may read; {} without py-spy."""
    # Linux with Yama lets only ancestors read a process, unless it names others.
    return {"NDD_WATCH_TRACER": str(pid)} if find() else {}


def phase_of(stack: Sequence[dict[str, Any]], sources: set[tuple[str, str]]) -> str:
    """The phase of a stack: that of the outermost function that has one."""
    for frame in reversed(stack):
        file, name = str(frame["filename"]), str(frame["name"])
        if (file, name) in sources:
            return "data_wait"
        _, found, inside = file.partition("-packages/torch/")
        phase = _PHASES.get((f"torch/{inside}", name)) if found else None
        if phase is not None:
            return phase
    return "other"
