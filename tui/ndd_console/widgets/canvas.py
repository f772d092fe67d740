"""The canvas: a full-screen widget that sends only changed cells to the terminal.

`render_lines` returns finished strips, without Textual's cache of styles and its filters; `patch` makes the escape
sequences of a partial update. `python -m benchmarks screen` compares it with Textual's own widgets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path

from rich.console import Console
from rich.segment import Segment
from rich.style import Style
from textual.geometry import Region
from textual.message import Message
from textual.strip import Strip

from ndd_console.view.rows import cells, cut, fit
from ndd_console.view.style import COLOUR, Row, Span

from .lines import links
from .textual_private import Patched

# Gaps up to this size are sent again, which is cheaper than moving the cursor (6 to 8 bytes).
_JOIN = 6


def changes(old: Row, new: Row) -> list[tuple[int, int]]:
    """Ranges (first cell, cell after the last) in which two rows of the same width differ."""
    out: list[tuple[int, int]] = []
    for x, (before, after) in enumerate(zip(_cells(old), _cells(new), strict=True)):
        if before == after:
            continue
        if out and x - out[-1][1] <= _JOIN:
            out[-1] = (out[-1][0], x + 1)
        else:
            out.append((x, x + 1))
    return out


def _cells(row: Row) -> list[Span]:
    return [(char, style) for text, style in row for char in _characters(text)]


@lru_cache(maxsize=4096)
def _characters(text: str) -> tuple[str, ...]:
    """The character of each cell. The second cell of a wide character differs from any first one."""
    out: list[str] = []
    for char in text:
        width = cells(char)
        if width:
            out += [char, *[char + " "] * (width - 1)]
        elif out:  # it is drawn into the cell before
            out[-1] += char
    return tuple(out)


class Canvas(Patched):
    """Shows rows of exactly its size. linked: whether places in code are links.

    No file is looked for: a file system that hangs must not stop the screen.
    """

    DEFAULT_CSS = "Canvas { width: 1fr; height: 1fr; }"
    can_focus = False

    class Resized(Message):
        """The canvas has a new size, and must be painted."""

    def __init__(self, styles: dict[str, Style] | None = None, *, linked: bool = False) -> None:
        super().__init__()
        self._linked = linked
        self._folder: Path | None = None
        self._look = styles if styles is not None else COLOUR
        self._codes = {name: _code(style) for name, style in self._look.items()}
        self._rows: list[Row] = []
        self._strips: list[Strip | None] = []
        self._shown_size = (0, 0)

    def on_resize(self) -> None:
        self.post_message(self.Resized())

    @property
    def rows(self) -> Sequence[Row]:
        return self._rows

    def show(self, rows: list[Row], folder: Path | None = None) -> None:
        """Show these rows; only changed cells are painted. folder: that relative places in code belong to."""
        width, height = self.size
        old, self._rows = self._rows, rows
        if (width, height) != self._shown_size or len(old) != len(rows) or folder != self._folder:
            self._folder = folder
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
            # Of a link, every cell has the address.
            moved = [link[:2] for link in {*self._links(before)} ^ {*self._links(row)}]
            for start, end in (*changes(before, row), *moved):
                regions.append(Region(start, y, end - start, 1))
        if regions:
            self.refresh(*regions)

    def render_lines(self, crop: Region) -> list[Strip]:
        """Finished strips, made on demand: a partial update does not need them."""
        lines = [self.render_line(y) for y in range(crop.y, crop.y + crop.height)]
        if crop.x == 0 and crop.width == self.size.width:
            return lines
        return [line.crop(crop.x, crop.x + crop.width) for line in lines]

    def render_line(self, y: int) -> Strip:
        width = self.size.width
        if y >= len(self._rows) or self._shown_size[0] != width:
            return Strip.blank(width)
        strip = self._strips[y]
        if strip is None:
            row = fit(self._rows[y], width)
            segments = [
                Segment(text, self._look[style] + Style(link=address) if address else self._look[style])
                for part, address in self._parts(row, 0, width)
                for text, style in part
                if text
            ]
            strip = self._strips[y] = Strip(segments, width)
        return strip

    def _links(self, row: Row) -> list[tuple[int, int, str]]:
        """(first cell, cell after the last, address) of each link."""
        found: list[tuple[int, int, str]] = []
        x = 0
        for text, _ in row if self._linked else ():
            for start, end, address in links(text, self._folder, exists=lambda _: True):
                first = x + cells(text[:start])
                found.append((first, first + cells(text[start:end]), address))
            x += cells(text)
        return found

    def _parts(self, row: Row, x1: int, x2: int) -> Iterator[tuple[Row, str]]:
        """Cells x1..x2 of a row in parts, each with the address that it links to, or ""."""
        for start, end, address in self._links(row):
            if start < x2 and end > x1:
                if start > x1:
                    yield cut(row, x1, start), ""
                yield cut(row, max(start, x1), min(end, x2)), address
                x1 = min(end, x2)
        if x1 < x2:
            yield cut(row, x1, x2), ""

    def patch(self, spans: Iterable[tuple[int, int, int]]) -> str:
        out: list[str] = []
        for y, x1, x2 in spans:
            if y >= len(self._rows):
                continue
            out.append(f"\x1b[{y + 1};{x1 + 1}H")
            code = ""
            for part, address in self._parts(self._rows[y], x1, x2):
                if address:
                    out.append(f"\x1b]8;;{address}\x1b\\")
                for text, style in part:
                    wanted = self._codes[style]
                    if wanted != code and not (code == "" and text.isspace()):
                        out.append("\x1b[0m" + wanted if code else wanted)
                        code = wanted
                    out.append(text)
                if address:
                    out.append("\x1b]8;;\x1b\\")
            if code:
                out.append("\x1b[0m")
        return "".join(out)


def _code(style: Style) -> str:
    """The escape sequence of a style; empty for plain text."""
    text = Strip([Segment("x", style)], 1).render(_PLAIN)
    return text.partition("x")[0]


_PLAIN = Console(force_terminal=True, color_system="standard", legacy_windows=False)
