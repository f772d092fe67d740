"""Plots as inline SVG: no script, colours from the page's style, hover text by <title>, safe with any text."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise

from ndd_console.view.findings import times
from ndd_engine.text import duration, number

from .axis import Axis, time_axis, value_axis, written
from .blocks import Intervals, Lines, Spans, Stack, Time
from .safe import clip, escape

WIDTH = 760
_LEFT, _RIGHT, _TOP = 62, 14, 22  # above the plot stands its unit
_BOTTOM = 38  # two rows of figures: time and optimizer steps
_INSIDE = WIDTH - _LEFT - _RIGHT
_CHAR = 6.1  # pixels of a character at the size of the axes' figures
_HOVER = 64  # columns that show their values under the pointer


def _svg(height: float, title: str, text: str, body: Iterable[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" height="{height:.0f}" role="img">'
        f"<title>{escape(title)}</title><desc>{escape(text)}</desc>{''.join(body)}</svg>"
    )


def _text(x: float, y: float, text: str, anchor: str = "start", kind: str = "") -> str:
    style = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{style}>{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


class _Frame:
    """The part of a plot that all plots over time share: axes, grid, pauses, and the way from values to pixels."""

    def __init__(self, time: Time, axis: Axis | None, height: float) -> None:
        self.time, self.axis, self.height = time, axis, height
        self.times = time_axis(time.length_s)

    def x(self, seconds: float) -> float:
        return _LEFT + _INSIDE * self.times.place(seconds)

    def y(self, value: float) -> float:
        assert self.axis is not None
        return _TOP + self.height * (1 - self.axis.place(value))

    def grid(self) -> list[str]:
        out = [
            f'<rect class="quiet" x="{self.x(a):.1f}" y="{_TOP}" width="{max(self.x(b) - self.x(a), 1):.1f}" '
            f'height="{self.height:.0f}"><title>paused</title></rect>'
            for a, b in self.time.quiet
        ]
        for value, label in self.axis.ticks if self.axis is not None else ():
            y = self.y(value)
            out.append(_line(_LEFT, y, WIDTH - _RIGHT, y, "grid"))
            out.append(_text(_LEFT - 6, y + 3.5, label, "end", "tick"))
        bottom = _TOP + self.height
        out.append(_line(_LEFT, bottom, WIDTH - _RIGHT, bottom, "axis"))
        return out + self._ticks(bottom)

    def _ticks(self, bottom: float) -> list[str]:
        out: list[str] = []
        free = -1.0
        for value, label in self.times.ticks:
            x = self.x(value)
            out.append(_line(x, bottom, x, bottom + 4, "axis"))
            anchor = "middle" if x + len(label) * _CHAR / 2 <= WIDTH else "end"
            out.append(_text(x, bottom + 16, label, anchor, "tick"))
            step = self.step_at(value)
            if step is None:
                continue
            text = f"step {number(step)}" if free < 0 else number(step)
            half = len(text) * _CHAR / 2
            if x - half > free and x + half <= WIDTH:
                out.append(_text(x, bottom + 30, text, "middle", "tick step"))
                free = x + half + 6
        return out

    def step_at(self, seconds: float) -> float | None:
        """The optimizer step that was done then."""
        found = None
        for x, step in self.time.steps:
            if x > seconds + 1e-9:
                break
            found = step
        return found

    def hover(self, say: Callable[[float, float], str]) -> list[str]:
        """Invisible columns, each with the values in it as its title. say(begin, end): the text, "" for none."""
        out: list[str] = []
        width = _INSIDE / _HOVER
        for index in range(_HOVER):
            begin, end = (self.times.high * edge / _HOVER for edge in (index, index + 1))
            if text := say(begin, end):
                when = _when(begin, end, self.step_at(end))
                out.append(
                    f'<rect class="hover" x="{_LEFT + index * width:.1f}" y="{_TOP}" width="{width:.1f}" '
                    f'height="{self.height:.0f}"><title>{escape(when)}: {escape(text)}</title></rect>'
                )
        return out


def _when(begin: float, end: float, step: float | None) -> str:
    at = duration((begin + end) / 2)
    return f"after {at}, step {number(step)}" if step is not None else f"after {at}"


def lines_plot(block: Lines) -> str:
    """Lines over time, with a band where a point is the mean of several values."""
    values = [value for line in block.lines for _, value in line.points]
    values += [value for line in block.lines for band in line.bands for _, *ends in band for value in ends]
    if not values:
        return ""
    low, high = min(values), max(values)
    axis = value_axis(0.0 if block.zero and low > 0 else low, high, block.kind, block.unit, block.log)
    frame = _Frame(block.time, axis, block.height)
    body = (
        [*frame.grid(), _text(_LEFT - 6, 9, axis.unit, _unit_anchor(axis.unit), "tick unit")]
        if axis.unit
        else frame.grid()
    )
    for line in block.lines:
        for band in line.bands:
            if len(band) > 1:
                there = " ".join(f"{frame.x(x):.1f},{frame.y(top):.1f}" for x, _, top in band)
                back = " ".join(f"{frame.x(x):.1f},{frame.y(bottom):.1f}" for x, bottom, _ in reversed(band))
                body.append(f'<polygon class="band f-{line.colour}" points="{there} {back}"/>')
    for line in block.lines:
        dash = " dashed" if line.dashed else ""
        for piece in line.pieces:
            if len(piece) > 1 and not line.dots:
                points = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in piece)
                body.append(f'<polyline class="line s-{line.colour}{dash}" points="{points}"/>')
            shown = piece if line.dots or len(piece) == 1 else ()
            body += [
                f'<circle class="f-{line.colour}" cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="3"/>'
                for x, y in shown
            ]
    say = written(block.kind, block.unit)

    def values_in(begin: float, end: float) -> str:
        found = []
        for line in block.lines:
            inside = [y for x, y in line.points if begin <= x < end]
            if inside:
                found.append(f"{line.name} {say(sum(inside) / len(inside))}")
        return ", ".join(found)

    body += frame.hover(values_in)
    names = ", ".join(line.name for line in block.lines)
    text = f"{names} over the time of the run, from {say(low)} to {say(high)}. The figures are in the table below."
    return _svg(_TOP + block.height + _BOTTOM, block.title, text, body)


def _unit_anchor(unit: str) -> str:
    """A long unit starts at the plot's edge instead of ending there."""
    return "end" if len(unit) * _CHAR < _LEFT - 8 else "start"


def stack_plot(block: Stack) -> str:
    """Shares of time as areas on top of each other, in steps: each column is what was measured in it."""
    height = 210
    frame = _Frame(block.time, value_axis(0.0, block.top, "share", ""), height)
    body = [*frame.grid(), _text(_LEFT - 6, 9, "%", "end", "tick unit")]
    runs: list[list[int]] = []
    for column in block.columns:
        if runs and column == runs[-1][-1] + 1:
            runs[-1].append(column)
        else:
            runs.append([column])
    heights = dict.fromkeys(block.columns, 0.0)
    edges: list[dict[int, tuple[float, float]]] = []
    for layer in block.layers:
        edge: dict[int, tuple[float, float]] = {}
        for column in block.columns:
            low = heights[column]
            heights[column] = low + layer.values.get(column, 0.0)
            edge[column] = (low, heights[column])
        edges.append(edge)
    # The uppermost first: each covers what lies below it, so every edge is drawn once.
    for layer, edge in reversed(list(zip(block.layers, edges, strict=True))):
        for run in runs:
            path = [f"M{frame.x(run[0] * block.width_s):.1f},{frame.y(0):.1f}"]
            for column in run:
                y = frame.y(edge[column][1])
                path.append(f"V{y:.1f}H{frame.x((column + 1) * block.width_s):.1f}")
            path.append(f"V{frame.y(0):.1f}Z")
            body.append(f'<path class="area f-{layer.colour}" d="{"".join(path)}"/>')
    for layer, edge in zip(block.layers, edges, strict=True):
        body += _layer_name(frame, layer.name, edge, block.width_s)
    say = written("share", "")

    def shares_in(begin: float, end: float) -> str:
        columns = [c for c in block.columns if begin < (c + 1) * block.width_s and c * block.width_s < end]
        if not columns:
            return ""
        means = [
            (layer.name, sum(layer.values.get(c, 0.0) for c in columns) / len(columns))
            for layer in block.layers
        ]
        return ", ".join(f"{name} {say(share)}" for name, share in reversed(means) if share > 0)

    body += frame.hover(shares_in)
    parts = ", ".join(f"{layer.name} {say(layer.share)}" for layer in block.layers)
    return _svg(_TOP + height + _BOTTOM, block.title, f"Over the whole record: {parts}.", body)


def _layer_name(frame: _Frame, name: str, edge: dict[int, tuple[float, float]], width_s: float) -> list[str]:
    """A layer's name inside it, where it has room in every column that the name covers."""
    shown = clip(name, 24)
    room = len(shown) * _CHAR + 8
    columns = sorted(edge)
    best: tuple[float, float, float] | None = None
    begin = 0
    for end in range(len(columns)):
        while (
            frame.x((columns[end] + 1) * width_s) - frame.x(columns[begin] * width_s) > room * 1.2
            and begin < end
        ):
            begin += 1
        first = max(begin - 1, 0)
        left, right = frame.x(columns[first] * width_s), frame.x((columns[end] + 1) * width_s)
        if right - left < room or columns[end] - columns[first] != end - first:
            continue
        covered = [edge[column] for column in columns[first : end + 1]]
        upper, lower = max(frame.y(top) for _, top in covered), min(frame.y(low) for low, _ in covered)
        # Where it is thick, and rather in the middle.
        worth = lower - upper - 0.05 * abs((left + right) / 2 - WIDTH / 2)
        if lower - upper >= 15 and (best is None or worth > best[2]):
            best = ((left + right) / 2, (upper + lower) / 2, worth)
    return [] if best is None else [_text(best[0], best[1] + 4, shown, "middle", "inside")]


def spans_plot(block: Spans) -> str:
    """Rows of moments and stretches."""
    row, label, edge = 20, 180, 4
    height = row * len(block.rows)
    times = time_axis(block.time.length_s)

    def x(seconds: float) -> float:
        return label + (WIDTH - _RIGHT - label) * times.place(seconds)

    body: list[str] = []
    for index, item in enumerate(block.rows):
        top = edge + index * row
        if index % 2 == 0:
            body.append(f'<rect class="stripe" x="0" y="{top}" width="{WIDTH}" height="{row}"/>')
        body.append(_text(6, top + 14, clip(item.name, 28), "start", "tick"))
        for begin, end, what in item.spans:
            left, width = x(begin), max(x(end) - x(begin), 2.5)
            body.append(
                f'<rect class="f-{item.colour}" x="{left:.1f}" y="{top + 4}" width="{width:.1f}" height="{row - 8}">'
                f"<title>{escape(what)}</title></rect>"
            )
    bottom = edge + height
    body.append(_line(label, bottom, WIDTH - _RIGHT, bottom, "axis"))
    for value, text in times.ticks:
        body.append(_line(x(value), bottom, x(value), bottom + 4, "axis"))
        anchor = "middle" if x(value) + len(text) * _CHAR / 2 <= WIDTH else "end"
        body.append(_text(x(value), bottom + 16, text, anchor, "tick"))
    counts = ", ".join(f"{item.name} {len(item.spans)}" for item in block.rows)
    return _svg(bottom + 22, block.title, f"Times of: {counts}. The list is in the table below.", body)


_RATIOS = (
    0.1,
    0.2,
    0.3,
    0.5,
    0.7,
    0.8,
    0.9,
    1.0,
    1.1,
    1.2,
    1.3,
    1.5,
    1.7,
    2.0,
    2.5,
    3.0,
    4.0,
    6.0,
    10.0,
    20.0,
    50.0,
)


def intervals_plot(block: Intervals) -> str:
    """Each ratio as a dot with its interval, on a logarithmic axis with a line at 1."""
    row, label, right, edge = 24, 250, 150, 4
    axis = interval_axis(block)
    height = row * len(block.rows)

    def x(value: float) -> float:
        return label + (WIDTH - right - label) * axis.place(value)

    body: list[str] = []
    bottom = edge + height
    free = -1.0
    for value, text in axis.ticks:
        body.append(_line(x(value), edge, x(value), bottom, "one" if value == 1.0 else "grid"))
        half = len(text) * _CHAR / 2
        if x(value) - half > free:
            body.append(_text(x(value), bottom + 14, text, "middle", "tick"))
            free = x(value) + half + 6
    for index, item in enumerate(block.rows):
        y = edge + index * row + row / 2
        colour = {"good": "good", "bad": "bad"}.get(item.tone, "muted")
        low, high, middle = x(item.low), x(item.high), x(item.ratio)
        body.append(_text(6, y + 4, clip(item.name, 38), "start", "tick"))
        body.append(_line(low, y, high, y, f"interval s-{colour}"))
        body += [_line(end, y - 5, end, y + 5, f"interval s-{colour}") for end in (low, high)]
        body.append(
            f'<circle class="f-{colour}" cx="{middle:.1f}" cy="{y:.1f}" r="4.5"><title>{escape(item.name)}: '
            f"{escape(interval_words(item.ratio, item.low, item.high))}</title></circle>"
        )
        body.append(
            _text(WIDTH - right + 10, y + 4, f"{times(item.ratio)} {clip(item.verdict, 14)}", "start", "tick")
        )
    parts = "; ".join(f"{r.name} {interval_words(r.ratio, r.low, r.high)}, {r.verdict}" for r in block.rows)
    return _svg(bottom + 22, block.title, parts, body)


def interval_axis(block: Intervals) -> Axis:
    """Logarithmic, around 1, with every interval on it."""
    low = min(0.85, *(item.low / 1.04 for item in block.rows))
    high = max(1.25, *(item.high * 1.04 for item in block.rows))
    ticks = tuple((value, f"{value:g}x") for value in _RATIOS if low <= value <= high)
    return Axis(low, high, ticks, "", log=True)


def interval_words(ratio: float, low: float, high: float) -> str:
    """ "1.42x (1.35 to 1.49)"."""
    return f"{times(ratio)} ({times(low)[:-1]} to {times(high)[:-1]})"


def rising(points: Iterable[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """The points in the order of x."""
    ordered = tuple(points)
    return ordered if all(a[0] <= b[0] for a, b in pairwise(ordered)) else tuple(sorted(ordered))
