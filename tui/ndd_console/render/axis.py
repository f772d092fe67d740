"""Axes of plots: scales and ticks, in a unit that suits the largest value."""

from __future__ import annotations

import math
from typing import NamedTuple

from ndd_console.words.figures import Kind

_TIME_STEPS = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600,
    7200, 3 * 3600, 6 * 3600, 12 * 3600, 86400, 2 * 86400, 5 * 86400, 10 * 86400, 20 * 86400, 50 * 86400, 100 * 86400,
)  # fmt: skip
_TIME_UNITS = (
    (86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"),
)  # fmt: skip
_SIZE_UNITS = ((1024.0**4, "TiB"), (1024.0**3, "GiB"), (1024.0**2, "MiB"), (1024.0, "KiB"), (1.0, "B"))
_RATIOS = (
    0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0, 2.5, 3.0, 4.0, 6.0, 10.0, 20.0, 50.0,
)  # fmt: skip


class Axis(NamedTuple):
    """A scale from `low` to `high`. ticks: (value, label). unit: the unit of the labels."""

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    unit: str
    log: bool = False

    def place(self, value: float) -> float:
        """The position of a value from 0 (low) to 1 (high), clamped to that range."""
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(max(value, low))
        return min(max((value - low) / (high - low), 0.0), 1.0) if high > low else 0.5


def time_axis(length_s: float) -> Axis:
    """0 to the end of the run."""
    length_s = max(length_s, 0.001)
    step = next((item for item in _TIME_STEPS if length_s / item <= 8), length_s / 8)
    scale, unit = next(pair for pair in _TIME_UNITS if step >= pair[0])
    count = int(length_s / step + 1e-9)
    ticks = tuple((index * step, f"{index * step / scale:g} {unit}") for index in range(count + 1))
    return Axis(0.0, length_s, ticks, unit)


def value_axis(low: float, high: float, kind: Kind, unit: str = "", log: bool = False) -> Axis:
    """A scale from a round value at or below `low` to one at or above `high`, with about five ticks."""
    scale, unit = _unit(max(abs(low), abs(high)), kind, unit)
    if log and 0 < low < high:
        return _log_axis(low, high, scale, unit)
    if high <= low:  # constant: leave room above and below
        room = abs(high) * 0.5 or 1.0
        low, high = (0.0, high * 1.5) if high > 0 else (low - room, high + room)
    fifth = (high - low) / scale / 5
    power = 10.0 ** math.floor(math.log10(fifth))
    step = scale * next(factor * power for factor in (1, 2, 5, 10) if factor * power >= fifth * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple((index * step, _label(index * step / scale)) for index in range(first, last + 1))
    return Axis(first * step, last * step, ticks, unit)


def _log_axis(low: float, high: float, scale: float, unit: str) -> Axis:
    first, last = math.floor(math.log10(low / scale)), math.ceil(math.log10(high / scale))
    factors = (1,) if last - first > 3 else (1, 2, 5)
    values = [factor * 10.0**power * scale for power in range(first - 1, last + 1) for factor in factors]
    below = max((value for value in values if value <= low * (1 + 1e-9)), default=low)
    above = min((value for value in values if value >= high * (1 - 1e-9)), default=high)
    inside = [value for value in values if below <= value <= above]
    ticks = inside[:: max(-(-len(inside) // 6), 1)]
    return Axis(below, above, tuple((value, _label(value / scale)) for value in ticks), unit, log=True)


def ratio_axis(low: float, high: float) -> Axis:
    """A logarithmic scale around 1 for ratios from `low` to `high`."""
    low, high = min(0.85, low / 1.04), max(1.25, high * 1.04)
    ticks = tuple((value, f"{value:g}x") for value in _RATIOS if low <= value <= high)
    return Axis(low, high, ticks, "", log=True)


def _unit(largest: float, kind: Kind, unit: str) -> tuple[float, str]:
    """(value of one unit, its name)."""
    if kind == "share":
        return 0.01, "%"
    if kind == "bytes":
        return next((pair for pair in _SIZE_UNITS if largest >= pair[0]), _SIZE_UNITS[-1])
    if kind == "seconds":  # 90 s reads better than 1.5 min
        fitting = (pair for pair in _TIME_UNITS if largest >= pair[0] * (2 if pair[0] > 1 else 1))
        return next(fitting, _TIME_UNITS[-1])
    return 1.0, unit


def _label(value: float) -> str:
    if value and not 1e-4 <= abs(value) < 1e15:
        return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e+")
    return f"{value:,.10g}"
