"""The tuning screen: a table of the settings with their speedups, the progress, and the result."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ndd_console.view.bars import interval_rows, progress_rows
from ndd_console.view.keys import TUNING_KEYS, Key
from ndd_console.view.rows import BLANK, paragraph, rule
from ndd_console.view.style import Look, Row, Span
from ndd_console.widgets.lines import RowTable
from ndd_console.words.stopping import TUNING_STOPPING
from ndd_console.words.trial import SETTING_COLUMNS, VERDICTS, setting_texts
from ndd_engine.text import duration, foreign

from .base import POLL_S, WidgetScreen

if TYPE_CHECKING:
    from ndd_console.jobs.trials import TuningJob
    from ndd_engine.trial.tuning import TuningRow, TuningState

# state: (symbol, style). A state is always shown as symbol, word and colour.
_STATES: dict[str, tuple[str, str]] = {
    "waiting": ("·", "dim"),
    "measuring": ("◐", "accent"),
    "kept": ("✔", "good"),
    "dropped": ("✖", "warn"),
    "skipped": ("·", "dim"),
}
_LOSSES = SETTING_COLUMNS.index("losses")


def table_row(row: TuningRow) -> list[Span]:
    texts, (symbol, style) = setting_texts(row), _STATES.get(row.state, ("?", "text"))
    styles = [style, "dim" if row.state == "skipped" else "text", *["text"] * 4, "dim"]
    if row.trial is not None:
        styles[2 if row.trial.ratio is not None else -1] = VERDICTS.get(row.trial.verdict, "text")
        styles[_LOSSES] = "warn" if row.trial.loss == "differs" else "text"
    return [(f"{symbol} {texts[0]}", style), *zip(texts[1:], styles[1:], strict=True)]


def selected_rows(row: TuningRow | None, width: int) -> list[Row]:
    """All figures of the selected setting: a narrow screen shows only some columns."""
    texts = setting_texts(row) if row is not None else ()
    told = (f"{name} {text}" for name, text in zip(SETTING_COLUMNS, texts, strict=bool(texts)) if text)
    return paragraph("; ".join(told), width, "dim")


def current(state: TuningState) -> int:
    """The place of the setting that is measured, else of the last one that was; 0 when all have ended."""
    states = [row.state for row in state.rows]
    if "measuring" in states:
        return states.index("measuring")
    done = [place for place, name in enumerate(states) if name != "waiting"]
    return 0 if state.done or not done else done[-1]


def result_rows(state: TuningState, width: int, height: int) -> list[Row]:
    rows = paragraph(state.text, width, "good" if state.kept else "text")
    final = state.final
    if final is not None and height >= 16:
        rows += interval_rows(final.ratio, final.low, final.high, width, final.verdict)
    return rows


class TuningScreen(WidgetScreen):
    """Shows a sweep. `leave` is called when the user closes the screen after its end."""

    keys = TUNING_KEYS
    every_s = POLL_S
    body: RowTable

    def __init__(
        self,
        look: Look,
        source: TuningJob,
        leave: Callable[[], None],
        on_painted: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(look, RowTable(look, fixed=2), on_painted)
        self._source = source
        self._leave = leave
        self._stopping = False
        self._drawn: object = None
        self._current: int | None = None

    def look_again(self) -> None:
        source = self._source
        before, self._drawn = self._drawn, (source.state, source.failed(), source.saved)
        if self._drawn != before:
            self.paint_if_current()

    def sections(self, width: int, height: int) -> tuple[list[Row], list[Row]]:
        source, state = self._source, self._source.state
        elapsed = f" {duration(state.elapsed_s)} " if state is not None and state.elapsed_s else ""
        top = [rule(f"tuning {foreign(source.name)}", width, "bold", elapsed)]
        if state is not None:
            heads = [(name, "dim") for name in SETTING_COLUMNS]
            self.body.show(heads, [(row, table_row(row)) for row in state.rows])
            place = current(state)
            if place != self._current:
                self._current = place
                self.body.move_cursor(row=place)
        return top, [*selected_rows(self.body.chosen, width), BLANK, *self._progress(width, height)]

    def _progress(self, width: int, height: int) -> list[Row]:
        """What tuning does, or its result."""
        source, state = self._source, self._source.state
        if problem := source.failed():
            return paragraph(problem, width, "bad", max(height // 2, 1))
        if state is None:
            return [(("starting…", "accent"),)]
        if not state.done:
            stage = TUNING_STOPPING if self._stopping else state.stage
            if state.progress is None:
                return [((f"{foreign(stage)}…", "accent"),)]
            return progress_rows(state.progress, stage, width, plot=height >= 18)
        saved = f"written to {source.saved}" if source.saved else ""
        return [*result_rows(state, width, height), *paragraph(saved, width, "accent")]

    # Keys.

    @property
    def _over(self) -> bool:
        state = self._source.state
        return bool(self._source.failed()) or (state is not None and state.done)

    def has(self, need: str) -> bool:
        return self._over and not self._source.failed() and not self._source.saved

    def word(self, key: Key) -> str:
        if key.action == "back":
            return "close" if self._over else "stop and keep the results"
        return key.word

    def action_write(self) -> None:
        self.say(self._source.save(), "bad")

    def action_back(self) -> None:
        if self._over:
            self._leave()
        else:
            self._source.stop()
            self._stopping = True
            self.paint()
