"""The tuning screen: a table of the settings with their speedups, the progress, and the result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ndd_console.view.bars import progress_line
from ndd_console.view.frame import Entry
from ndd_console.view.interval import interval_rows
from ndd_console.view.keys import TUNING_KEYS, Key
from ndd_console.view.rows import BLANK, aligned, cells, ends, paragraph, rule, shorten
from ndd_console.view.style import Look, Row, Span
from ndd_console.widgets.lines import RowList
from ndd_console.words.figures import interval_text, times
from ndd_console.words.trial import VERDICTS
from ndd_engine.record.events import TrialEvent
from ndd_engine.text import MISSING, counted, duration, foreign, size

from .base import POLL_S, WidgetScreen

if TYPE_CHECKING:
    from ndd_console.jobs.tuning import TuningJob
    from ndd_engine.trial.tuning import TuningRow, TuningState

# state: (symbol, style). A state is always shown as symbol, word and colour.
_STATES: dict[str, tuple[str, str]] = {
    "waiting": ("·", "dim"),
    "measuring": ("◐", "accent"),
    "kept": ("✔", "good"),
    "dropped": ("✖", "warn"),
    "skipped": ("·", "dim"),
}
_COLUMNS = ("state", "setting", "vs. best so far", "vs. baseline", "memory", "loss", "why")
_SETTING = 1
_LEFT_OUT = (6, 4, 5, 3)  # columns, in the order in which a narrow screen leaves them out
_PLOT = 60
_LOSSES = {"not comparable": "n/a"}


def table(rows: Sequence[TuningRow], width: int) -> list[Row]:
    """The names of the columns, then the settings with their speedups."""
    heads: list[list[Span]] = [[(name, "dim") for name in _COLUMNS]]
    return aligned([*heads, *map(_cells, rows)], width, _SETTING, _LEFT_OUT)


def _cells(row: TuningRow) -> list[Span]:
    symbol, style = _STATES.get(row.state, ("?", "text"))
    state = (f"{symbol} {row.state}", style)
    title = (row.candidate.title, "dim" if row.state == "skipped" else "text")
    trial = row.trial
    if trial is None:
        return [state, title, (row.reason, "dim")]
    style = VERDICTS.get(trial.verdict, "text")
    if trial.ratio is None:
        return [state, title, (row.reason or trial.verdict, style)]
    loss = (_LOSSES.get(trial.loss, trial.loss), "warn" if trial.loss == "differs" else "text")
    memory = (size(trial.change.get("peak_bytes")), "text")
    return [
        state,
        title,
        (_ratio(trial), style),
        (_ratio(row.to_start), "text"),
        memory,
        loss,
        (row.reason, "dim"),
    ]


def _ratio(trial: TrialEvent | None) -> str:
    """ "1.42x 1.35-1.49"; "" without a ratio."""
    if trial is None or trial.ratio is None:
        return ""
    if trial.low is None or trial.high is None:
        return times(trial.ratio)
    return f"{times(trial.ratio)} {times(trial.low)[:-1]}-{times(trial.high)[:-1]}"


def current(state: TuningState) -> int:
    """The place of the setting that is measured, else of the last one that was; 0 when all have ended."""
    states = [row.state for row in state.rows]
    if "measuring" in states:
        return states.index("measuring")
    done = [place for place, name in enumerate(states) if name != "waiting"]
    return 0 if state.done or not done else done[-1]


def progress_rows(state: TuningState, stopping: bool, width: int, height: int) -> list[Row]:
    """What is measured now, and its result so far."""
    stage = "stopping; results so far are kept" if stopping else foreign(state.stage)
    progress = state.progress
    if progress is None:
        return [((f"{stage}…", "accent"),)]
    blocks = counted(progress.abba_blocks, "ABBA block") if progress.abba_blocks else ""
    rows = [ends(((shorten(f"{stage}…", width - 16), "accent"),), ((blocks, "dim"),), width)]
    text = f"{progress.spent_s:.0f} of {progress.budget_s:.0f} s"
    doing = f"{foreign(progress.doing)}, {text}"
    share = progress.spent_s / progress.budget_s if progress.budget_s else 0.0
    rows.append(progress_line(share, doing if cells(doing) < width * 2 // 3 else text, width))
    if height >= 18:
        plot = interval_rows(progress.ratio, progress.low, progress.high, min(width - 24, _PLOT))
        # Two rows are reserved, so that the table does not move when the interval appears.
        label = interval_text(progress.ratio, progress.low, progress.high) or f"{MISSING}: no ratio yet"
        rows += [plot[0], (*plot[1], ("  " + label, "text"))] if plot else [BLANK, ((label, "dim"),)]
    return rows


def result_rows(state: TuningState, width: int, height: int) -> list[Row]:
    """What tuning has found, and its interval."""
    rows = paragraph(state.text, width, "good" if state.kept else "text")
    final = state.final
    if final is not None and height >= 16:
        rows += interval_rows(final.ratio, final.low, final.high, min(width, _PLOT), final.verdict)
    return rows


class TuningScreen(WidgetScreen):
    """Shows a sweep. `leave` is called when the user closes the screen after its end."""

    keys = TUNING_KEYS
    body: RowList

    def __init__(
        self,
        look: Look,
        source: TuningJob,
        leave: Callable[[], None],
        on_painted: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(look, RowList(look), on_painted)
        self._source = source
        self._leave = leave
        self._stopping = False
        self._drawn: object = None
        self._current: int | None = None

    def on_mount(self) -> None:
        self.set_interval(POLL_S, self.poll)

    def poll(self) -> None:
        """Show the latest state."""
        source = self._source
        before, self._drawn = self._drawn, (source.state, source.problem, source.saved)
        if self._drawn != before:
            self.paint_if_current()

    def sections(self, width: int, height: int) -> tuple[list[Row], list[Row]]:
        source, state = self._source, self._source.state
        elapsed = f" {duration(state.elapsed_s)} " if state is not None and state.elapsed_s else ""
        top = [rule(f"tuning {foreign(source.name)}", width, "bold", elapsed)]
        if state is not None:
            heads, *rows = table(state.rows, width)
            top += [heads] if rows else []
            self.body.show([Entry(row, (shown,)) for row, shown in zip(state.rows, rows, strict=True)])
            place = current(state)
            if place != self._current:
                self._current = place
                self.body.choose(place)
        if source.problem:
            return top, [BLANK, *paragraph(source.problem, width, "bad", max(height // 2, 1))]
        if state is None:
            return top, [BLANK, (("starting…", "accent"),)]
        if not state.done:
            return top, [BLANK, *progress_rows(state, self._stopping, width, height)]
        saved = f"written to {source.saved}" if source.saved else ""
        return top, [BLANK, *result_rows(state, width, height), *paragraph(saved, width, "accent")]

    # Keys.

    @property
    def _over(self) -> bool:
        state = self._source.state
        return bool(self._source.problem) or (state is not None and state.done)

    def has(self, need: str) -> bool:
        if need == "setting":
            return self.body.chosen is not None
        return self._over and not self._source.problem and not self._source.saved

    def on_option_list_option_selected(self) -> None:
        self.action_use("open")

    def action_open(self) -> None:
        """Show what the table cuts or leaves out at this width."""
        cells = _cells(self.body.chosen)
        # A row without a trial has a reason in place of its figures.
        names = _COLUMNS if len(cells) == len(_COLUMNS) else (*_COLUMNS[:2], "why")
        named = (f"{name} {foreign(text)}" for name, (text, _) in zip(names, cells, strict=True) if text)
        self.say("; ".join(named))

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
