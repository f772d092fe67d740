"""All cases of the suite."""

from __future__ import annotations

from .cases import Case
from .faulty import FAULTS
from .innocent import HEALTHY, INNOCENTS


def all_cases() -> list[Case]:
    """Every case, in the order in which they run."""
    return [*HEALTHY, *INNOCENTS, *FAULTS]
