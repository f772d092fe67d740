"""The report as one HTML file: no script, no network, foreign text escaped; templates draw plots as inline SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cache
from itertools import groupby
from typing import NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ndd_console.words.blocks import (
    COMMAND,
    PLACE,
    Curves,
    Intervals,
    Kind,
    Page,
    Spans,
    Stack,
    Time,
    clip,
    formatter,
    interval_text,
    safe,
)
from ndd_engine.text import duration, number, times

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

WIDTH = 760
_RIGHT = WIDTH - 14
_CHAR = 6.1  # width of a character of an axis label
_HOVER = 64  # columns that show their values under the pointer
# (x, text, anchor)
Label = tuple[float, str, str]
# (x, width, text)
Area = tuple[float, float, str]


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


class TimePlot:
    """The time axis. `left` to the right edge and `top` to `bottom` enclose the data; `height` is that of the image."""

    def __init__(self, time: Time, height: float, left: float, top: float, below: float) -> None:
        self.time, self.axis = time, time_axis(time.length_s)
        self.left, self.right, self.top, self.bottom = left, _RIGHT, top, top + height
        self.height = self.bottom + below

    def x(self, seconds: float) -> float:
        return self.left + (self.right - self.left) * self.axis.place(seconds)

    @property
    def time_ticks(self) -> list[Label]:
        places = ((self.x(value), label) for value, label in self.axis.ticks)
        return [(x, label, "middle" if x + _half(label) <= WIDTH else "end") for x, label in places]


class ValuePlot(TimePlot):
    """Values over time, with the optimizer steps below the time axis."""

    hover: list[Area]

    def __init__(self, time: Time, height: float, values: Axis) -> None:
        super().__init__(time, height, left=62, top=22, below=38)
        self.values = values
        # A long unit starts at the edge of the plot instead of ending there.
        self.unit_anchor = "end" if 2 * _half(values.unit) < self.left - 8 else "start"

    def y(self, value: float) -> float:
        return self.bottom - (self.bottom - self.top) * self.values.place(value)

    def path(self, points: Iterable[tuple[float, float]]) -> Markup:
        return Markup(" ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points))

    @property
    def step_ticks(self) -> list[tuple[float, str]]:
        """The optimizer steps under the time ticks, "" where there is no room."""
        found = ((self.x(value), self._step_at(value)) for value, _ in self.axis.ticks)
        return _spaced((x, number(step)) for x, step in found if step is not None)

    def _step_at(self, seconds: float) -> float | None:
        """The last optimizer step completed by then."""
        return next((step for x, step in reversed(self.time.steps) if x <= seconds + 1e-9), None)

    def _hover(self, say: Callable[[float, float], str]) -> list[Area]:
        """Columns with their values as text. say(begin, end) returns the text, "" for none."""
        out: list[Area] = []
        width = (self.right - self.left) / _HOVER
        for index in range(_HOVER):
            begin, end = (self.axis.high * edge / _HOVER for edge in (index, index + 1))
            if text := say(begin, end):
                step = self._step_at(end)
                at = f", step {number(step)}" if step is not None else ""
                when = f"after {duration((begin + end) / 2)}{at}"
                out.append((self.left + index * width, width, f"{when}: {text}"))
        return out


class CurvesPlot(ValuePlot):
    def __init__(self, block: Curves) -> None:
        values = [value for line in block.lines for value in line.values]
        low, high = min(values), max(values)
        zero = block.zero and low > 0 and not block.log
        axis = value_axis(0.0 if zero else low, high, block.kind, block.unit, block.log)
        super().__init__(block.time, block.height, axis)
        form = formatter(block.kind, block.unit)

        def values_in(begin: float, end: float) -> str:
            found = ((line.name, [y for x, y in line.points if begin <= x < end]) for line in block.lines)
            return ", ".join(f"{name} {form(sum(inside) / len(inside))}" for name, inside in found if inside)

        self.hover = self._hover(values_in)

    def band(self, piece: tuple[tuple[float, float, float], ...]) -> Markup:
        upper = [(x, high) for x, _, high in piece]
        return self.path(upper + [(x, low) for x, low, _ in reversed(piece)])


class StackPlot(ValuePlot):
    """areas: (colour, path) from the top layer down. names: (x, y, name) of layers with enough room."""

    def __init__(self, block: Stack) -> None:
        super().__init__(block.time, 210, value_axis(0.0, block.top, "share"))
        found = groupby(enumerate(block.slots), key=lambda pair: pair[1] - pair[0])
        runs = [[slot for _, slot in group] for _, group in found]
        self.areas: list[tuple[str, Markup]] = []
        self.names: list[tuple[float, float, str]] = []
        low = dict.fromkeys(block.slots, 0.0)
        for layer in block.layers:
            high = {slot: low[slot] + layer.values.get(slot, 0.0) for slot in block.slots}
            # Areas reach down to 0 and are drawn from the top: each edge is drawn once.
            path = ""
            for run in runs:
                corners = ((self.y(high[slot]), self.x((slot + 1) * block.width_s)) for slot in run)
                edge = "".join(f"V{y:.1f}H{x:.1f}" for y, x in corners)
                path += f"M{self.x(run[0] * block.width_s):.1f},{self.bottom:.1f}{edge}V{self.bottom:.1f}Z"
            self.areas.insert(0, (layer.colour, Markup(path)))
            self._name(layer.name, low, high, block)
            low = high
        form = formatter("share")

        def shares_in(begin: float, end: float) -> str:
            slots = [s for s in block.slots if begin < (s + 1) * block.width_s and s * block.width_s < end]
            means = [(layer.name, layer.mean(slots)) for layer in reversed(block.layers)]
            return ", ".join(f"{name} {form(share)}" for name, share in means if share)

        self.hover = self._hover(shares_in)

    def _name(self, name: str, low: dict[int, float], high: dict[int, float], block: Stack) -> None:
        """Place a layer's name where the layer is thick, preferably in the middle."""
        shown = clip(name, 24)
        each = (self.right - self.left) * block.width_s / self.axis.high
        count = math.ceil((2 * _half(shown) + 8) / each)
        best = (0.0, 0.0, -math.inf)
        for index in range(len(block.slots) - count + 1):
            slots = block.slots[index : index + count]
            upper, lower = max(self.y(high[slot]) for slot in slots), min(self.y(low[slot]) for slot in slots)
            x = self.left + each * (slots[0] + slots[-1] + 1) / 2
            score = lower - upper - 0.05 * abs(x - WIDTH / 2)
            if slots[-1] - slots[0] == count - 1 and lower - upper >= 15 and score > best[2]:
                best = (x, (upper + lower) / 2 + 4, score)
        if best[2] > -math.inf:
            self.names.append((best[0], best[1], shown))


class SpansPlot(TimePlot):
    row = 20

    def __init__(self, block: Spans) -> None:
        super().__init__(block.time, self.row * len(block.rows), left=180, top=4, below=22)


class IntervalsPlot:
    """Each ratio as a dot with its interval, on a logarithmic axis with a line at 1."""

    row, top, left, right = 24, 4, 250, WIDTH - 170

    def __init__(self, block: Intervals) -> None:
        self.axis = ratio_axis(min(item.low for item in block.rows), max(item.high for item in block.rows))
        self.bottom = self.top + self.row * len(block.rows)
        self.height = self.bottom + 22

    def x(self, ratio: float) -> float:
        return self.left + (self.right - self.left) * self.axis.place(ratio)

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """(x, label), the label "" where it has no room."""
        return _spaced((self.x(value), text) for value, text in self.axis.ticks)


def _half(text: str) -> float:
    return len(text) * _CHAR / 2


def _spaced(labels: Iterable[tuple[float, str]]) -> list[tuple[float, str]]:
    """(x, text) of centred labels, with "" for those that would overlap the one before or the edge."""
    out: list[tuple[float, str]] = []
    free = -1.0
    for x, text in labels:
        fits = x - _half(text) > free and x + _half(text) <= WIDTH
        out.append((x, text if fits else ""))
        free = x + _half(text) + 6 if fits else free
    return out


def render(page: Page) -> str:
    return _environment().get_template("page.html").render(page=page)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("ndd_console.render"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_final,
    )
    environment.filters.update(kind=lambda block: type(block).__name__.lower(), clip=clip)
    environment.globals.update(
        COMMAND=COMMAND, PLACE=PLACE, WIDTH=WIDTH, times=times, interval_text=interval_text,
        curves_plot=CurvesPlot, stack_plot=StackPlot, spans_plot=SpansPlot, intervals_plot=IntervalsPlot,
    )  # fmt: skip
    return environment


def _final(value: object) -> object:
    """The value of an expression in a template: pixels with one digit, text without control characters."""
    if isinstance(value, float):
        return f"{value:.1f}"
    return value if isinstance(value, (Markup, int)) else safe(value)
