"""Looks from outside at what observed processes do: where they are, whether they make progress, when they are gone."""

from __future__ import annotations

import contextlib
import os
import re
import select
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

import psutil

from ndd_engine.measure.spy import UnreadableError, find, threads
from ndd_engine.record.events import MarkEvent
from ndd_engine.record.figures import stalled_text
from ndd_engine.text import printable

from .records import VERSION, Line, Process

_WAIT_S = 1.0


class Gone:
    """times: process id -> Unix time at which it was gone. Linux only; elsewhere it stays empty. Never raises."""

    def __init__(self) -> None:
        self.times: dict[int, float] = {}
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
                    self.times[self._watched.pop(handle)] = time.time()
                    epoll.unregister(handle)
                    os.close(handle)
        epoll.close()
        for handle in self._watched:
            os.close(handle)


# Without progress for so long, a process is reported; again whenever the time has doubled.
STALLED_S = float(os.environ.get("NDD_WATCH_STALLED_S", "10"))
# If this program itself could not run for so long, such as after Ctrl-Z, the processes most likely could not either.
PAUSED_S = 3.0
# From one look at the stack to the next: at first, for so many looks, and later.
LOOK_S, FEW_LOOKS, RARE_LOOK_S = 1.0, 15, 5.0
# Looks of a line of the record, and places that it names.
LOOKS, TOP = 5, 12
# Processes whose stacks are looked at.
MOST_PROCESSES = 4
NO_SPY = "py-spy is not installed, so its line is not known"
STOPPED = "it is stopped by a signal or a debugger"
DISK = "it waits for a disk, a network file system or a driver"
# Files of a Python and of installed packages, whichever Python runs the script.
_FOREIGN = re.compile(r"^<|/lib(64)?/python\d|/(site|dist)-packages/|/_?ndd_watch/")
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
    """progress: as it was last; since: when that was, on the monotonic clock; told: seconds after which it was told."""

    progress: tuple[int, ...] = ()
    since: float = 0.0
    told: float = 0.0
    looks: int = 0
    next_look: float = 0.0
    seen: Counter[tuple[str, str, int, str]] = field(default_factory=Counter)


class _Look(threading.Thread):
    """Asks py-spy where a process is. stack: frames of the thread that trains, innermost first; None if unknown."""

    def __init__(self, spy: str, process: Process, silent_s: float) -> None:
        super().__init__(name="ndd-spy", daemon=True)
        self.process, self.pid = process, process.pid
        self.thread, self.phase = process.thread, process.phase
        self.silent_s, self._spy = silent_s, spy
        self.stack: list[dict[str, Any]] | None = None
        self.holds_lock = False
        self.why = ""

    def run(self) -> None:
        try:
            found = threads(self._spy, self.pid)
            one = next((one for one in found if one.get("os_thread_id") == self.thread), None)
            if one is None:
                one = next((one for one in found if one.get("owns_gil")), found[0])
            self.holds_lock = bool(one.get("owns_gil"))
            self.stack = list(one["frames"])
        except UnreadableError as error:
            self.why = f"py-spy cannot read it: {error}"
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            self.why = f"py-spy cannot read it: {type(error).__name__}"


class Stalls:
    """The processes of this host. Never raises."""

    def __init__(self, after_s: float = STALLED_S, spy: str | None = None) -> None:
        self._after_s = after_s
        self._watched: dict[str, _Watched] = {}
        self._looks: list[_Look] = []
        self._spy = find() if spy is None else spy
        self._looked = time.monotonic()
        # Where batches are made, as a process has told: file and function.
        self.sources: set[tuple[str, str]] = set()

    def look(self, processes: Sequence[Process], step: int) -> Iterator[tuple[Process, MarkEvent | Line]]:
        """(process, warning) of those without progress, and (process, line) with samples of their stacks."""
        now = time.monotonic()
        paused_s, self._looked = now - self._looked, now
        for place, process in enumerate(processes):
            watched = self._watched.setdefault(process.name, _Watched())
            if (progress := process.progress) != watched.progress or not process.trains:
                watched.progress, watched.since, watched.told = progress, now, 0.0
            elif paused_s > PAUSED_S:
                watched.since = min(watched.since + paused_s, now)
            silent_s = now - watched.since
            if silent_s >= max(self._after_s, 2 * watched.told):
                yield from self._stalled(process, watched, silent_s, step)
            elif process.trains and now >= watched.next_look and place < MOST_PROCESSES:
                watched.looks += 1
                watched.next_look = now + (LOOK_S if watched.looks <= FEW_LOOKS else RARE_LOOK_S)
                self._ask(process, 0.0)
        for look in [one for one in self._looks if not one.is_alive()]:
            self._looks.remove(look)
            yield from self._answered(look, step)

    def _stalled(
        self, process: Process, watched: _Watched, silent_s: float, step: int
    ) -> Iterator[tuple[Process, MarkEvent]]:
        why = _why(process.pid)
        if why is None:  # it is gone
            return
        if why or self._spy is None:
            watched.told = silent_s
            yield process, _warning(step, process.pid, silent_s, process.phase, None, why or NO_SPY)
        elif self._ask(process, silent_s):
            watched.told = silent_s

    def _ask(self, process: Process, silent_s: float) -> bool:
        if self._spy is None or any(one.process.name == process.name for one in self._looks):
            return False
        look = _Look(self._spy, process, silent_s)
        look.start()
        self._looks.append(look)
        return True

    def _answered(self, look: _Look, step: int) -> Iterator[tuple[Process, MarkEvent | Line]]:
        if look.silent_s:
            place, why = place_of(look.stack), look.why
            if place is not None and look.holds_lock:
                why = f"which holds Python's interpreter lock{_inside(look.stack)}"
            yield look.process, _warning(step, look.pid, look.silent_s, look.phase, place, why)
            return
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


def place_of(stack: Sequence[dict[str, Any]] | None) -> tuple[str, int, str] | None:
    """File, line and function of the script's own code in a stack, or else of any."""
    if not stack:
        return None
    own = next((frame for frame in stack if not _FOREIGN.search(frame["filename"])), stack[0])
    return str(own["filename"]), int(own["line"]), str(own["name"])


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


def _inside(stack: Sequence[dict[str, Any]] | None) -> str:
    """The innermost function, if it is another one than that of the script."""
    if not stack or not _FOREIGN.search(stack[0]["filename"]):
        return ""
    return f", in {printable(str(stack[0]['name']))}"


def _warning(
    step: int, pid: int, silent_s: float, phase: str, place: tuple[str, int, str] | None, why: str
) -> MarkEvent:
    if place is not None:
        place = PurePath(place[0]).name, *place[1:]
    text = stalled_text(silent_s, phase, place)
    if why:
        text += f"{', ' if place is not None else ': '}{why}"
    return MarkEvent("warning", step, f"{text} (process {pid})")


def _why(pid: int) -> str | None:
    """The reason if the system knows it, "" if it does not; None if the process is gone."""
    try:
        status = psutil.Process(pid).status()
    except psutil.Error:
        return None
    if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
        return None
    if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
        return STOPPED
    if status == psutil.STATUS_DISK_SLEEP:
        return DISK
    return ""
