"""What the console asks for: a pause, a checkpoint, an evaluation, a profiler capture, a look at what a process keeps.

The console writes integers into the mapped memory, see `mapped`. The process compares them once a window, and obeys at
the end of a step. While nothing is asked for, nothing of this is in a step.
"""

from __future__ import annotations

import sys
from typing import Callable

from . import clock
from .clock import CURRENT, DONE, LAST, S, gpu, now, rest
from .frameworks import Wishes
from .library import os, time
from .mapped import AT, HOLDER, PAUSED, REQUEST
from .steps import Steps

# From one look to the next during a pause.
POLL_S = 0.05


class Requests:
    """capture: called for a capture, and kept for a look at what is kept. wishes: what is asked of a framework."""

    def __init__(
        self, steps: Steps, capture: Callable[[], None], kept: Callable[[], None], wishes: Wishes
    ) -> None:
        self._steps, self._capture, self._kept, self._wishes = steps, capture, kept, wishes
        self._done = [0] * REQUEST

    def look(self) -> None:
        """At the end of a window: is there a new request?"""
        if self._steps.gate is None and S[AT : AT + REQUEST].tolist() != self._done:
            self._steps.gate = self._obey

    def _obey(self, _done: int = 0) -> None:
        """At the end of each step, until the request is obeyed."""
        asked, before = S[AT : AT + REQUEST].tolist(), self._done
        if S[DONE] < asked[0] or self._steps.studying:
            return
        self._done, self._steps.gate = asked, None
        _, holder, *once = asked
        capture, checkpoint, evaluate, kept = (new != old for new, old in zip(once, before[2:]))
        if capture:
            self._capture()
        if kept:
            self._kept()
            # What it takes is in no step.
            t = now()
            rest[S[CURRENT]] += t - S[LAST]
            S[LAST] = t
        self._wishes.saves |= checkpoint
        self._wishes.evaluates |= evaluate
        if holder:
            self._pause(holder)

    def _pause(self, holder: int) -> None:
        """Wait until the console lets the training go on, or has disappeared. Signals arrive meanwhile."""
        self._steps.end_window()
        S[PAUSED] = 1
        try:
            while S[HOLDER] == holder and lives(holder):
                time.sleep(POLL_S)
        finally:
            # The pause is in no step and in no window.
            S[LAST] = now()
            clock.clear()
            gpu.drop()
            S[PAUSED] = 0


def lives(pid: int) -> bool:
    """Whether a process of this host runs; one that has ended and was not waited for does not."""
    try:
        if sys.platform == "linux":
            os.readlink(f"/proc/{pid}/exe")
        else:
            os.getpgid(pid)
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:  # it belongs to another user
        return True
    return True
