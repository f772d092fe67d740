"""The tuning screen."""

from __future__ import annotations

from collections.abc import Callable

from ndd_console.screens.interfaces import TuningSource
from ndd_console.view.keys import TUNING_KEYS, Key
from ndd_console.view.style import Look, Row
from ndd_console.view.tuning import TuningView, below, current, entries, heading
from ndd_console.widgets.lines import RowList

from .base import POLL_S, ViewScreen


class TuningScreen(ViewScreen[TuningView]):
    """Shows a sweep. `leave` is called when the user closes the screen after its end."""

    keys = TUNING_KEYS
    body: RowList

    def __init__(
        self,
        look: Look,
        source: TuningSource,
        leave: Callable[[], None],
        on_painted: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(look, TuningView(source.name), RowList(look), on_painted)
        self._source = source
        self._leave = leave
        self._current: int | None = None

    def on_mount(self) -> None:
        self.set_interval(POLL_S, self.poll)

    def poll(self) -> None:
        """Show the latest state."""
        source = self._source
        self.show(state=source.state, problem=source.problem, saved=source.saved)

    def sections(self, width: int, height: int) -> tuple[list[Row], list[Row]]:
        view = self.view
        self.body.show(entries(view, width))
        place = current(view)
        if place != self._current:
            self._current = place
            self.body.choose(place)
        return heading(view, width), below(view, width, height)

    def has(self, need: str) -> bool:
        return self.view.can_save

    def word(self, key: Key) -> str:
        if key.action == "back":
            return "close" if self.view.over else "stop and keep the results"
        return key.word

    def action_write(self) -> None:
        trouble = self._source.save()
        self.show(trouble=trouble, saved=self._source.saved)

    def action_back(self) -> None:
        if self.view.over:
            self._leave()
        else:
            self._source.stop()
            self.show(stopping=True)
