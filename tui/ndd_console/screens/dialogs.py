"""Questions over a screen: one with choices, and one that asks for a text."""

from __future__ import annotations

from textual import events
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.screen import ModalScreen

from ndd_console.view.frame import Entry, Keys
from ndd_console.view.keys import APP_KEYS
from ndd_console.view.rows import cells, wrap
from ndd_console.view.style import Look
from ndd_console.widgets.lines import Lines, RowList, TextField, bindings

CANCEL = "esc"
INTERRUPT = "ctrl+c"
_CANCELS = frozenset({"escape", "q", "ctrl+q", "n"})
_FRAME = 4  # cells of the border and its padding
_LEAST_FIELD = 40
_SUSPEND = [key for key in APP_KEYS if key.action == "suspend_process"]


class Dialog(ModalScreen[str], inherit_bindings=False):
    """A framed box over a screen."""

    BINDINGS = bindings(_SUSPEND, "app.{}")

    def __init__(self, look: Look, title: str) -> None:
        super().__init__()
        self.look, self.question = look, title
        self.heading = Lines(look)
        self._answered = False

    def on_mount(self) -> None:
        self.paint()

    def on_resize(self) -> None:
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
        """The width of the box inside its frame."""
        return min(cells(self.question), room)


class Question(Dialog):
    """Asks for one of several choices: (key, what it does). The result is the key of the choice."""

    def __init__(self, look: Look, title: str, choices: Keys) -> None:
        super().__init__(look, title)
        self._choices = (
            (*choices, (CANCEL, "cancel")) if all(key != CANCEL for key, _ in choices) else choices
        )
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
        lead = self._lead
        entries = []
        for key, text in self._choices:
            lines = wrap(text, max(width - lead, 1))
            rows = [
                ((("" if index else key).ljust(lead), "key"), (line, "text"))
                for index, line in enumerate(lines)
            ]
            entries.append(Entry(key, tuple(rows)))
        self.list.styles.width = width
        self.list.show(entries)

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
