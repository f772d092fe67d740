"""Scrolling pages: help, settings, diagnosis and captured output."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from textual import events

from ndd_console.screens.interfaces import HomeSource, RunSource, StartRow
from ndd_console.view.diagnosis import diagnosis_lines
from ndd_console.view.frame import Keys
from ndd_console.view.own_values import own_values_lines
from ndd_console.view.pager import HELP_KEYS, help_lines, log_view, page_room, page_rows
from ndd_console.view.ranks_page import ranks_lines
from ndd_console.view.rows import foreign, lines_of
from ndd_console.view.settings import settings_lines
from ndd_console.view.style import Look, Row
from ndd_console.words.diagnosis import Diagnosis
from ndd_engine.errors import error_text

from .base import LEAVE, CanvasScreen, call_from_thread, key_of, moved

_LOG_LINES = 2000  # length of the log page
REFRESH_S = 1.0
_ALIASES = {"space": "pagedown", " ": "pagedown", "g": "home", "G": "end"}


class PageScreen(CanvasScreen):
    """Lines that scroll. is_log: stay at the end while lines are added."""

    title_text = ""
    leave_keys = LEAVE
    is_log = False
    more_keys: Keys = ()

    def __init__(self, look: Look) -> None:
        super().__init__(look)
        self.top = 0
        self.follow = self.is_log

    def lines(self, width: int) -> list[Row]:
        """All lines of the page for this width."""
        raise NotImplementedError

    def draw(self, width: int, height: int) -> list[Row]:
        lines = self.lines(max(width - (2 if width >= 40 else 0), 1))
        last = max(len(lines) - page_room(height), 0)
        self.top = last if self.follow else min(self.top, last)
        keys: Keys = (*self.more_keys, ("esc", "back"))
        if last:
            keys = (("↑↓", "scroll"), ("space", "next page"), ("g G", "top, bottom"), *keys)
        return page_rows(lines, self.top, keys, self.title_text, width, height)

    def on_key(self, event: events.Key) -> None:
        if event.key in self.leave_keys:
            event.stop()
            self.go_back()
            return
        key = key_of(event)
        step = moved(_ALIASES.get(key, key), page_room(self.canvas.size.height) - 1)
        if step is None:
            return
        before = self.top
        self.top = max(self.top + step, 0)
        self.follow = False
        self.paint()
        # Scrolling down to the end follows the log again.
        self.follow = self.is_log and step > 0 and self.top < before + step


class HelpScreen(PageScreen):
    """The keys of a screen, and the glossary."""

    title_text = "help: keys and glossary"
    leave_keys = LEAVE | {"question_mark", "h"}

    def __init__(self, look: Look, keys: Keys = HELP_KEYS) -> None:
        super().__init__(look)
        self._keys = keys

    def lines(self, width: int) -> list[Row]:
        return help_lines(width, self._keys)


class StartScreen(PageScreen):
    """What an entry of the home screen would train. start: trains it. wizard: opens the wizard for it."""

    def __init__(
        self,
        look: Look,
        row: StartRow,
        home: HomeSource,
        start: Callable[[StartRow], None],
        wizard: Callable[[StartRow | None], None] | None,
    ) -> None:
        super().__init__(look)
        self.title_text = row.name
        self.more_keys = (("s", "start"), *((("w", "wizard"),) if wizard is not None else ()))
        self._row, self._home, self._train, self._wizard = row, home, start, wizard
        self._details: tuple[str, ...] = ("loading…",)

    def on_mount(self) -> None:
        threading.Thread(target=self._read, name="ndd-home-details", daemon=True).start()

    def _read(self) -> None:
        try:
            lines = self._home.details(self._row)
        except Exception as error:  # noqa: BLE001  without a message the page would load forever
            lines = (error_text(error),)
        call_from_thread(self, self._show, tuple(lines))

    def _show(self, lines: tuple[str, ...]) -> None:
        self._details = lines
        if self.is_current:
            self.paint()

    def lines(self, width: int) -> list[Row]:
        return [row for text in self._details for row in lines_of(foreign(text), width)]

    def on_key(self, event: events.Key) -> None:
        # Textual also calls the handler of the base class, for all other keys.
        if not self.is_current or event.key not in ("s", "w"):
            return
        if event.key == "s":
            event.stop()
            self.go_back()
            self._train(self._row)
        elif self._wizard is not None:
            event.stop()
            self.go_back()
            self._wizard(self._row)


class RunPage(PageScreen):
    """A page about a run, updated every second."""

    def __init__(self, look: Look, source: RunSource) -> None:
        super().__init__(look)
        self._source = source
        self._latest = self.read()

    def read(self) -> Any:
        """What the page shows; the same object while nothing changes."""
        return self._source.snapshot()

    def on_mount(self) -> None:
        self.set_interval(REFRESH_S, self.read_again)

    def read_again(self) -> None:
        """Redraw if something has changed."""
        before, self._latest = self._latest, self.read()
        if before is not self._latest and self.is_current:
            self.paint()


class SettingsScreen(RunPage):
    """Requested and applied settings, and whether they are in effect."""

    title_text = "settings"
    leave_keys = LEAVE | {"i"}

    def lines(self, width: int) -> list[Row]:
        return settings_lines(self._latest, width)


class OwnValuesScreen(RunPage):
    """What the user's own training code logged, and its samples."""

    title_text = "logged values and samples"
    leave_keys = LEAVE | {"v"}

    def lines(self, width: int) -> list[Row]:
        return own_values_lines(self._latest, width)


class RanksScreen(RunPage):
    """The ranks of a run with several: their work, waiting and phases."""

    title_text = "ranks"
    leave_keys = LEAVE | {"r"}

    def lines(self, width: int) -> list[Row]:
        return ranks_lines(self._latest, width)


class DiagnosisScreen(RunPage):
    """All findings with their evidence. try_it: opens the trial screen; None if nothing can be tried."""

    title_text = "diagnosis"
    leave_keys = LEAVE | {"d"}

    def __init__(
        self, look: Look, source: RunSource, diagnosis: Diagnosis, try_it: Callable[[], None] | None
    ) -> None:
        super().__init__(look, source)
        self._diagnosis = diagnosis
        self._try = try_it

    def lines(self, width: int) -> list[Row]:
        result = self._diagnosis.of(self._latest)
        return diagnosis_lines(self._latest, result, self._source.name, self._try is not None, width)

    def on_key(self, event: events.Key) -> None:
        # Textual also calls the handler of the base class, for all other keys.
        if event.key == "t" and self._try is not None and self.is_current:
            event.stop()
            self.go_back()
            self._try()


class LogScreen(RunPage):
    """The end of the captured output, updated every second."""

    title_text = "log of the run"
    leave_keys = LEAVE | {"l"}
    is_log = True
    _latest: list[str] = []  # noqa: RUF012  never changed in place

    def read(self) -> list[str]:
        text = self._source.log_lines(_LOG_LINES)
        return self._latest if text == self._latest else text

    def lines(self, width: int) -> list[Row]:
        return log_view(self._latest, width)
