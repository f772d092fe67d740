"""The tuning screen."""

from __future__ import annotations

from collections.abc import Callable

from textual import events

from ndd_console.screens.interfaces import TuningSource
from ndd_console.view.style import Look
from ndd_console.view.tuning import TuningView, tuning_rows

from .base import LEAVE, POLL_S, ViewScreen, bounded, moved


class TuningScreen(ViewScreen[TuningView]):
    """Shows a sweep. `leave` is called when the user closes the screen after its end."""

    def __init__(
        self,
        look: Look,
        source: TuningSource,
        leave: Callable[[], None],
        on_painted: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(look, TuningView(source.name), tuning_rows, on_painted)
        self._source = source
        self._leave = leave

    def on_mount(self) -> None:
        self.set_interval(POLL_S, self.poll)

    def poll(self) -> None:
        """Show the latest state."""
        source = self._source
        self.show(state=source.state, problem=source.problem, saved=source.saved)

    def on_key(self, event: events.Key) -> None:
        event.stop()
        step = moved(event.key)
        if event.key in LEAVE:
            if self.view.over:
                self._leave()
            else:
                self._source.stop()
                self.show(stopping=True)
        elif event.key == "w" and self.view.can_save:
            trouble = self._source.save()
            self.show(trouble=trouble, saved=self._source.saved)
        elif step is not None and self.view.state is not None:
            self.show(top=bounded((self.view.top or 0) + step, len(self.view.state.rows)))
