"""Geometry of the plots in pixels; the templates draw them as inline SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import groupby

from markupsafe import Markup

from ndd_console.words.blocks import Intervals, Lines, Spans, Stack, Time, clip
from ndd_console.words.figures import formatter
from ndd_engine.text import duration, number

from .axis import Axis, ratio_axis, time_axis, value_axis

WIDTH = 760
_RIGHT = WIDTH - 14
_CHAR = 6.1  # width of a character of an axis label
_HOVER = 64  # columns that show their values under the pointer

# (x, text, anchor)
Label = tuple[float, str, str]
# (x, width, text)
Area = tuple[float, float, str]


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
        """Points as SVG coordinates."""
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


class LinesPlot(ValuePlot):
    def __init__(self, block: Lines) -> None:
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
        """The outline of a band."""
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
                edge = "".join(
                    f"V{self.y(high[slot]):.1f}H{self.x((slot + 1) * block.width_s):.1f}" for slot in run
                )
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
    """Half the width of an axis label."""
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
