"""The base of all screens: keys from a table, errors shown in place of a screen, widgets, and questions over it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, TypeVar, cast

from textual import events
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.message import Message
from textual.message_pump import MessagePump
from textual.screen import ModalScreen, Screen
from textual.widget import Widget
from textual.widgets import RichLog

from ndd_console.jobs.folder import StartRow
from ndd_console.jobs.run_sources import RunRow, RunSource
from ndd_console.jobs.wizard import WizardJob
from ndd_console.view.keys import APP_KEYS, NEEDS, SCROLL_KEYS, SIDEWAYS_KEY, Key
from ndd_console.view.rows import (
    Entry,
    Keys,
    cells,
    footer_row,
    framed,
    inner_width,
    paragraph,
    rule,
    side_by_side,
    wrap,
)  # fmt: skip
from ndd_console.view.style import Look, Row
from ndd_console.widgets.lines import KeyBar, Lines, RowList, RowTable, TextField, bindings
from ndd_engine.errors import error_text

T = TypeVar("T")
Result = Literal["quit", "stop", "detach", "kill", "hangup"]
# Opens the wizard for the run on the screen, else for an entry of the home screen; None if there is none.
WizardOpener = Callable[[RunSource | None, StartRow | None], WizardJob]

# Keys work although nothing else is drawn.
_AFTER_FAILURE = "This is a defect of ndd-console. The run is not affected; all keys work (q: quit)."
POLL_S = 0.25  # between two looks at work in a thread
MESSAGE_S = 10.0  # how long an answer to a key is shown

CANCEL = "esc"
INTERRUPT = "ctrl+c"
_CANCELS = frozenset({"escape", "q", "ctrl+q", "n"})
_FRAME = 4  # cells of the border and its padding
_LEAST_FIELD = 40
_SUSPEND = [key for key in APP_KEYS if key.action == "suspend_process"]


def call_from_thread(target: MessagePump, callback: Callable[..., object], *args: object) -> bool:
    """Call it on the target's thread later. Returns False if the app has ended."""
    try:
        return target.call_later(callback, *args)
    except RuntimeError:  # its event loop is closed
        return False


class ScreenHost(Protocol):
    """What the screens of the console ask of its app."""

    opening: bool
    new_wizard: WizardOpener | None

    def open_run(self, run: RunRow) -> None: ...
    def train(self, row: StartRow) -> None: ...
    def open_wizard(self, run: RunSource | None, row: StartRow | None = None) -> None: ...
    def leave_live(self, result: Result) -> None: ...
    def leave(self) -> None: ...


class CurrentScreen(Screen[T]):
    """A screen that is laid out for the newest size of the terminal only.

    Textual's screen sends itself a resize for each size that it takes. With two sizes on their way it would draw both
    in turn for ever.
    """

    def on_resize(self, event: events.Resize) -> None:
        if event.size != self.app.size:
            event.prevent_default()


class KeyScreen(CurrentScreen[None], inherit_bindings=False):
    """A screen whose keys are a table. A key that cannot work is not in the footer, and says why when it is pressed."""

    keys: ClassVar[tuple[Key, ...]] = ()

    def __init_subclass__(cls, **options: Any) -> None:
        if "keys" in cls.__dict__:
            cls.BINDINGS = bindings(cls.keys, "use('{}')")
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

    @property
    def console(self) -> ScreenHost:
        """The app, of the screens that only the console has."""
        return cast("ScreenHost", self.app)

    # Keys.

    def has(self, need: str) -> bool:
        raise NotImplementedError(need)

    def word(self, key: Key) -> str:
        """What the key does now, for the footer."""
        return key.word

    def say(self, text: str) -> None:
        raise NotImplementedError

    def refusal(self, key: Key) -> str:
        """Why the key cannot work now; "" if it can."""
        return next((NEEDS[need] for need in key.needs if not self.has(need)), "")

    def usable(self) -> Iterator[Key]:
        return (key for key in self.keys if not self.refusal(key))

    def key_words(self) -> Keys:
        """The keys of the footer that work now."""
        return tuple((key.shown, self.word(key)) for key in self.usable() if key.drop is not None)

    def early_words(self) -> Keys:
        """The keys that a narrow footer drops first."""
        early = sorted((key for key in self.usable() if key.drop), key=lambda key: key.drop or 0)
        return tuple((key.shown, self.word(key)) for key in early)

    def help_keys(self) -> tuple[Key, ...]:
        """The keys of the help page: those that work now."""
        return tuple(self.usable())

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
        self.use(next(key for key in self.keys if key.action == action))

    def use(self, key: Key) -> None:
        why = self.refusal(key)
        if why:
            self.say(why)
        else:
            getattr(self.target(key), f"action_{key.action}")()

    def target(self, key: Key) -> Widget:
        """What the key acts on."""
        return self

    def use_key(self, name: str) -> None:
        """Do what a key does now, or say why it does nothing. name: one of its names, or as the footer shows it."""
        key = self.key_named(name)
        if key is not None:
            self.use(key)
        else:
            self.say(NEEDS["a key"])

    def key_named(self, name: str) -> Key | None:
        named = (key for key in (*self.usable(), *self.keys) if name in (key.shown, *key.names.split(",")))
        return next(named, None)

    def on_key(self, event: events.Key) -> None:
        """No key is silent. What is typed into a field does not arrive here."""
        if not self.is_current:
            event.stop()  # typed before this screen was gone
        elif event.is_printable and event.key not in self.active_bindings:
            event.stop()  # it is not also a key of the screen that this one opens
            self.use_key(event.key)

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

    def show_rows(self, rows: list[Row]) -> None:
        """Show these rows in place of the screen, such as those about an error."""
        raise NotImplementedError

    def paint(self) -> None:
        """Draw the screen if its size is known and it has not been left: a resize may arrive after that."""
        width, height = self.app.size
        if not width or not height or self not in self.app.screen_stack:
            return
        try:
            self.draw(width, height)
        except Exception as error:  # noqa: BLE001  the user needs a screen to leave, and an explanation
            self.show_rows(self._failed(error, width, height))
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
    """A screen of Textual's widgets: `top`, `body` and `below`, and the footer.

    others: shown in place of the body, see `swap`. between: widgets after the body. selects: the action of a selected
    entry of a list or a table. every_s: seconds from one `look_again` to the next; 0 for none.
    """

    selects: ClassVar[str] = ""
    every_s: ClassVar[float] = 0.0

    def __init__(
        self, look: Look, body: Widget, on_painted: Callable[[], None] | None = None, *,
        others: tuple[Widget, ...] = (), between: tuple[Widget, ...] = (),
    ) -> None:  # fmt: skip
        super().__init__(look, on_painted)
        self.top, self.below, self.bar = Lines(look), Lines(look), KeyBar(look)
        self.body, self._bodies, self._parts = body, (body, *others), (body, *between, *others)
        self._shown = body
        for other in others:
            other.display = False
        self._instead = Lines(look, classes="instead")
        self._instead.display = False
        self.message = ("", "text")

    def compose(self) -> ComposeResult:
        yield from (self.top, *self._parts, self.below, self.bar, self._instead)

    def on_mount(self) -> None:
        self.paint()
        if self.every_s:
            self.set_interval(self.every_s, self.look_again)

    def set_folder(self, folder: Path | None) -> None:
        """What relative places in code belong to; None if that is not known, so that they are no links."""
        for shown in (self.top, *self._parts, self.below):
            if isinstance(shown, Lines | RowList):
                shown.folder = folder

    def look_again(self) -> None:
        """Show what is new."""
        self.paint_if_current()

    def on_screen_resume(self) -> None:
        self.paint()

    def on_resize(self, event: events.Resize) -> None:
        # Textual also calls the handler of the base class.
        self.call_after_refresh(self.paint)  # whether a text scrolls depends on its height

    def on_option_list_option_highlighted(self) -> None:
        """Other keys may work now; why one did not is no longer of use."""
        if self.message[0] in NEEDS.values():
            self.message = ("", "text")
        self.paint_if_current()

    def on_option_list_option_selected(self) -> None:
        self.action_use(self.selects)

    on_data_table_row_highlighted = on_option_list_option_highlighted

    def on_data_table_row_selected(self) -> None:
        if self.selects:
            self.action_use(self.selects)

    def paint_if_current(self) -> None:
        """Draw the screen if it is not below another one, whose end draws it."""
        if self.is_current:
            self.paint()

    def say(self, text: str, style: str = "accent", *, briefly: bool = False) -> None:
        """Show a message above the footer; "" for none. Why a key does not work is shown briefly, too."""
        self.message = (text, style)
        if briefly or text in NEEDS.values():
            self.set_timer(MESSAGE_S, lambda: self.say("") if self.message[0] == text else None)
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

    def show_rows(self, rows: list[Row]) -> None:
        self._instead.show(rows)
        self._instead.display = True

    def swap(self, wanted: Widget) -> None:
        """Show one of the bodies, and give it the focus."""
        if self._shown is not wanted:
            self._shown = wanted
            for one in self._bodies:
                one.display = one is wanted
            wanted.focus()
            self.call_after_refresh(self.paint)  # whether the text scrolls depends on its height

    def usable(self) -> Iterator[Key]:
        """Also the keys that scroll, if there is more than room for it."""
        shown = self._shown
        if isinstance(shown, Lines | RichLog) and shown.max_scroll_y > 0:
            yield from SCROLL_KEYS
        elif isinstance(shown, RowTable) and shown.max_scroll_x > 0:
            yield SIDEWAYS_KEY
        yield from super().usable()

    def target(self, key: Key) -> Widget:
        return self._shown if key in (*SCROLL_KEYS, SIDEWAYS_KEY) else self


class Dialog(ModalScreen[str], CurrentScreen[str], inherit_bindings=False):
    """A framed box over a screen."""

    BINDINGS = bindings(_SUSPEND, "app.{}")

    def __init__(self, look: Look, title: str) -> None:
        super().__init__()
        self.look, self.question = look, title
        self.heading = Lines(look)
        self._answered = False

    def on_mount(self) -> None:
        self.paint()

    def on_resize(self, event: events.Resize) -> None:
        self.paint()

    def paint(self) -> None:
        """Draw the question for the width of the screen."""
        width = self.box_width(max(self.app.size.width - _FRAME, 1))
        self.heading.styles.width = width
        self.heading.show([*(((line, "bold"),) for line in wrap(self.question, width)), ()])

    def answer(self, result: str) -> None:
        """Close with this result. A further key may arrive before the screen is gone, and changes nothing."""
        if not self._answered:
            self._answered = True
            self.dismiss(result)

    def box_width(self, room: int) -> int:
        return min(cells(self.question), room)


class Question(Dialog):
    """Asks for one of several choices: (key, what it does). The result is the key of the choice."""

    def __init__(self, look: Look, title: str, choices: Keys) -> None:
        super().__init__(look, title)
        cancels = any(key == CANCEL for key, _ in choices)
        self._choices = choices if cancels else (*choices, (CANCEL, "cancel"))
        self._lead = max(cells(key) for key, _ in self._choices) + 2
        self.list = RowList(look)

    def compose(self) -> ComposeResult:
        with Vertical():
            yield self.heading
            yield self.list

    def box_width(self, room: int) -> int:
        longest = self._lead + max(cells(text) for _, text in self._choices)
        return min(max(longest, cells(self.question)), room)

    def paint(self) -> None:
        super().paint()
        width = self.box_width(max(self.app.size.width - _FRAME, 1))
        lead, rest = self._lead, max(width - self._lead, 1)
        self.list.styles.width = width
        self.list.show([
            Entry(key, tuple(side_by_side([((key, "key"),)], paragraph(text, rest), lead, 0, rest)))
            for key, text in self._choices
        ])  # fmt: skip

    def on_option_list_option_selected(self) -> None:
        self.answer(self.list.chosen)

    def on_key(self, event: events.Key) -> None:
        key = event.character if event.is_printable else event.key
        if key in [choice for choice, _ in self._choices] or key == INTERRUPT:
            self.answer(key)
        elif key in _CANCELS:
            self.answer(CANCEL)


class TextQuestion(Dialog):
    """Asks for a text. The result is the text; "" if it is cancelled. pattern: of the text while it is typed."""

    def __init__(
        self, look: Look, title: str, pattern: str = "", longest: int = 0, default: str = ""
    ) -> None:
        super().__init__(look, title)
        self.input = TextField(
            placeholder=default, restrict=pattern or None, max_length=longest, select_on_focus=False
        )
        self._default = default

    def compose(self) -> ComposeResult:
        with Vertical():
            yield self.heading
            yield self.input

    def box_width(self, room: int) -> int:
        return min(max(cells(self.question), _LEAST_FIELD), room)

    def on_input_submitted(self) -> None:
        self.answer(self.input.value or self._default)

    def on_key(self, event: events.Key) -> None:
        if event.key in ("escape", "ctrl+q", INTERRUPT):
            event.stop()
            self.answer("")
