"""The help, the settings and the captured output: pages of text that scroll."""

from __future__ import annotations

from textual import events

from ndd_console.screens.interfaces import RunSource
from ndd_console.view.pager import HELP_KEYS, help_lines, log_view, page_room, page_rows
from ndd_console.view.settings import settings_lines
from ndd_console.view.style import Row

from .base import CanvasScreen, Look

_LOG_LINES = 2000  # how far back the log page goes
REFRESH_S = 1.0
LEAVE = frozenset({"escape", "q", "ctrl+q", "ctrl+c"})


class PageScreen(CanvasScreen):
    """Lines with a place in them. `follow`: stay at the end while lines are added."""

    title_text = ""
    leave_keys = LEAVE

    def __init__(self, look: Look, follow: bool = False) -> None:
        super().__init__(look)
        self.top = 0
        self.follow = follow

    def lines(self, width: int) -> list[Row]:
        """All lines, made for this width."""
        raise NotImplementedError

    def draw(self, width: int, height: int) -> list[Row]:
        lines = self.lines(max(width - (2 if width >= 40 else 0), 1))
        last = max(len(lines) - page_room(height), 0)
        self.top = last if self.follow else min(self.top, last)
        keys = (("esc", "back"),) if not last else (("↑↓", "scroll"), ("g G", "start, end"), ("esc", "back"))
        return page_rows(lines, self.top, keys, self.title_text, width, height)

    def on_key(self, event: events.Key) -> None:
        if event.key in self.leave_keys:
            event.stop()
            self.go_back()
            return
        page = page_room(self.canvas.size.height) - 1
        moves = {
            "up": -1, "k": -1, "down": 1, "j": 1, "pageup": -page, "pagedown": page, "space": page,
            "home": -10**9, "g": -10**9, "end": 10**9, "G": 10**9,
        }  # fmt: skip
        step = moves.get(event.key, moves.get(event.character or ""))
        if step is None:
            return
        before = self.top
        self.top = max(self.top + step, 0)
        self.follow = False
        self.paint()
        # Having come to the end by moving down means to follow it again.
        self.follow = self.is_log and step > 0 and self.top < before + step

    is_log = False


class HelpScreen(PageScreen):
    """Keys and words. keys: of the screen that it is asked for on."""

    title_text = "keys, and the words on the screen"
    leave_keys = LEAVE | {"question_mark", "h"}

    def __init__(self, look: Look, keys: tuple[tuple[str, str], ...] = HELP_KEYS) -> None:
        super().__init__(look)
        self._keys = keys

    def lines(self, width: int) -> list[Row]:
        return help_lines(width, self._keys)


class SettingsScreen(PageScreen):
    """What was requested, what was applied and whether it took effect; looked at again every second."""

    title_text = "settings"
    leave_keys = LEAVE | {"i"}

    def __init__(self, look: Look, source: RunSource) -> None:
        super().__init__(look)
        self._source = source
        self._snapshot = source.snapshot()

    def on_mount(self) -> None:
        self.set_interval(REFRESH_S, self.read_again)

    def read_again(self) -> None:
        """Take up what changed."""
        before, self._snapshot = self._snapshot, self._source.snapshot()
        if before is not self._snapshot:
            self.paint()

    def lines(self, width: int) -> list[Row]:
        return settings_lines(self._snapshot, width)


class LogScreen(PageScreen):
    """The tail of what the run printed, read again every second."""

    title_text = "captured output"
    leave_keys = LEAVE | {"l"}
    is_log = True

    def __init__(self, look: Look, source: RunSource) -> None:
        super().__init__(look, follow=True)
        self._source = source
        self._text: list[str] = []
        self._made: tuple[int, list[Row]] | None = None

    def on_mount(self) -> None:
        self._text = self._source.log_lines(_LOG_LINES)
        self.set_interval(REFRESH_S, self.read_again)

    def read_again(self) -> None:
        """Take up new lines."""
        text = self._source.log_lines(_LOG_LINES)
        if text != self._text:
            self._text = text
            self._made = None
            self.paint()

    def lines(self, width: int) -> list[Row]:
        if self._made is None or self._made[0] != width:
            self._made = (width, log_view(self._text, width))
        return self._made[1]
