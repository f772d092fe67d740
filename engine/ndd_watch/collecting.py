"""Looks twice at what a process keeps within one evaluation whose memory grows, as where it collects all outputs.

An evaluation may end the run before it is over, so what was found is told at once.
"""

from __future__ import annotations

import sys
from typing import Any, Callable

from .clock import now
from .holders import LEAST_LENGTH, Holders

# From one question for the memory to the next one, and bytes by which it has grown before each look.
EACH_NS, GROWN = 250_000_000, 24 << 20
# Batches from the first look to the second, and evaluations that are looked at without a result.
APART, ATTEMPTS = 4, 3
# How long a profile waits for the second look, which it would slow down.
PATIENCE_NS = 5 * 10**9
# The first look remembers no shorter lists.
LEAST_BATCHES = LEAST_LENGTH + 1


class Collecting:
    """holders: makes what looks, see `Holders`. used: bytes in use. put: records the fields of a `holders` event.

    apart: does something such that its time belongs to nothing that is measured.
    """

    def __init__(
        self,
        holders: Callable[[], Holders],
        used: Callable[[], int | None],
        put: Callable[[dict[str, Any]], None],
        apart: Callable[[Callable[[], None]], None],
    ) -> None:
        self._holders, self._used, self._put, self._apart = holders, used, put, apart
        # Evaluations that may still be looked at, batches so far, when the memory is asked for, and what it was then.
        self._left, self._batches, self._due = ATTEMPTS, 0, 0
        self._base: int | None = None
        # Of the first look: what looks, the memory then, and the batch from which on the second one comes.
        self._looking: Holders | None = None
        self._before = self._apart_from = 0
        # A profile of the evaluation waits for the second look until then.
        self.until = 0

    def begins(self) -> None:
        """An evaluation begins."""
        self._batches, self._due, self._base, self._looking = 0, now() + EACH_NS, None, None
        self.until = 0

    def goes_on(self, t: int) -> None:
        """One of its batches is over, at t."""
        self._batches += 1
        if t < self._due or not self._left:
            return
        self._due = t + EACH_NS
        used = self._used()
        if used is None:
            return
        if self._base is None or used < self._base:
            self._base = used
        elif self._looking is None:
            if self._batches > LEAST_BATCHES and used - self._base >= GROWN:
                self._apart(self._first)
        elif used - self._before >= GROWN and self._batches >= self._apart_from:
            self._apart(self._second)
        elif used < self._before - GROWN:  # what had grown is gone
            self._looking = None

    def _first(self) -> None:
        self._left -= 1
        self._looking = self._holders()
        self._looking.look(self._batches, sys._getframe())
        self._apart_from, self.until = self._batches + APART, now() + PATIENCE_NS
        self._before = self._used() or 0

    def _second(self) -> None:
        looking, used = self._looking, self._used()
        if looking is None or used is None:
            return
        found = looking.look(self._batches, sys._getframe())
        self._looking, self.until = None, 0
        if found is None or not found["steps"]:
            return
        if found["holders"]:
            self._left = 0
        grown, gradients = max(used - self._before, 0), bool(sys.modules["torch"].is_grad_enabled())
        self._put({**found, "inside": "evaluate", "grown_bytes": grown, "gradients": gradients})

    def ends(self) -> None:
        """It ends."""
        self._looking = None
