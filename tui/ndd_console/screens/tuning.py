"""The ladder screen: looks at the climb on a timer, and asks it to stop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from textual import events

from ndd_console.view.style import Row
from ndd_console.view.tuning import TuningView, tuning_rows

from .base import CanvasScreen, Look

if TYPE_CHECKING:
    from ndd_engine.trial.tuning import TuningState

_LOOK_S = 0.25
_PAGE = 8


class TuningSource(Protocol):
    """A climb that goes on by itself in a thread."""

    @property
    def name(self) -> str:
        """What it begins with, for people."""

    @property
    def state(self) -> TuningState | None:
        """How far it is; None before anything was told."""

    @property
    def problem(self) -> str:
        """Why it ended without a result; "" otherwise."""

    @property
    def saved(self) -> str:
        """Where the resulting configuration was written; "" until then."""

    def save(self) -> str:
        """Write the result into a new file; what is wrong, "" when it was written."""

    def stop(self) -> None:
        """End it soon, with what was measured so far as its result. Returns at once."""


class TuningScreen(CanvasScreen):
    """One climb. `leave` is called once it is over and the user closes the screen."""

    def __init__(
        self,
        look: Look,
        climb: TuningSource,
        leave: Callable[[], None],
        on_painted: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(look, on_painted)
        self._climb = climb
        self._leave = leave
        self.view = TuningView(climb.name)

    def on_mount(self) -> None:
        self.set_interval(_LOOK_S, self.look_again)

    def look_again(self) -> None:
        """Take up how far it is."""
        climb = self._climb
        self.show(replace(self.view, state=climb.state, problem=climb.problem, saved=climb.saved))

    def show(self, view: TuningView) -> None:
        """Take a new view and draw it."""
        if view != self.view:
            self.view = view
            self.paint()

    def draw(self, width: int, height: int) -> list[Row]:
        return tuning_rows(self.view, width, height)

    def on_key(self, event: events.Key) -> None:
        event.stop()
        moves = {
            "up": -1,
            "k": -1,
            "down": 1,
            "j": 1,
            "pageup": -_PAGE,
            "pagedown": _PAGE,
            "home": -9999,
            "end": 9999,
        }
        if event.key in ("escape", "q", "ctrl+q", "ctrl+c"):
            if self.view.over:
                self._leave()
            else:
                self._climb.stop()
                self.show(replace(self.view, stopping=True))
        elif event.key == "w" and self.view.can_save:
            trouble = self._climb.save()
            self.show(replace(self.view, trouble=trouble, saved=self._climb.saved))
        elif event.key in moves and self.view.state is not None:
            count = len(self.view.state.rows)
            top = (self.view.top or 0) + moves[event.key]
            self.show(replace(self.view, top=min(max(top, 0), max(count - 1, 0))))
