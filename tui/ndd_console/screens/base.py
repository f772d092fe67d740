"""The base of all screens: keys from a table, errors that are shown in place of the screen, and its widgets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

from textual import events
from textual.app import ComposeResult
from textual.geometry import Size
from textual.message import Message
from textual.message_pump import MessagePump
from textual.screen import Screen
from textual.scroll_view import ScrollView
from textual.widget import Widget
from textual.widgets import RichLog

from ndd_console.view.frame import Keys, footer_row, framed, inner_width
from ndd_console.view.keys import NEEDS, SCROLL_KEYS, Key
from ndd_console.view.rows import paragraph, rule
from ndd_console.view.style import Look, Row
from ndd_console.widgets.lines import KeyBar, Lines, bindings
from ndd_engine.errors import error_text

T = TypeVar("T")

# Keys work although nothing else is drawn.
_AFTER_FAILURE = "This is a defect of ndd-console. The run is not affected; all keys work (q: quit)."
POLL_S = 0.25  # between two looks at work in a thread


def call_from_thread(target: MessagePump, callback: Callable[..., object], *args: object) -> bool:
    """Call it on the target's thread later. Returns False if the app has ended."""
    try:
        return target.call_later(callback, *args)
    except RuntimeError:  # its event loop is closed
        return False


class KeyScreen(Screen[None], inherit_bindings=False):
    """A screen whose keys are a table. A key that cannot work is not in the footer, and says why when it is pressed."""

    keys: ClassVar[tuple[Key, ...]] = ()

    def __init_subclass__(cls, **options: Any) -> None:
        if "keys" in cls.__dict__:
            cls.BINDINGS = [*bindings(cls.keys, "use('{}')"), *cls.__dict__.get("BINDINGS", [])]
        super().__init_subclass__(**options)

    def __init__(self, look: Look, on_painted: Callable[[], None] | None = None) -> None:
        super().__init__()
        self.look = look
        self._on_painted = on_painted
        self._failure = ""

    class Failed(Message):
        """Drawing a screen has failed; posted once per error."""

        def __init__(self, error: Exception) -> None:
            super().__init__()
            self.error = error

    # Keys.

    def has(self, need: str) -> bool:
        """Whether the screen has what a key needs; see `NEEDS`."""
        raise NotImplementedError(need)

    def word(self, key: Key) -> str:
        """What the key does now, for the footer."""
        return key.word

    def say(self, text: str) -> None:
        """Show a message."""
        raise NotImplementedError

    def refusal(self, key: Key) -> str:
        """Why the key cannot work now; "" if it can."""
        return next((NEEDS[need] for need in key.needs if not self.has(need)), "")

    def usable(self) -> Iterator[Key]:
        """The keys that work now."""
        return (key for key in self.keys if not self.refusal(key))

    def key_words(self) -> Keys:
        """The keys of the footer that work now."""
        return tuple((key.shown, self.word(key)) for key in self.usable() if key.drop is not None)

    def early_words(self) -> Keys:
        """The keys that a narrow footer drops first."""
        early = sorted((key for key in self.usable() if key.drop), key=lambda key: key.drop or 0)
        return tuple((key.shown, self.word(key)) for key in early)

    def help_keys(self) -> tuple[Key, ...]:
        """All keys for the help page; those that cannot work now say why."""
        return tuple(
            replace(key, help=f"{key.help} (not now: {why})")
            if key.help and (why := self.refusal(key))
            else key
            for key in self.keys
        )

    def beside(
        self,
        work: Callable[[], T],
        then: Callable[[T], object],
        failed: Callable[[str], object],
        *,
        daemon: bool = True,
    ) -> None:
        """Work in a thread, then call `then` with its result, or `failed` with its error.

        daemon: whether it may be left when the program ends.
        """

        def run() -> None:
            try:
                result = work()
            except Exception as error:  # noqa: BLE001  without a message the user would wait forever
                call_from_thread(self, failed, error_text(error))
            else:
                call_from_thread(self, then, result)

        threading.Thread(target=run, name="ndd-beside", daemon=daemon).start()

    def action_use(self, action: str) -> None:
        """A key was pressed."""
        self.use(next(key for key in self.keys if key.action == action))

    def use(self, key: Key) -> None:
        """Do what a key does, or say why it cannot work now."""
        why = self.refusal(key)
        if why:
            self.say(why)
        else:
            getattr(self.target(key), f"action_{key.action}")()

    def target(self, key: Key) -> Widget:
        """What the key acts on."""
        return self

    def use_key(self, name: str) -> None:
        """Do what a key does now, if anything. name: one of its names, or as the footer shows it."""
        for key in self.usable():
            if name in (key.shown, *key.names.split(",")):
                self.use(key)
                return

    def action_help(self) -> None:
        from .pages import HelpScreen

        self.app.push_screen(HelpScreen(self.look, self.help_keys()))

    def action_back(self) -> None:
        """Return to the previous screen. A second call, from keys typed ahead, has no effect."""
        if self.is_current:
            self.app.pop_screen()

    # Drawing.

    def draw(self, width: int, height: int) -> None:
        """Give the widgets their content."""
        raise NotImplementedError

    def draw_failure(self, rows: list[Row]) -> None:
        """Show these rows in place of the screen."""
        raise NotImplementedError

    def paint(self) -> None:
        """Draw the screen if its size is known."""
        width, height = self.app.size
        if not width or not height:
            return
        try:
            self.draw(width, height)
        except Exception as error:  # noqa: BLE001  the user needs a screen to leave, and an explanation
            self.draw_failure(self._failed(error, width, height))
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


class WidgetScreen(KeyScreen):
    """A screen of Textual's widgets: `top`, `body` and `below`, and the footer."""

    def __init__(self, look: Look, body: Widget, on_painted: Callable[[], None] | None = None) -> None:
        super().__init__(look, on_painted)
        self.top, self.below, self.bar = Lines(look), Lines(look), KeyBar(look)
        self.body = body
        self._instead = Lines(look, classes="instead")
        self._instead.display = False
        self.message = ("", "text")
        self._sized: Size | None = None

    def parts(self) -> tuple[Widget, ...]:
        """The widgets above the footer."""
        return self.top, self.body, self.below

    def compose(self) -> ComposeResult:
        yield from (*self.parts(), self.bar, self._instead)

    def on_mount(self) -> None:
        self.paint()

    def on_screen_resume(self) -> None:
        self.paint()

    def on_resize(self, event: events.Resize) -> None:
        if event.size != self._sized:  # Textual repeats the event while a terminal contradicts itself
            self._sized = event.size
            self.call_after_refresh(self.paint)  # whether a text scrolls depends on its height

    def on_option_list_option_highlighted(self) -> None:
        """Other keys may work now; why one did not is no longer of use."""
        if self.message[0] in NEEDS.values():
            self.message = ("", "text")
        self.paint_if_current()

    def paint_if_current(self) -> None:
        """Draw the screen if it is not below another one, whose end draws it."""
        if self.is_current:
            self.paint()

    def say(self, text: str, style: str = "accent") -> None:
        """Show a message above the footer; "" for none."""
        self.message = (text, style)
        self.paint()

    def sections(self, width: int, height: int) -> tuple[list[Row], list[Row]]:
        """Fill the body. Returns the rows above and below it, for `width` cells."""
        raise NotImplementedError

    def draw(self, width: int, height: int) -> None:
        inner = inner_width(width)
        message = paragraph(self.message[0], inner, self.message[1], max(height // 2, 1))
        top, below = self.sections(inner, height - 1 - len(message))
        self.top.show(top)
        self.below.show([*below, *message])
        self.bar.show([footer_row(self.key_words(), inner, self.early_words())])
        self._instead.display = False

    def draw_failure(self, rows: list[Row]) -> None:
        self._instead.show(rows)
        self._instead.display = True

    def text(self) -> ScrollView | None:
        """The text that the keys scroll, if there is one."""
        return self.body if isinstance(self.body, Lines | RichLog) else None

    def swap(self, *, listed: bool) -> None:
        """Show the list or the text of a screen that has both, and give it the focus."""
        text = self.text()
        if text is not None and (listed != self.body.display or listed == text.display):
            self.body.display, text.display = listed, not listed
            (self.body if listed else text).focus()
            self.call_after_refresh(self.paint)  # whether the text scrolls depends on its height

    def usable(self) -> Iterator[Key]:
        """Also the keys that scroll, if there is more text than room."""
        text = self.text()
        if text is not None and text.display and text.max_scroll_y > 0:
            yield from SCROLL_KEYS
        yield from super().usable()

    def help_keys(self) -> tuple[Key, ...]:
        return (*(SCROLL_KEYS if self.text() is not None else ()), *super().help_keys())

    def target(self, key: Key) -> Widget:
        return self.text() or self if key in SCROLL_KEYS else self
