"""A screen that consists of one canvas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Generic, TypeVar

from textual import events
from textual.app import ComposeResult
from textual.message import Message
from textual.message_pump import MessagePump
from textual.screen import Screen

from ndd_console.view.frame import framed, inner_width
from ndd_console.view.rows import paragraph, rule
from ndd_console.view.style import Look, Row, ascii_rows
from ndd_console.widgets.canvas import Canvas, PatchCompositor

# Keys that close a screen, and keys that move in a list.
LEAVE = frozenset({"escape", "q", "ctrl+q", "ctrl+c"})
# Keys work although nothing else is drawn.
_AFTER_FAILURE = "This is a defect of ndd-console. The run is not affected; all keys work (q: quit)."
POLL_S = 0.25  # between two looks at work in a thread
_FAR = 10**9
_MOVES = {"up": -1, "k": -1, "down": 1, "j": 1, "home": -_FAR, "end": _FAR}
View = TypeVar("View")


def key_of(event: events.Key) -> str:
    """The character of a printable key, else the key's name."""
    return event.character if event.is_printable and event.character else event.key


def moved(key: str, page: int = 8) -> int | None:
    """Lines by which a key moves in a list with pages of `page` lines; None for other keys."""
    return {**_MOVES, "pageup": -page, "pagedown": page}.get(key)


def bounded(value: int, count: int) -> int:
    """`value` limited to the indices of a list of `count` lines."""
    return min(max(value, 0), max(count - 1, 0))


def call_from_thread(target: MessagePump, callback: Callable[..., object], *args: object) -> bool:
    """Call it on the target's thread later. Returns False if the app has ended."""
    try:
        return target.call_later(callback, *args)
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
        self._failure = ""

    def compose(self) -> ComposeResult:
        yield self.canvas

    class Failed(Message):
        """Drawing a screen has failed; posted once per error."""

        def __init__(self, error: Exception) -> None:
            super().__init__()
            self.error = error

    def draw(self, width: int, height: int) -> list[Row]:
        """The rows of the screen, exactly `width` by `height`."""
        raise NotImplementedError

    def paint(self) -> None:
        """Draw the screen if its size is known."""
        width, height = self.canvas.size
        if not width or not height:
            return
        try:
            rows = self.draw(width, height)
        except Exception as error:  # noqa: BLE001  the user needs a screen to leave, and an explanation
            rows = self._failed(error, width, height)
        self.canvas.show(ascii_rows(rows) if self.look.ascii_only else rows)
        if self._on_painted is not None:
            painted, self._on_painted = self._on_painted, None
            self.call_after_refresh(painted)

    def _failed(self, error: Exception, width: int, height: int) -> list[Row]:
        """What is drawn instead of the screen. The app is told about each error once."""
        text = f"{type(error).__name__}: {error}"
        if text != self._failure:
            self._failure = text
            self.post_message(self.Failed(error))
        inner = inner_width(width)
        body = [rule("this screen cannot be drawn", inner, "bad"), *paragraph(text[:1000], inner)]
        return framed(body, paragraph(_AFTER_FAILURE, inner, "dim")[: max(height - 2, 0)], width, height)

    def go_back(self) -> None:
        """Return to the previous screen. A second call, from keys typed ahead, has no effect."""
        if self.is_current:
            self.app.pop_screen()

    def on_canvas_resized(self) -> None:
        self.paint()


class ViewScreen(CanvasScreen, Generic[View]):
    """Draws a dataclass, its view, with `rows(view, width, height)`."""

    def __init__(
        self,
        look: Look,
        view: View,
        rows: Callable[[View, int, int], list[Row]],
        on_painted: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(look, on_painted)
        self.view = view
        self._rows = rows

    def draw(self, width: int, height: int) -> list[Row]:
        return self._rows(self.view, width, height)

    def show(self, **changes: Any) -> None:
        """Replace fields of the view, and draw it if it has changed."""
        self.show_view(replace(self.view, **changes))  # type: ignore[type-var]

    def show_view(self, view: View) -> None:
        before, self.view = self.view, view
        if view != before and self.is_current:
            self.paint()

    def on_screen_resume(self) -> None:
        self.paint()
