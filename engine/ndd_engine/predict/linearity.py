"""Fits a line through the traces of a step at two micro-batches, and checks it at a third."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from ndd_engine.measure.memory import is_out_of_memory
from ndd_engine.text import size

from .memory import HOST_GRANULE, MANY, ONE
from .rules import KIB
from .trace import Family, Trace, fit

# Seconds after which no larger micro-batch is recorded.
RECORD_S = 3.0
# Maximum difference between a third recording and the line through two, as a share of the memory and in bytes.
LINEAR, LINEAR_BYTES = 0.01, 256 * KIB
UNCHECKED = "no recording at a third micro-batch confirms that memory grows linearly with it"


def alike(trace: Callable[[int], Trace], at: Sequence[int]) -> Family:
    """Fit the first two neighbouring sizes whose traces match, or the last two. A single size is used for all sizes.

    Libraries may select other kernels for very small batches. A recording at a third size must confirm the line: an
    earlier one, or the next; otherwise the next two are fitted. Raises what the first two recordings raise.
    """
    if len(at) == 1:
        only = trace(at[0])
        return fit(only, only, (at[0], at[0] + 1))
    recorded = [(at[0], trace(at[0]))]
    found = None
    for above in at[1:]:
        begin = time.perf_counter()
        try:
            large = trace(above)
        except RuntimeError as error:
            if found is None or not is_out_of_memory(error):
                raise
            break
        why = UNCHECKED
        if found is not None and found.aligned:
            why = departs(found, large, above)
            if not why:
                return replace(found, nonlinear="")
        below, small = recorded[-1]
        found = fit(small, large, (below, above))
        if found.aligned and any(not departs(found, other, micro) for micro, other in recorded[:-1]):
            return found
        found = replace(found, nonlinear=why)
        if time.perf_counter() - begin > RECORD_S:
            break
        recorded.append((above, large))
    assert found is not None  # `at` has at least two sizes
    # With fewer than three sizes there is nothing left to predict.
    return found if len(at) > 2 else replace(found, nonlinear="")


def departs(family: Family, recorded: Trace, micro: int) -> str:
    """How far a recording at a third size is from the fitted line, in words, or "" if it confirms it."""
    fitted = family.trace(micro)
    for mark in (ONE, MANY):
        line, real = (trace.until(mark).peak(HOST_GRANULE) for trace in (fitted, recorded))
        if abs(line - real) > max(LINEAR * real, LINEAR_BYTES):
            return (
                f"the memory of a step does not grow linearly with the micro-batch: at {micro} it takes "
                f"{size(real)} instead of {size(line)}"
            )
    return ""
