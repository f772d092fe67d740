"""Times Python's garbage collections, without code in Python that runs during one, and runs them at chosen steps.

A collection holds the interpreter lock, so it stops the training whichever thread starts it.

An exception that a signal handler raises in a callback of the collector is lost, Ctrl-C among them. So the callback is
made of functions in C, which append the time of each begin and end to a list.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from .exceptions import Dropped
from .library import gc, time
from .phases import OTHER

# Collections that are kept until they are read.
MOST = 4096


class Pauses(NamedTuple):
    """Number of collections, their total time and the longest one, in nanoseconds."""

    number: int = 0
    ns: int = 0
    longest_ns: int = 0


class Garbage:
    """Times the collections between `begin` and `end`. every_steps: see `schedule`."""

    def __init__(self) -> None:
        self.every_steps = 0
        self._was_enabled = False
        self._begins: deque[int] = deque(maxlen=MOST)
        self._ends: deque[int] = deque(maxlen=MOST)
        # The collector calls it with "start" or "stop" and a dictionary, which is then the default of `getattr`.
        moments = {"start": property(_stamps(self._begins)), "stop": property(_stamps(self._ends))}
        self._callback = partial(getattr, type("Moments", (), {"__slots__": (), **moments})())

    def begin(self) -> None:
        """Begin; safe to call twice."""
        if self._callback not in gc.callbacks:
            gc.callbacks.append(self._callback)

    def end(self) -> None:
        """End, and leave collecting to Python; safe to call twice or without `begin`."""
        self.schedule(0)
        with Dropped(ValueError):
            gc.callbacks.remove(self._callback)

    def schedule(self, every_steps: int) -> None:
        """Collect only after every so many steps; 0: as Python did before."""
        if every_steps and not self.every_steps:
            self._was_enabled = gc.isenabled()
            gc.disable()
        elif self.every_steps and not every_steps and self._was_enabled:
            gc.enable()
        self.every_steps = every_steps

    def after_step(self, step: int, enter: Callable[[int], None] = lambda phase: None) -> None:
        """Collect if it is due after a step. enter: of the clock, on which the time counts as `other`."""
        if self.every_steps and not step % self.every_steps:
            enter(OTHER)
            gc.collect()

    def take(self) -> Pauses:
        """The collections since the last call."""
        begins, ends = list(self._begins), list(self._ends)
        self._begins.clear()
        self._ends.clear()
        # Of the first one, only the end may be known, and only the begin of the last one.
        while begins and ends and begins[-1] > ends[-1]:
            begins.pop()
        spent = [end - begin for begin, end in zip(reversed(begins), reversed(ends))]
        return Pauses(len(spent), sum(spent), max(spent, default=0))


def _stamps(times: deque[int]) -> Callable[[Any], Any]:
    """A function in C that ignores its argument and appends the present time."""
    return partial(next, map(times.append, iter(time.perf_counter_ns, None)))
