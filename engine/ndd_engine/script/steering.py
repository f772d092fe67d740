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

from ndd_engine.record.derive import obeyed
from ndd_engine.record.events import Event, MarkEvent, RunEvent
from ndd_engine.run.control import Control, pause_mark, resume_mark
from ndd_engine.text import counted
from ndd_watch import mapped

from .records import Process

# What is asked for once, in the order of the counters in the memory.
ONCE = ("kernels", "checkpoint", "evaluate")
# Seconds in which every rank sees a request: it looks at the end of a window. From it to that until all of them pause.
SEEN_S, PATIENCE_S = 4.0, 30.0
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
        # By process: what it was asked for so far, as in its memory.
        self._asked: dict[Path, list[int]] = {}
        self._once: set[str] = set()
        # On the monotonic clock: when ranks were first missing for a request, when the present pause was asked for, and
        # when all processes had begun it; 0.0 otherwise.
        self._missing_t = self._asked_t = self._began_t = 0.0
        # Steps of the ranks in a second, and a time with the steps until then.
        self._rate, self._before = 0.0, (0.0, 0)

    def look(self, processes: Sequence[Process], run: RunEvent | None, step: int) -> None:
        """Pass on what was requested. processes: that train on this host; run, step: of the script."""
        self._control.wait(0.0)  # forget processes that held a pause and have exited
        if not processes:
            return  # what was requested waits for them
        self._once |= self._control.take_once()
        if run is not None and self._every:
            self._look_for_a_capture(run, step)
        ranks = [process for process in processes if process.name.startswith("rank-")]
        self._measure(max(process.done for process in ranks or processes))
        wants, apart = self._control.paused and not self._control.stopping, self._apart(run, len(ranks))
        if apart and (wants or self._once):
            self._wait_for_ranks(apart, step)
            return
        self._missing_t = 0.0
        at = 0
        if len(ranks) > 1:
            at = max(process.done for process in ranks) + math.ceil(self._rate * SEEN_S) + 2
        if self._once:
            for process in ranks or processes[:1]:
                for place, action in enumerate(ONCE, 2):
                    self._of(process)[place] += action in self._once
                self._ask(process, at)
            self._once.clear()
        if wants:
            self._pause(processes, at, step)
        elif self._asked_t:
            self._release(step)

    def _look_for_a_capture(self, run: RunEvent, step: int) -> None:
        """Ask for a periodic capture if it is due."""
        if not run.device.startswith("cuda"):
            self._every = 0
            text = "no periodic profiler captures: the script does not train on a GPU; key k takes one"
            self._put(MarkEvent("note", step, text))
        elif step >= self._due:
            self._due = (step // self._every + 1) * self._every
            self._once.add("kernels")

    def _pause(self, processes: Sequence[Process], at: int, step: int) -> None:
        for process in processes:
            if self._of(process)[1] == 0:
                self._of(process)[1] = os.getpid()
                self._ask(process, at)
        now = time.monotonic()
        self._asked_t = self._asked_t or now
        if self._began_t:
            return
        if all(process.paused for process in processes):
            self._began_t = now
            self._put(MarkEvent("status", step, "", {"status": "paused"}))
            self._put(pause_mark(step, list(self._control.holders)))
        elif now - self._asked_t > PATIENCE_S + at / max(self._rate, 1e-9) * (at > 0):
            self._refuse("it does not reach the end of a step", step)

    def _release(self, step: int) -> None:
        """Let all of them train on."""
        for path, asked in self._asked.items():
            if asked[1]:
                asked[1] = 0
                self._write(path, asked)
        if self._began_t:
            self._put(MarkEvent("status", step, "", {"status": "training"}))
            self._put(resume_mark(step, time.monotonic() - self._began_t))
        self._asked_t = self._began_t = 0.0

    def _apart(self, run: RunEvent | None, here: int) -> int:
        """The number of ranks that exchange data with those of this host, and are not seen."""
        parallel = {} if run is None else run.config.get("parallel") or {}
        return int(parallel.get("ranks") or 1) - max(here, 1)

    def _wait_for_ranks(self, missing: int, step: int) -> None:
        """All ranks have to obey after the same step."""
        now = time.monotonic()
        self._missing_t = self._missing_t or now
        if now - self._missing_t > SEEN_S:
            self._refuse(f"{counted(missing, 'rank')} cannot be asked: on other hosts, or not observed", step)

    def _refuse(self, why: str, step: int) -> None:
        """Nothing of what was requested is done."""
        what = ", ".join(sorted({*self._once, *["pause"] * self._control.paused}))
        self._put(MarkEvent("warning", step, f"no {what}: {why}"))
        self._once.clear()
        self._control.request("resume")
        self._release(step)

    def _measure(self, done: int) -> None:
        now, (t, before) = time.monotonic(), self._before
        if now - t >= 1.0:
            self._rate, self._before = max(done - before, 0) / (now - t), (now, done)

    def _of(self, process: Process) -> list[int]:
        return self._asked.setdefault(process.path, [0] * mapped.REQUEST)

    def _ask(self, process: Process, at: int) -> None:
        asked = self._of(process)
        asked[0] = at
        self._write(process.path, asked)

    def _write(self, path: Path, asked: list[int]) -> None:
        with contextlib.suppress(OSError):  # it has ended
            mapped.ask(str(path), asked)
