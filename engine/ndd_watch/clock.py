"""The clock of a watched process. Exactly one phase is current at any time, so the phases add up to the wall time.

The state is in memory that others can read, see `mapped`, and what is called in every step repeats the lines of `enter`
instead of calling it: between the operations of a step, each Python function costs about a microsecond.
"""

from __future__ import annotations

import time
from array import array
from typing import Callable

from .device import DeviceClock
from .mapped import (
    BASE,
    BEGUN,
    COLUMNS,
    CURRENT,
    DONE,
    LAST,
    LENGTHS_AT,
    MOST_LENGTHS,
    MOST_ROWS,
    REST,
    ROW,
    ROW_WIDTH,
    ROWS,
    ROWS_AT,
    TIMED,
    TRAINER,
    Memory,
)
from .phases import (
    BACKWARD,
    CHECKPOINT,
    CLIP,
    DATA_WAIT,
    EVALUATE,
    FORWARD,
    LOSS,
    NAMES,
    OPTIMIZER,
    OTHER,
    PHASES,
    TO_DEVICE,
    WAITING,
    ZERO_GRAD,
)

# What the hooks need of all this comes from here.
__all__ = [
    "BACKWARD", "BASE", "CHECKPOINT", "CLIP", "CURRENT", "DATA_WAIT", "DONE", "EVALUATE", "FORWARD", "LAST", "LOSS",
    "NAMES", "OPTIMIZER", "OTHER", "PHASES", "TIMED", "TO_DEVICE", "TRAINER", "WAITING", "ZERO_GRAD",
]  # fmt: skip

now = time.perf_counter_ns

memory = Memory()
# The integers of the memory; `row` and `rest` are parts of it.
S = memory.values
row, rest = S[ROW : ROW + COLUMNS], S[REST : REST + COLUMNS]
ZEROS = memoryview(array("q", [0] * COLUMNS))
# The clock of the GPU that the thread trains on. Where a phase changes, `mark` is called if the step has marks.
gpu = DeviceClock()
marks, mark = gpu.marks, gpu.mark


def enter(phase: int) -> None:
    """Switch to a phase."""
    t = now()
    row[S[CURRENT]] += t - S[LAST]
    S[LAST] = t
    S[CURRENT] = phase
    if marks:
        mark(phase)


def begin(thread: int) -> None:
    """The training begins, on this thread."""
    t = now()
    S[LAST] = S[BEGUN] = t
    S[CURRENT] = S[BASE] = OTHER
    S[TIMED] = S[TRAINER] = thread
    row[:] = rest[:] = ZEROS


def add_row() -> None:
    """Write the current step as a row."""
    count = S[ROWS]
    at = ROWS_AT + count % MOST_ROWS * ROW_WIDTH
    S[at] = S[DONE]
    S[at + 1 : at + ROW_WIDTH] = row
    S[ROWS] = count + 1


def take() -> tuple[int, list[int]]:
    """(wall time, rest) of the window, in nanoseconds; begins the next window.

    Rows, the lengths of steps without one, and rest add up to the wall time. Time of an unfinished step counts as rest.
    """
    enter(S[CURRENT])
    taken = S[LAST] - S[BEGUN], [a + b for a, b in zip(rest, row)]
    clear()
    return taken


def leave_out_rest() -> None:
    """Have no window contain what is no phase since the last step: the script's own work after its training."""
    enter(S[CURRENT])
    S[BEGUN] += row[OTHER]
    row[OTHER] = 0


def leave_out(work: Callable[[], None]) -> None:
    """Have no window contain the time of this work of ours."""
    enter(S[CURRENT])
    begin = S[LAST]
    try:
        work()
    finally:
        S[LAST] = now()
        S[BEGUN] += S[LAST] - begin


def clear() -> None:
    """Begin a window at the last phase change."""
    row[:] = rest[:] = ZEROS
    S[BEGUN] = S[LAST]


def lengths(begin: int) -> list[int]:
    """Nanoseconds of the steps from this number on; those that are left out are missing."""
    end = S[DONE]
    found = (S[LENGTHS_AT + step % MOST_LENGTHS] >> 1 for step in range(max(begin, end - MOST_LENGTHS), end))
    return [length for length in found if length]
