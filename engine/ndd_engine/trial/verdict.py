"""The verdict on a ratio with its interval. Screens, reports and tuning all use this function.

A gain has an interval above 1 and a ratio above 1 + FLOOR, a loss the reverse. "No gain" means that a gain of FLOOR
or more is excluded. Everything else is inconclusive.
"""

from __future__ import annotations

from typing import Literal

# Smaller differences do not count.
FLOOR = 0.02
# Level of the reported interval.
CONFIDENCE = 0.95

Call = Literal["gain", "no gain", "loss", "inconclusive"]
# Verdicts that are displayed in other words. Records before 0.5 say "undecided".
SHOWN = {"no gain": "no significant gain", "undecided": "inconclusive"}


def judged(ratio: float, low: float, high: float) -> Call:
    """The verdict on a ratio with the interval low..high."""
    if low > 1 and ratio > 1 + FLOOR:
        return "gain"
    if high < 1 and ratio < 1 / (1 + FLOOR):
        return "loss"
    return "no gain" if high < 1 + FLOOR else "inconclusive"


def shown(verdict: str) -> str:
    """A verdict as it is displayed."""
    return SHOWN.get(verdict, verdict)
