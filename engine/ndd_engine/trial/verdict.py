"""The verdict on a ratio with its interval. Screens, reports and tuning all use this function.

"faster" has an interval above 1 and a ratio above 1 + FLOOR, "slower" the reverse. "no difference" means that a speedup
of FLOOR or more is excluded. Everything else is "inconclusive".
"""

from __future__ import annotations

from typing import Literal

# Smaller differences do not count.
FLOOR = 0.02
# Level of the reported interval.
CONFIDENCE = 0.95

Call = Literal["faster", "no difference", "slower", "inconclusive"]
# Verdicts of a trial that found a difference.
DIFFERENT = frozenset({"faster", "slower"})


def judged(ratio: float, low: float, high: float) -> Call:
    """The verdict on a ratio with the interval low..high."""
    if low > 1 and ratio > 1 + FLOOR:
        return "faster"
    if high < 1 and ratio < 1 / (1 + FLOOR):
        return "slower"
    return "no difference" if high < 1 + FLOOR else "inconclusive"
