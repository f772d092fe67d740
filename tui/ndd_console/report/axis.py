"""Axes of plots: where the marks are and how values are written, in a unit that suits the largest of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ndd_console.view.findings import times
from ndd_console.view.learning import small
from ndd_engine.text import MISSING, duration, size

from .blocks import Kind

_TIME_STEPS = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600,
    7200, 3 * 3600, 6 * 3600, 12 * 3600, 86400, 2 * 86400, 5 * 86400, 10 * 86400, 20 * 86400, 50 * 86400, 100 * 86400,
)  # fmt: skip
_TIME_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"), (0.001, "ms"))


@dataclass(frozen=True, slots=True)
class Axis:
    """low, high: the values at its ends. ticks: (value, what is written there). unit: of what is written."""

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    unit: str
    log: bool = False

    def place(self, value: float) -> float:
        """Where a value lies, 0 (low) to 1 (high), outside of which nothing is drawn."""
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(max(value, low))
        return min(max((value - low) / (high - low), 0.0), 1.0) if high > low else 0.5


def share_text(share: float | None) -> str:
    """A share as a percentage, small ones with a digit more: "57 %", "1.2 %", "<0.1 %"."""
    if share is None:
        return MISSING
    if 0 < share < 0.0005:
        return "<0.1 %"
    return f"{share * 100:.0f} %" if share >= 0.0995 or share == 0 else f"{share * 100:.1f} %"


def written(kind: Kind, unit: str) -> Callable[[float | None], str]:
    """How single values of this kind are written, with their unit."""
    if kind == "share":
        return share_text
    if kind == "bytes":
        return size
    if kind == "seconds":
        return duration
    if kind == "ratio":
        return lambda value: MISSING if value is None else times(value)
    return lambda value: small(value, 4) + (f" {unit}" if unit and value is not None else "")


def time_axis(length_s: float) -> Axis:
    """0 to the end of the run."""
    length_s = max(length_s, 0.001)
    step = next((item for item in _TIME_STEPS if length_s / item <= 8), length_s / 8)
    scale, unit = next((pair for pair in _TIME_UNITS if step >= pair[0]), _TIME_UNITS[-1])
    count = int(length_s / step + 1e-9)
    ticks = tuple((index * step, f"{index * step / scale:g} {unit}") for index in range(count + 1))
    return Axis(0.0, length_s, ticks, unit)


def value_axis(low: float, high: float, kind: Kind, unit: str, log: bool = False) -> Axis:
    """From a round value at or below `low` to one at or above `high`, with a handful of marks."""
    scale, unit = _unit(max(abs(low), abs(high)), kind, unit)
    if log and low > 0 and high > low:
        return _log_axis(low, high, scale, unit)
    if high <= low:
        # All values are the same: some room above and below.
        room = abs(high) * 0.5 or 1.0
        low, high = (0.0, high * 1.5) if high > 0 else (low - room, high + room)
    step = _round_up((high - low) / scale / 5) * scale
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple((index * step, _figure(index * step / scale)) for index in range(first, last + 1))
    return Axis(first * step, last * step, ticks, unit)


def _log_axis(low: float, high: float, scale: float, unit: str) -> Axis:
    first, last = math.floor(math.log10(low / scale)), math.ceil(math.log10(high / scale))
    factors = (1,) if last - first > 3 else (1, 2, 5)
    values = [
        factor * 10.0**power * scale for power in range(first - 1, last + 1) for factor in factors
    ]  # fmt: skip
    below = max((value for value in values if value <= low * (1 + 1e-9)), default=low)
    above = min(
        (value for value in [*values, 10.0**last * scale] if value >= high * (1 - 1e-9)), default=high
    )
    inside = [value for value in values if below <= value <= above]
    thin = inside[:: max(-(-len(inside) // 6), 1)]
    return Axis(below, above, tuple((value, _figure(value / scale)) for value in thin), unit, log=True)


def _unit(largest: float, kind: Kind, unit: str) -> tuple[float, str]:
    if kind == "share":
        return 0.01, "%"
    if kind == "bytes":
        for power, name in ((4, "TB"), (3, "GB"), (2, "MB"), (1, "KB")):
            if largest >= 1024**power:
                return 1024.0**power, name
        return 1.0, "B"
    if kind == "seconds":
        for scale, name in (
            (86400.0, "d"),
            (3600.0, "h"),
            (60.0, "min"),
            (1.0, "s"),
            (1e-3, "ms"),
            (1e-6, "µs"),
        ):
            if largest >= scale * (2 if scale > 1 else 1):
                return scale, name
        return 1e-9, "ns"
    return 1.0, unit


def _round_up(value: float) -> float:
    """The next of 1, 2, 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= value * (1 - 1e-9))


def _figure(value: float) -> str:
    if value == 0:
        return "0"
    if abs(value) >= 1e15 or abs(value) < 1e-4:
        return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e+")
    return f"{value:,.10g}"
