"""Figures as text: shares, ratios with their intervals, and the formats of plots."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Literal

from ndd_engine.text import MISSING, duration, finite, number, size

# How values are formatted; "plain" values carry a unit of their own.
Kind = Literal["plain", "share", "bytes", "seconds"]


def ns(value: object) -> str:
    """Nanoseconds as a duration."""
    known = finite(value)
    return MISSING if known is None else duration(known * 1e-9)


def small(value: float | None, digits: int = 3) -> str:
    """A number that may be tiny: 0.832, 0.0001, 3e-06."""
    if value is None or value == 0 or not abs(value) < 1e-3:
        return number(value, digits)
    return f"{value:.3g}"


def percent(share: float | None) -> str:
    """A share as a percentage: "57 %"; small shares: "<1 %"."""
    share = finite(share)
    if share is None:
        return MISSING
    return "<1 %" if 0 < share < 0.005 else f"{share * 100:.0f} %"


def share_text(share: float | None) -> str:
    """A share as a percentage, with one more digit below 10 %: "57 %", "1.2 %", "<0.1 %"."""
    if share is None:
        return MISSING
    if 0 < share < 0.0005:
        return "<0.1 %"
    return f"{share * 100:.0f} %" if share >= 0.0995 or share == 0 else f"{share * 100:.1f} %"


def formatter(kind: Kind, unit: str = "") -> Callable[[float | None], str]:
    """A function that formats one value with its unit."""
    if kind == "plain":
        return lambda value: small(value, 4) + (f" {unit}" if unit and value is not None else "")
    return {"share": share_text, "bytes": size, "seconds": duration}[kind]


def times(ratio: float) -> str:
    """A speed ratio with three digits: "1.42x", "12.3x"."""
    return f"{ratio:.2f}x" if ratio < 10 else f"{ratio:.3g}x"


def at_most(ceiling: float) -> str:
    """ "at most 1.42x", "at most 2.3x": an upper bound needs no more digits."""
    return f"at most {ceiling:.1f}x" if ceiling >= 2 else f"at most {times(ceiling)}"


def interval_text(ratio: float | None, low: float | None, high: float | None) -> str:
    """ "1.42x (1.35 to 1.49)"; "" without a ratio."""
    if ratio is None:
        return ""
    if low is None or high is None:
        return times(ratio)
    return f"{times(ratio)} ({times(low)[:-1]} to {times(high)[:-1]})"


def moment(t: float | None) -> str:
    """Local date and time: "2026-03-14 15:09"."""
    with contextlib.suppress(ValueError, OverflowError, OSError):  # not a time
        return MISSING if t is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(t))
    return MISSING
