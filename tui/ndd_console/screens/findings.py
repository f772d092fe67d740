"""The page of the diagnosis: what holds the run back, looked at again every second."""

from __future__ import annotations

from collections.abc import Callable

from textual import events

from ndd_console.screens.diagnosis import Diagnosis
from ndd_console.screens.interfaces import RunSource
from ndd_console.view.diagnosis import diagnosis_lines
from ndd_console.view.style import Row

from .base import Look
from .pages import LEAVE, REFRESH_S, PageScreen


class DiagnosisScreen(PageScreen):
    """All findings with all their evidence. `try_it` opens the trial screen, None where nothing can be tried."""

    title_text = "diagnosis"
    leave_keys = LEAVE | {"d"}

    def __init__(
        self, look: Look, source: RunSource, diagnosis: Diagnosis, try_it: Callable[[], None] | None
    ) -> None:
        super().__init__(look)
        self._source = source
        self._diagnosis = diagnosis
        self._try = try_it
        self._snapshot = source.snapshot()

    def on_mount(self) -> None:
        self.set_interval(REFRESH_S, self.read_again)

    def read_again(self) -> None:
        """Take up what changed."""
        before, self._snapshot = self._snapshot, self._source.snapshot()
        if before is not self._snapshot and self.is_current:
            self.paint()

    def lines(self, width: int) -> list[Row]:
        told = self._diagnosis.of(self._snapshot)
        return diagnosis_lines(self._snapshot, told, self._source.name, self._try is not None, width)

    def on_key(self, event: events.Key) -> None:
        # All other keys are the page's: its handler is called as well.
        if event.key == "t" and self._try is not None and self.is_current:
            event.stop()
            self.go_back()
            self._try()
