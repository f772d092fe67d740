"""A screen that is one canvas, and the size and look of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rich.style import Style
from textual.app import ComposeResult
from textual.message import Message
from textual.message_pump import MessagePump
from textual.screen import Screen

from ndd_console.view.style import COLOUR, MONOCHROME, Row, ascii_rows
from ndd_console.widgets.canvas import Canvas, PatchCompositor


@dataclass(frozen=True, slots=True)
class Look:
    """What the terminal can show."""

    ascii_only: bool = False
    monochrome: bool = False

    @property
    def styles(self) -> dict[str, Style]:
        return MONOCHROME if self.monochrome else COLOUR


def post_from_thread(target: MessagePump, message: Message) -> bool:
    """Send a message from another thread; False when the app has ended meanwhile."""
    try:
        return target.post_message(message)
    except RuntimeError:  # its loop is closed
        return False


class CanvasScreen(Screen[None], inherit_bindings=False):
    """Calls `draw` for its rows, when the size changed and whenever `paint` is called."""

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
        """Draw and show, once there is a size."""
        width, height = self.canvas.size
        if not width or not height:
            return
        rows = self.draw(width, height)
        self.canvas.show(ascii_rows(rows) if self.look.ascii_only else rows)
        if self._on_painted is not None:
            painted, self._on_painted = self._on_painted, None
            self.call_after_refresh(painted)

    def go_back(self) -> None:
        """To the screen below. Keys that came in one go may ask for it twice; only the first counts."""
        if self.is_current:
            self.app.pop_screen()

    def on_canvas_resized(self) -> None:
        self.paint()
