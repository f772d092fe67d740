"""Passes requests on to the processes of a script: to pause, save a checkpoint, evaluate, or take a profiler capture.

They are integers in the memory of each process, see `ndd_watch.requests`. Ranks obey after the same step, which is far
enough ahead for all of them to have seen the request.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ndd_engine.record.events import Event, MarkEvent, RunEvent
from ndd_engine.record.figures import obeyed
from ndd_engine.record.snapshot import Snapshot
from ndd_engine.run.control import Control, pause_mark, resume_mark
from ndd_engine.text import counted
from ndd_watch import mapped

from .records import Process

# What is asked for once, in the order of the counters in the memory.
ONCE = ("kernels", "checkpoint", "evaluate", "holders")
# Those for which a process needs no other rank.
ALONE = frozenset({"kernels", "holders"})
# Seconds in which every rank sees a request, since it looks at the end of a window; and for which processes are waited.
SEEN_S, PATIENCE_S = 4.0, 20.0
APART = "not all processes of the script reach the end of a step"
# What the frameworks of scripts do on request, by the names of their actions.
NEEDS_FRAMEWORK = {
    "checkpoint": "save a checkpoint on request: only those of Lightning and of Hugging Face's Trainer do",
    "evaluate": "evaluate on request: only those of Hugging Face's Trainer with an eval_strategy do",
}


def refusal(run: RunEvent | None, action: str) -> str:
    """Why a script does not obey a request; "" if it does. run: None before it has trained."""
    if action not in NEEDS_FRAMEWORK or action in obeyed(run):
        return ""
    return f"this script cannot {NEEDS_FRAMEWORK[action]}"


class Steering:
    """Requests to one script. put: gets the marks of its pauses.

    kernels_every: ask for a capture after every so many steps of a script that trains on a GPU; 0: on request.
    """

    def __init__(self, control: Control, put: Callable[[Event], None], kernels_every: int = 0) -> None:
        self._control, self._put = control, put
        self._every = self._due = kernels_every
        # By process: what it was asked for so far, as in its memory. And what was requested, but not asked for yet.
        self._asked: dict[Path, list[int]] = {}
        self._once: set[str] = set()
        # On the monotonic clock: since when ranks are missing, or only some of them pause; and the begin of the present
        # pause. 0.0 otherwise.
        self._apart_t = self._began_t = 0.0
        self._told_pause = False

    def look(self, processes: Sequence[Process], snapshot: Callable[[], Snapshot], step: int) -> None:
        """Pass on what was requested, after so many steps. processes: that train on this host."""
        self._control.wait(0.0)  # forget processes that held a pause and have exited
        if not processes:
            return  # what was requested waits for them
        self._once |= self._control.take_once()
        if self._every and step >= self._due:
            self._look_for_a_capture(snapshot().run, step)
        wants = self._control.paused and not self._control.stopping
        if not wants:
            self._release(step)
        if not (wants or self._once):
            return
        now = snapshot()
        run = now.run
        parallel = {} if run is None else run.config.get("parallel") or {}
        ranks = [process for process in processes if process.name.startswith("rank-")]
        missing = int(parallel.get("ranks") or 1) - max(len(ranks), 1)
        if missing > 0 and (wants or not self._once <= ALONE):
            self._wait(f"{counted(missing, 'rank')} cannot be asked: on other hosts, or not observed", step)
            return
        at, done = 0, [process.done for process in ranks]
        if len(ranks) > 1:
            if not now.steps_per_s or min(done) < max(self._of(process)[0] for process in ranks):
                # The speed is not known, or the request before is not obeyed yet.
                if any(process.paused for process in ranks):
                    self._wait(APART, step)
                return
            at = max(done) + math.ceil(now.steps_per_s * SEEN_S) + 2
        for process in ranks or processes[:1] if self._once else ():
            for place, action in enumerate(ONCE, 2):
                self._of(process)[place] += action in self._once
            self._ask(process, at)
        self._once.clear()
        if wants:
            self._pause(processes, at, step)

    def _look_for_a_capture(self, run: RunEvent | None, step: int) -> None:
        """Ask for a periodic capture, which is due."""
        if run is None:
            return
        if not run.device.startswith("cuda"):
            self._every = 0
            text = "no periodic profiler captures: the script does not train on a GPU; key k takes one"
            self._put(MarkEvent("note", step, text))
        else:
            self._due = (step // self._every + 1) * self._every
            self._once.add("kernels")

    def _pause(self, processes: Sequence[Process], at: int, step: int) -> None:
        for process in processes:
            if not self._of(process)[1]:
                self._of(process)[1] = os.getpid()
                self._ask(process, at)
        paused = sum(process.paused for process in processes)
        if 0 < paused < len(processes):
            self._wait(APART, step)
        elif paused and not self._began_t:
            # Told at the next look: the windows that end with the pause are read before.
            self._apart_t, self._began_t = 0.0, time.monotonic()
        elif paused and not self._told_pause:
            self._told_pause = True
            self._put(MarkEvent("status", step, "", {"status": "paused"}))
            self._put(pause_mark(step, list(self._control.holders)))

    def _release(self, step: int) -> None:
        """Let all of them train on."""
        for path, asked in self._asked.items():
            if asked[1]:
                asked[1] = 0
                self._write(path, asked)
        if self._told_pause:
            self._put(MarkEvent("status", step, "", {"status": "training"}))
            self._put(resume_mark(step, time.monotonic() - self._began_t))
        self._apart_t, self._began_t, self._told_pause = 0.0, 0.0, False

    def _wait(self, why: str, step: int) -> None:
        """For some of the processes; after a while, nothing of what was requested is done."""
        self._apart_t = self._apart_t or time.monotonic()
        if time.monotonic() - self._apart_t > PATIENCE_S:
            what = ", ".join(sorted({*self._once, *["pause"] * self._control.paused}))
            self._put(MarkEvent("warning", step, f"no {what}: {why}"))
            self._once.clear()
            self._control.request("resume")
            self._release(step)

    def _of(self, process: Process) -> list[int]:
        return self._asked.setdefault(process.path, [0] * mapped.REQUEST)

    def _ask(self, process: Process, at: int) -> None:
        asked = self._of(process)
        asked[0] = at
        self._write(process.path, asked)

    def _write(self, path: Path, asked: list[int]) -> None:
        with contextlib.suppress(OSError):  # it has ended
            mapped.ask(str(path), asked)
