"""The diagnosis page, updated every second."""

from __future__ import annotations

from collections.abc import Callable

from textual import events

from ndd_console.screens.diagnosis import Diagnosis
from ndd_console.screens.interfaces import RunSource
from ndd_console.view.diagnosis import diagnosis_lines
from ndd_console.view.style import Look, Row

from .base import LEAVE
from .pages import RunPage


class DiagnosisScreen(RunPage):
    """All findings with their evidence. try_it: opens the trial screen; None if nothing can be tried."""

    title_text = "diagnosis"
    leave_keys = LEAVE | {"d"}

    def __init__(
        self, look: Look, source: RunSource, diagnosis: Diagnosis, try_it: Callable[[], None] | None
    ) -> None:
        super().__init__(look, source)
        self._diagnosis = diagnosis
        self._try = try_it

    def lines(self, width: int) -> list[Row]:
        result = self._diagnosis.of(self._snapshot)
        return diagnosis_lines(self._snapshot, result, self._source.name, self._try is not None, width)

    def on_key(self, event: events.Key) -> None:
        # Textual also calls the handler of the base class, for all other keys.
        if event.key == "t" and self._try is not None and self.is_current:
            event.stop()
            self.go_back()
            self._try()
