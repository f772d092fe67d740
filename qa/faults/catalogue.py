"""All cases of the suite."""

from __future__ import annotations

from .cases import Case
from .faulty import FAULTS
from .innocent import HEALTHY, INNOCENTS
from .on_gpu import GPU_CASES


def all_cases(gpu: bool = False) -> list[Case]:
    """Every case, in the order in which they run. gpu: also those that need a CUDA GPU."""
    return [*HEALTHY, *INNOCENTS, *FAULTS, *(GPU_CASES if gpu else ())]
