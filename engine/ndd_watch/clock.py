"""The clock of a watched process. Exactly one phase is current at any time, so the phases add up to the wall time.

The state is in plain lists, and what is called in every step repeats the four lines of `enter` instead of calling it:
between the operations of a step, each Python function costs about a microsecond.
"""

from __future__ import annotations

import time

PHASES = (
    "data_wait", "to_device", "forward", "loss", "backward", "clip", "optimizer", "zero_grad", "log", "evaluate",
    "checkpoint", "other",
)  # fmt: skip
(
    DATA_WAIT, TO_DEVICE, FORWARD, LOSS, BACKWARD, CLIP, OPTIMIZER, ZERO_GRAD, LOG, EVALUATE, CHECKPOINT, OTHER,
) = range(12)  # fmt: skip

now = time.perf_counter_ns

# Indices of S. LAST: time of the last phase change. CURRENT: the current phase. TIMED: id of the thread whose phases
# are timed; 0 in steps that are timed as a whole, -1 during an evaluation. BASE: the phase outside all hooks.
# TRAINER: id of the thread that trains; 0 before the first backward pass.
LAST, CURRENT, TIMED, BASE, TRAINER = range(5)
S = [now(), OTHER, 0, OTHER, 0]

ZEROS = [0] * len(PHASES)
# The current step, by phase, in nanoseconds.
row = list(ZEROS)
# The current window: time outside steps by phase, rows of steps, and the time of steps whose phases were not timed.
rest = list(ZEROS)
rows: list[list[int]] = []
wholes: list[int] = []
# When the window began.
begun = [S[LAST]]


def enter(phase: int) -> None:
    """Switch to a phase."""
    t = now()
    row[S[CURRENT]] += t - S[LAST]
    S[LAST] = t
    S[CURRENT] = phase


def take() -> tuple[int, list[list[int]], list[int], list[int]]:
    """(wall time, rows, wholes, rest) of the window, in nanoseconds; begins the next window.

    Rows, wholes and rest add up to the wall time. Time of an unfinished step counts as rest.
    """
    enter(S[CURRENT])
    taken = S[LAST] - begun[0], rows[:], wholes[:], [a + b for a, b in zip(rest, row)]
    clear()
    return taken


def clear() -> None:
    """Begin a window at the last phase change."""
    row[:], rest[:] = ZEROS, ZEROS
    rows.clear()
    wholes.clear()
    begun[0] = S[LAST]
