"""The clock of a watched process. Exactly one phase is current at any time, so the phases add up to the wall time.

The state is in plain lists, and what is called in every step repeats the four lines of `enter` instead of calling it:
between the operations of a step, each Python function costs about a microsecond.
"""

from __future__ import annotations

import time
from functools import wraps
from typing import Any, Callable

PHASES = (
    "data_wait", "to_device", "forward", "loss", "backward", "clip", "optimizer", "zero_grad", "log", "evaluate",
    "checkpoint", "other",
)  # fmt: skip
(
    DATA_WAIT, TO_DEVICE, FORWARD, LOSS, BACKWARD, CLIP, OPTIMIZER, ZERO_GRAD, LOG, EVALUATE, CHECKPOINT, OTHER,
) = range(12)  # fmt: skip

# Added to a phase while it waits for other ranks.
WAITING = len(PHASES)
# By index: the phases, and their waiting for other ranks.
NAMES = (*PHASES, *(f"{name}/exchange" for name in PHASES))

now = time.perf_counter_ns

# Indices of S. LAST: time of the last phase change. CURRENT: the current phase, plus WAITING while it waits for other
# ranks. TIMED: id of the thread whose phases are timed; 0 in steps that are timed as a whole, -1 during an evaluation.
# BASE: the phase outside all hooks. TRAINER: id of the thread that trains; 0 before the first backward pass.
LAST, CURRENT, TIMED, BASE, TRAINER = range(5)
S = [now(), OTHER, 0, OTHER, 0]

ZEROS = [0] * len(NAMES)
# The current step, by phase without its waiting for other ranks, and then that waiting; nanoseconds.
row = list(ZEROS)
# The current window: time outside steps by phase, rows of steps with the numbers of steps before each, and the time of
# steps whose phases were not timed.
rest = list(ZEROS)
rows: list[list[int]] = []
numbers: list[int] = []
wholes: list[int] = []
# When the window began.
begun = [S[LAST]]


def enter(phase: int) -> None:
    """Switch to a phase."""
    t = now()
    row[S[CURRENT]] += t - S[LAST]
    S[LAST] = t
    S[CURRENT] = phase


def closure_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """The closure of an optimizer: the script's own code, whose time is `other` where no hook takes it."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        enter(OTHER)
        try:
            return function(*args, **kwargs)
        finally:
            enter(OPTIMIZER)

    return call


def take() -> tuple[int, list[list[int]], list[int], list[int], list[int]]:
    """(wall time, rows, wholes, rest) of the window, in nanoseconds, and numbers; begins the next window.

    Rows, wholes and rest add up to the wall time. Time of an unfinished step counts as rest.
    """
    enter(S[CURRENT])
    taken = S[LAST] - begun[0], rows[:], wholes[:], [a + b for a, b in zip(rest, row)], numbers[:]
    clear()
    return taken


def clear() -> None:
    """Begin a window at the last phase change."""
    row[:], rest[:] = ZEROS, ZEROS
    rows.clear()
    numbers.clear()
    wholes.clear()
    begun[0] = S[LAST]
