"""The canvas: a full-screen widget that sends only changed cells to the terminal.

`render_lines` returns finished strips, without Textual's cache of styles; `patch` makes the escape sequences of a
partial update from the same strips. `python -m benchmarks screen` compares it with Textual's own widgets.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path

from rich.console import Console
from textual.color import Color
from textual.filter import LineFilter
from textual.geometry import Region
from textual.message import Message
from textual.strip import Strip

from ndd_console.view.rows import cells, fit, width_of
from ndd_console.view.style import PLAIN, Look, Row

from .lines import segments
from .textual_private import Patched

# Gaps up to this size are sent again, which is cheaper than moving the cursor (6 to 8 bytes).
_JOIN = 6


def changes(old: Row | Strip, new: Row | Strip) -> list[tuple[int, int]]:
    """Ranges (first cell, cell after the last) in which two lines of the same width differ; by their links, too."""
    out: list[tuple[int, int]] = []
    for x, (before, after) in enumerate(zip(_cells(old), _cells(new), strict=True)):
        if before == after:
            continue
        if out and x - out[-1][1] <= _JOIN:
            out[-1] = (out[-1][0], x + 1)
        else:
            out.append((x, x + 1))
    return out


def _cells(line: Row | Strip) -> list[tuple[str, object]]:
    return [(char, span[1]) for span in line for char in _characters(span[0])]


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
    """Shows rows of exactly its size."""

    DEFAULT_CSS = "Canvas { width: 1fr; height: 1fr; }"
    can_focus = False

    class Resized(Message):
        """The canvas has a new size, and must be painted."""

    def __init__(self, look: Look = PLAIN) -> None:
        super().__init__()
        self._look = look
        self._folder: Path | None = None
        self._rows: list[Row] = []
        self._strips: list[Strip | None] = []
        self._shown_size = (0, 0)
        self._line_filters: Sequence[LineFilter] = ()

    def on_mount(self) -> None:
        self._line_filters = self.get_line_filters()

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
            if row != old[y]:
                before, self._strips[y] = self._strips[y], None
                spans = [(0, width)] if before is None else changes(before, self._strip(y))
                regions += [Region(a, y, b - a, 1) for a, b in spans]
        if regions:
            self.refresh(*regions)

    def render_lines(self, crop: Region) -> list[Strip]:
        """Finished strips, made on demand: a partial update needs only those of changed rows."""
        lines = map(self.render_line, range(crop.y, crop.bottom))
        return [line.crop(crop.x, crop.right) for line in lines]

    def render_line(self, y: int) -> Strip:
        width = self.size.width
        shown = y < len(self._rows) and self._shown_size[0] == width
        return self._strip(y) if shown else Strip.blank(width)

    def _strip(self, y: int) -> Strip:
        """A row as it is shown, through the filters of the app."""
        strip = self._strips[y]
        if strip is None:
            width = self._shown_size[0] or width_of(self._rows[y])
            # No file is looked for: a file system that hangs must not stop the screen.
            parts = segments(fit(self._rows[y], width), self._look, self._folder, exists=lambda _: True)
            strip = Strip(parts, width).simplify()
            for one in self._line_filters:
                strip = strip.apply_filter(one, _BLACK)
            self._strips[y] = strip
        return strip

    def patch(self, spans: Iterable[tuple[int, int, int]]) -> str:
        return "".join(
            f"\x1b[{y + 1};{x1 + 1}H{self._strip(y).crop(x1, x2).render(_PLAIN)}"
            for y, x1, x2 in spans
            if y < len(self._rows)
        )


_BLACK = Color(0, 0, 0)  # the filters of the console do not read the background
_PLAIN = Console(force_terminal=True, color_system="standard", legacy_windows=False)
