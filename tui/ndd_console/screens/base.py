"""A screen that consists of one canvas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rich.style import Style
from textual import events
from textual.app import ComposeResult
from textual.message import Message
from textual.message_pump import MessagePump
from textual.screen import Screen

from ndd_console.view.style import COLOUR, MONOCHROME, Row, ascii_rows
from ndd_console.widgets.canvas import Canvas, PatchCompositor

# Keys that close a screen, and keys that move in a list.
LEAVE = frozenset({"escape", "q", "ctrl+q", "ctrl+c"})
_FAR = 10**9
_MOVES = {"up": -1, "k": -1, "down": 1, "j": 1, "home": -_FAR, "end": _FAR}


@dataclass(frozen=True, slots=True)
class Look:
    """Capabilities of the terminal."""

    ascii_only: bool = False
    monochrome: bool = False

    @property
    def styles(self) -> dict[str, Style]:
        return MONOCHROME if self.monochrome else COLOUR


def key_of(event: events.Key) -> str:
    """The character of a printable key, else the key's name."""
    return event.character if event.is_printable and event.character else event.key


def moved(key: str, page: int) -> int | None:
    """Lines by which a key moves in a list with pages of `page` lines; None for other keys."""
    return {**_MOVES, "pageup": -page, "pagedown": page}.get(key)


def post_from_thread(target: MessagePump, message: Message) -> bool:
    """Post a message from another thread. Returns False if the app has ended."""
    try:
        return target.post_message(message)
    except RuntimeError:  # its event loop is closed
        return False


class CanvasScreen(Screen[None], inherit_bindings=False):
    """Draws the rows of `draw` after a resize and on every call of `paint`."""

    DEFAULT_CSS = "CanvasScreen { overflow: hidden; }"

    def __init__(self, look: Look, on_painted: Callable[[], None] | None = None) -> None:
        super().__init__()
        self.look = look
        self.canvas = Canvas(look.styles)
        self._compositor = PatchCompositor(self.canvas)
        self._on_painted = on_painted

    def compose(self) -> ComposeResult:
        yield self.canvas

    def draw(self, width: int, height: int) -> list[Row]:
        """The rows of the screen, exactly `width` by `height`."""
        raise NotImplementedError

    def paint(self) -> None:
        """Draw the screen if its size is known."""
        width, height = self.canvas.size
        if not width or not height:
            return
        rows = self.draw(width, height)
        self.canvas.show(ascii_rows(rows) if self.look.ascii_only else rows)
        if self._on_painted is not None:
            painted, self._on_painted = self._on_painted, None
            self.call_after_refresh(painted)

    def go_back(self) -> None:
        """Return to the previous screen. A second call, from keys typed ahead, has no effect."""
        if self.is_current:
            self.app.pop_screen()

    def on_canvas_resized(self) -> None:
        self.paint()
