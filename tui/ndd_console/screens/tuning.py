"""The tuning screen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from textual import events

from ndd_console.screens.interfaces import TuningSource
from ndd_console.view.style import Row
from ndd_console.view.tuning import TuningView, tuning_rows

from .base import LEAVE, CanvasScreen, Look, moved

_POLL_S = 0.25
_PAGE = 8


class TuningScreen(CanvasScreen):
    """Shows a sweep. `leave` is called when the user closes the screen after its end."""

    def __init__(
        self,
        look: Look,
        source: TuningSource,
        leave: Callable[[], None],
        on_painted: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(look, on_painted)
        self._source = source
        self._leave = leave
        self.view = TuningView(source.name)

    def on_mount(self) -> None:
        self.set_interval(_POLL_S, self.poll)

    def poll(self) -> None:
        """Show the latest state."""
        source = self._source
        self.show(replace(self.view, state=source.state, problem=source.problem, saved=source.saved))

    def show(self, view: TuningView) -> None:
        """Draw a new view."""
        if view != self.view:
            self.view = view
            self.paint()

    def draw(self, width: int, height: int) -> list[Row]:
        return tuning_rows(self.view, width, height)

    def on_key(self, event: events.Key) -> None:
        event.stop()
        step = moved(event.key, _PAGE)
        if event.key in LEAVE:
            if self.view.over:
                self._leave()
            else:
                self._source.stop()
                self.show(replace(self.view, stopping=True))
        elif event.key == "w" and self.view.can_save:
            trouble = self._source.save()
            self.show(replace(self.view, trouble=trouble, saved=self._source.saved))
        elif step is not None and self.view.state is not None:
            last = max(len(self.view.state.rows) - 1, 0)
            self.show(replace(self.view, top=min(max((self.view.top or 0) + step, 0), last)))
