"""The canvas: a full-screen widget that sends only changed cells to the terminal.

`render_lines` returns finished strips, without Textual's cache of styles and its filters; `patch` makes the escape
sequences of a partial update. `python -m benchmarks screen` compares it with Textual's own widgets.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.segment import Segment
from rich.style import Style
from textual.geometry import Region
from textual.message import Message
from textual.strip import Strip

from ndd_console.view.rows import cells, cut, fit
from ndd_console.view.style import COLOUR, Row

from .textual_private import Patched

# Gaps up to this size are sent again, which is cheaper than moving the cursor (6 to 8 bytes).
_JOIN = 6


def changes(old: Row, new: Row) -> list[tuple[int, int]]:
    """Ranges (first cell, cell after the last) in which two rows of the same width differ."""
    out: list[tuple[int, int]] = []
    i = j = x = y = 0  # index into and cells consumed of each row
    start = 0
    a: list[int] = []  # spans since the last common boundary of the two rows
    b: list[int] = []
    while i < len(old) or j < len(new):
        if x <= y and i < len(old):
            a.append(i)
            x += cells(old[i][0])
            i += 1
        elif j < len(new):
            b.append(j)
            y += cells(new[j][0])
            j += 1
        else:
            break
        if x != y or not a or not b:
            continue
        _stretch(old, new, a, b, start, x, out)
        a.clear()
        b.clear()
        start = x
    if a or b:
        out.append((start, max(x, y)))
    return out


def _stretch(
    old: Row, new: Row, a: list[int], b: list[int], start: int, end: int, out: list[tuple[int, int]]
) -> None:
    """Add the change within start..end, if any."""
    if len(a) == 1 and len(b) == 1:
        (before, style), (after, new_style) = old[a[0]], new[b[0]]
        if before == after and style == new_style:
            return
        if style == new_style and len(before) == len(after) == end - start:
            last = len(after) - 1
            first = 0
            while first < last and before[first] == after[first]:
                first += 1
            while last > first and before[last] == after[last]:
                last -= 1
            end = start + last + 1
            start += first
    if out and start - out[-1][1] <= _JOIN:
        out[-1] = (out[-1][0], end)
    elif end > start:
        out.append((start, end))


class Canvas(Patched):
    """Shows rows of exactly its size."""

    DEFAULT_CSS = "Canvas { width: 1fr; height: 1fr; }"
    can_focus = False

    class Resized(Message):
        """The canvas has a new size, and must be painted."""

    def __init__(self, styles: dict[str, Style] | None = None) -> None:
        super().__init__()
        self._look = styles if styles is not None else COLOUR
        self._codes = {name: _code(style) for name, style in self._look.items()}
        self._rows: list[Row] = []
        self._strips: list[Strip | None] = []
        self._shown_size = (0, 0)

    def on_resize(self) -> None:
        self.post_message(self.Resized())

    @property
    def rows(self) -> Sequence[Row]:
        """The current rows."""
        return self._rows

    def show(self, rows: list[Row]) -> None:
        """Show these rows; only changed cells are painted."""
        width, height = self.size
        old, self._rows = self._rows, rows
        if (width, height) != self._shown_size or len(old) != len(rows):
            self._shown_size = (width, height)
            self._strips = [None] * len(rows)
            self.refresh()
            return
        regions: list[Region] = []
        for y, row in enumerate(rows):
            before = old[y]
            if row == before:
                continue
            self._strips[y] = None
            for start, end in changes(before, row):
                regions.append(Region(start, y, end - start, 1))
        if regions:
            self.refresh(*regions)

    def render_lines(self, crop: Region) -> list[Strip]:
        """Finished strips, made on demand: a partial update does not need them."""
        lines = [self._strip(y) for y in range(crop.y, crop.y + crop.height)]
        if crop.x == 0 and crop.width == self.size.width:
            return lines
        return [line.crop(crop.x, crop.x + crop.width) for line in lines]

    def render_line(self, y: int) -> Strip:
        return self._strip(y)

    def _strip(self, y: int) -> Strip:
        width = self.size.width
        if y >= len(self._rows) or self._shown_size[0] != width:
            return Strip.blank(width)
        strip = self._strips[y]
        if strip is None:
            segments = [Segment(text, self._look[style]) for text, style in fit(self._rows[y], width) if text]
            strip = self._strips[y] = Strip(segments, width)
        return strip

    def patch(self, spans: Iterable[tuple[int, int, int]]) -> str:
        out: list[str] = []
        for y, x1, x2 in spans:
            if y >= len(self._rows):
                continue
            out.append(f"\x1b[{y + 1};{x1 + 1}H")
            code = ""
            for text, style in cut(self._rows[y], x1, x2):
                wanted = self._codes[style]
                if wanted != code and not (code == "" and text.isspace() and style != "select"):
                    out.append("\x1b[0m" + wanted if code else wanted)
                    code = wanted
                out.append(text)
            if code:
                out.append("\x1b[0m")
        return "".join(out)


def _code(style: Style) -> str:
    """The escape sequence of a style; empty for plain text."""
    text = Strip([Segment("x", style)], 1).render(_PLAIN)
    return text.partition("x")[0]


_PLAIN = Console(force_terminal=True, color_system="standard", legacy_windows=False)
