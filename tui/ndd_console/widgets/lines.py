"""Widgets of styled rows: text that scrolls, lists, and the footer with the available keys."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.style import Style
from rich.text import Text as Words
from textual import events
from textual.binding import Binding, BindingType
from textual.color import Color
from textual.coordinate import Coordinate
from textual.filter import LineFilter
from textual.geometry import Size
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widget import Widget
from textual.widgets import DataTable, Input, OptionList
from textual.widgets.option_list import Option

from ndd_console.view.keys import LIST_KEYS, SCROLL_KEYS, TABLE_KEYS, Key
from ndd_console.view.rows import BLANK, Entry, cells, fit, key_at
from ndd_console.view.style import Look, Row, Span, to_ascii
from ndd_engine.text import foreign

# A place in code, such as "data/clips.py:41"; not one whose folders are left out.
_PLACE = re.compile(r"(?<![\w./…~-])[\w./-]*\w\.py:\d+")


def bindings(keys: Iterable[Key], method: str = "{}") -> list[BindingType]:
    """Textual's bindings of a table of keys. method: the action, with {} for the key's own.

    Combinations with Ctrl take precedence over the focused widget, which may be a text field.
    """
    return [
        Binding(name, method.format(key.action), key.word, show=False, priority=name.startswith("ctrl+"))
        for key in keys
        for name in key.names.split(",")
    ]


def links(
    text: str, folder: Path | None, exists: Callable[[str], bool] = os.path.isfile
) -> Iterator[tuple[int, int, str]]:
    """(first character, character after the last, address) of each place in code whose file exists.

    folder: that relative places belong to; without one they are no links.
    """
    for place in _PLACE.finditer(text) if ".py:" in text else ():
        path = place[0].partition(":")[0]
        if not os.path.isabs(path):  # noqa: PTH117
            path = os.path.join(folder, path) if folder is not None else ""  # noqa: PTH118
        if path and exists(path):  # of os: pathlib raises for names that are too long
            yield place.start(), place.end(), Path(path).absolute().as_uri()


def segments(
    row: Row, look: Look, folder: Path | None = None, exists: Callable[[str], bool] = os.path.isfile
) -> Iterator[Segment]:
    """The row as Rich's segments, with `links` where the terminal has them."""
    for text, name in row:
        style = look.styles[name]
        start = 0
        for first, end, address in links(text, folder, exists) if look.links else ():
            yield Segment(text[start:first], style)
            yield Segment(text[first:end], style + Style(link=address))
            start = end
        yield Segment(text[start:], style)


class AsciiFilter(LineFilter):
    """Shows the lines of all widgets in ASCII, those of the canvas, too."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        return [Segment(to_ascii(text), style, control) for text, style, control in segments]


class Lines(ScrollView):
    """Rows that scroll. scrolls: takes the keys that scroll; a block of fixed height does not."""

    BINDINGS = bindings(SCROLL_KEYS)

    def __init__(self, look: Look, *, scrolls: bool = False, classes: str | None = None) -> None:
        super().__init__(classes=classes)
        self.can_focus = scrolls
        self._look = look
        self._scrolls = scrolls
        # What relative places in code belong to.
        self.folder: Path | None = None
        self.rows: Sequence[Row] = ()

    def show(self, rows: Sequence[Row]) -> None:
        """Show these rows. A block of fixed height gets their number as its height."""
        if rows == self.rows:
            return
        self.rows = rows
        if self._scrolls:
            self.virtual_size = Size(0, len(rows))
        else:
            self.styles.height = len(rows)
        self.refresh()

    def render_line(self, y: int) -> Strip:
        width = self.scrollable_content_region.width
        y += self.scroll_offset.y
        row = self.rows[y] if y < len(self.rows) else BLANK
        return Strip(segments(fit(row, width), self._look, self.folder), width)

    @property
    def shown(self) -> str:
        top = self.scroll_offset.y
        return "\n".join("".join(text for text, _ in row) for row in self.rows[top : top + self.size.height])


class KeyBar(Lines):
    """The footer. A click on a key is that key."""

    def on_click(self, event: events.Click) -> None:
        label = key_at(self.rows[0], event.x) if self.rows else None
        if label is not None:
            self.screen.use_key(label)  # type: ignore[attr-defined]


class TextField(Input):
    """A text field that handles its keys in the order in which they are typed.

    Textual's runs the actions of keys, such as delete, after characters that are typed ahead of them.
    """

    async def on_key(self, event: events.Key) -> None:
        active = self.screen.active_bindings.get(event.key)
        if active is not None and active.node is self and not event.is_printable:
            event.stop()
            event.prevent_default()
            await self.run_action(active.binding.action)


@dataclass(frozen=True)
class Prompt:
    """The rows of an entry in a list, cut at its width."""

    rows: tuple[Row, ...]
    look: Look = field(compare=False)
    folder: Path | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for row in self.rows:
            yield from segments(fit(row, options.max_width), self.look, self.folder)
            yield Segment.line()


class RowList(OptionList):
    """A list of styled rows. The selected entry stays selected while its place remains.

    after: gets the focus when the user moves down from the last entry. one_click: a click is the key Enter; otherwise a
    double click is, where Enter begins something that takes long.
    """

    BINDINGS = bindings(LIST_KEYS)

    def __init__(self, look: Look, after: Widget | None = None, *, one_click: bool = True) -> None:
        super().__init__(markup=False)
        self._look = look
        self._after = after
        self._one_click = one_click
        # What relative places in code belong to.
        self.folder: Path | None = None
        self._entries: Sequence[Entry] = ()

    @property
    def chosen(self) -> Any:
        """The value of the selected entry; None if there is none."""
        return None if self.highlighted is None else self._entries[self.highlighted].value

    def show(self, entries: Sequence[Entry]) -> None:
        """Show these entries; only changed ones are drawn anew."""
        before, self._entries = self._entries, entries
        shape = [item.value is None for item in entries]
        if shape != [item.value is None for item in before]:
            place = self.highlighted or 0
            options = [Option(self._drawn_as(item), disabled=item.value is None) for item in entries]
            self.clear_options()
            self.add_options(options)
            self.choose(place)
            return
        for index, (old, new) in enumerate(zip(before, entries, strict=True)):
            if old.rows != new.rows:
                self.replace_option_prompt_at_index(index, self._drawn_as(new))

    def _drawn_as(self, entry: Entry) -> Prompt:
        return Prompt(entry.rows, self._look, self.folder)

    def on_click(self, event: events.Click) -> None:
        event.prevent_default()
        place = event.style.meta.get("option")
        if place is None or self._entries[place].value is None:
            return
        self.highlighted = place
        if self._one_click or event.chain > 1:
            self.action_select()

    def action_cursor_down(self) -> None:
        if self._after is not None and self.highlighted in (None, self.option_count - 1):
            self._after.focus()
        else:
            super().action_cursor_down()

    def choose(self, place: int) -> None:
        """Select the entry at this place, or the nearest one that can be selected."""
        places = [index for index, item in enumerate(self._entries) if item.value is not None]
        if places:
            self.highlighted = min(places, key=lambda index: (abs(index - place), index))
            self.scroll_to_highlight()


class RowTable(DataTable[Words]):
    """A table of untrusted texts, of which one row is selected. A second click on a row is the key Enter.

    fixed: the first columns, which stay while the others scroll sideways.
    """

    BINDINGS = bindings(TABLE_KEYS)

    def __init__(self, look: Look, fixed: int) -> None:
        super().__init__(cursor_type="row", fixed_columns=fixed, cursor_foreground_priority="css")
        self._look = look
        self._shape: object = None  # the names and widths of the columns, and the number of rows
        self._values: Sequence[Any] = ()
        self._grid: Sequence[Sequence[Span]] = ()

    @property
    def chosen(self) -> Any:
        """The value of the selected row; None if there is none."""
        return self._values[self.cursor_row] if self._values else None

    def show(self, heads: Sequence[Span], rows: Sequence[tuple[Any, Sequence[Span]]]) -> None:
        """Show these columns and rows, each with its value; only changed cells are drawn anew.

        Widths are given: Textual measures a changed cell after it may have been drawn at its old width.
        """
        before, self._values = self._grid, [value for value, _ in rows]
        self._grid = [[(foreign(text), style) for text, style in spans] for _, spans in rows]
        columns = zip(heads, *self._grid, strict=True)
        widths = [max(1, *(cells(text) for text, _ in column)) for column in columns]
        if (heads, widths, len(rows)) != self._shape:
            self._shape = heads, widths, len(rows)
            place, x = self.cursor_row, self.scroll_x
            self.clear(columns=True)
            for head, width in zip(heads, widths, strict=True):
                self.add_column(self._words(head), width=width)
            self.add_rows(map(self._words, spans) for spans in self._grid)
            self.move_cursor(row=place)
            self.call_after_refresh(self.scroll_to, x=x, animate=False)
            return
        for y, (old, new) in enumerate(zip(before, self._grid, strict=True)):
            for place, span in enumerate(new):
                if span != old[place]:
                    self.update_cell_at(Coordinate(y, place), self._words(span))

    def _words(self, span: Span) -> Words:
        return Words(span[0], self._look.styles[span[1]])
