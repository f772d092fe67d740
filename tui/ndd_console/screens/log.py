"""The log page: the captured output of a run, read as it grows, with search."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from rich.text import Text
from textual import events
from textual.widgets import RichLog

from ndd_console.view.keys import LOG_KEYS, SCROLL_KEYS, Key
from ndd_console.view.rows import rule, shorten
from ndd_console.view.style import Look, Row
from ndd_console.widgets.lines import bindings
from ndd_engine.text import foreign

from .base import WidgetScreen
from .dialogs import TextQuestion
from .pages import REFRESH_S

if TYPE_CHECKING:
    from ndd_console.jobs.run_sources import RunSource

_MOST_LINES = 5000


class OutputLog(RichLog):
    """Lines of output. It follows the end until the user scrolls up."""

    BINDINGS = bindings(SCROLL_KEYS)

    def __init__(self) -> None:
        super().__init__(min_width=1, wrap=True, markup=False, highlight=False, auto_scroll=False)
        self._texts: deque[tuple[int, str]] = deque(maxlen=_MOST_LINES)  # (first row, line)
        self._wrapped_at = 0
        self._searched = ""

    def add(self, lines: list[str]) -> None:
        """Show further lines."""
        at_end = self.scroll_offset.y >= self.max_scroll_y
        self._put(lines)
        if at_end and lines:
            self.scroll_end(animate=False)

    def _put(self, lines: list[str]) -> None:
        for line in lines:
            self._texts.append((len(self.lines), line))
            text = Text(line, overflow="fold")
            if self._searched:
                text.highlight_words([self._searched], "reverse", case_sensitive=False)
            self.write(text)

    def on_resize(self, event: events.Resize) -> None:
        """Wrap the lines at a new width."""
        if event.size.width == self._wrapped_at:
            return
        self._wrapped_at = event.size.width
        self._put_again()
        self.scroll_end(animate=False)

    def _put_again(self) -> None:
        texts = [line for _, line in self._texts]
        self.clear()
        self._texts.clear()
        self._put(texts)

    def search(self, text: str) -> None:
        """Show where this text is, in either case."""
        self._searched = text
        self._put_again()

    @property
    def places(self) -> list[int]:
        """The first rows of the lines that contain what is searched."""
        text = self._searched.casefold()
        return [row for row, line in self._texts if text and text in line.casefold()]


class LogScreen(WidgetScreen):
    """The captured output, updated every second."""

    keys = LOG_KEYS
    BINDINGS = bindings([Key("l", "back", "back")])
    body: OutputLog

    def __init__(self, look: Look, source: RunSource) -> None:
        super().__init__(look, OutputLog())
        self._log = source.log()
        self._searched = ""
        self._place = 0  # of the match on the screen

    def on_mount(self) -> None:
        self.set_interval(REFRESH_S, self.read_again)

    def has(self, need: str) -> bool:
        return bool(self.body.places)

    def read_again(self) -> None:
        """Show what the run has written since."""
        self.paint_if_current()

    def sections(self, width: int, height: int) -> tuple[list[Row], list[Row]]:
        self.body.add(self._log.read())
        unfinished = self._log.unfinished
        below: list[Row] = [((shorten(unfinished, width), "text"),)] if unfinished else []
        if not self.body.lines and not unfinished:
            below = [(("no output yet", "dim"),)]
        return [rule("log of the run", width)], below

    def action_search(self) -> None:
        """Ask for a text."""
        self.app.push_screen(TextQuestion(self.look, "text to find"), self._search)

    def _search(self, text: str | None) -> None:
        """Show the newest match."""
        if text:
            self._searched = text
            self.body.search(text)
            self._go(len(self.body.places) - 1)

    def action_older(self) -> None:
        """Show the match before."""
        self._go(self._place - 1)

    def action_newer(self) -> None:
        """Show the match after."""
        self._go(self._place + 1)

    def _go(self, place: int) -> None:
        places = self.body.places
        text = foreign(self._searched)
        if not places:
            self.say(f"no line contains {text!r}" if text else "")
            return
        self._place = min(max(place, 0), len(places) - 1)
        self.body.scroll_to(y=places[self._place], animate=False)
        self.say(f"match {self._place + 1:,} of {len(places):,}: {text}")
