"""The tuning screen: a table of the settings with their speedups, the progress, and the result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ndd_console.words.figures import interval_text, times
from ndd_console.words.trial import VERDICTS
from ndd_engine.record.events import TrialEvent
from ndd_engine.text import MISSING, counted, duration, foreign, size

from .bars import progress_bar
from .frame import Entry
from .interval import interval_rows
from .rows import BLANK, cells, column, ends, paragraph, rule, shorten
from .style import Row, Span

if TYPE_CHECKING:
    from ndd_engine.trial.tuning import TuningRow, TuningState

# state: (symbol, style). A state is always shown as symbol, word and colour.
_STATES: dict[str, tuple[str, str]] = {
    "waiting": ("·", "dim"),
    "measuring": ("◐", "accent"),
    "kept": ("✔", "good"),
    "dropped": ("✖", "warn"),
    "skipped": ("·", "dim"),
}
_STATE = 12
_RATIO = 17  # "1.42x 1.35-1.49"
_LOSS = 9
_MEMORY = 9
_TITLE = 34  # room beyond this shows why a setting was kept or dropped
_WHY = 18
_WIDE = 100  # from this width on, peak memory is a column
_PLOT = 60
_LOSSES = {"not comparable": "n/a"}


@dataclass(frozen=True, slots=True)
class TuningView:
    """Everything that the tuning screen shows.

    problem: why there is no result. saved: path of the written
    configuration; trouble: why it could not be written.
    """

    base: str
    state: TuningState | None = None
    stopping: bool = False
    problem: str = ""
    saved: str = ""
    trouble: str = ""

    @property
    def can_save(self) -> bool:
        """Whether there is a result that is not written yet."""
        return self.over and not self.problem and not self.saved

    @property
    def over(self) -> bool:
        """Whether tuning has ended."""
        return bool(self.problem) or (self.state is not None and self.state.done)


def heading(view: TuningView, width: int) -> list[Row]:
    """The title with the time, and the names of the columns."""
    state = view.state
    elapsed = f" {duration(state.elapsed_s)} " if state is not None and state.elapsed_s else ""
    title = rule(f"tuning {foreign(view.base)}", width, "bold", elapsed)
    return [title, _columns(width)] if state is not None and state.rows else [title]


def entries(view: TuningView, width: int) -> list[Entry]:
    """The settings with their speedups."""
    rows = view.state.rows if view.state is not None else ()
    return [Entry(row, (_candidate(row, width),)) for row in rows]


def current(view: TuningView) -> int:
    """The place of the setting that is measured, else of the last one that was; 0 when all have ended."""
    states = [row.state for row in view.state.rows] if view.state is not None else []
    if "measuring" in states:
        return states.index("measuring")
    done = [place for place, state in enumerate(states) if state != "waiting"]
    return 0 if view.over or not done else done[-1]


def _widths(width: int) -> tuple[int, int, int, int]:
    """Widths of title, loss, memory and reason; 0 for a hidden column."""
    loss = _LOSS if width >= 76 else 0
    memory = _MEMORY if width >= _WIDE - 2 else 0
    start = _RATIO if width >= 64 else 0
    title = width - _STATE - _RATIO - start - loss - memory
    why = title - _TITLE if title - _TITLE >= _WHY else 0
    title -= why
    return max(title, 8), loss, memory, why


def _columns(width: int) -> Row:
    """The names of the columns."""
    title, loss, memory, why = _widths(width)
    text = "state".ljust(_STATE) + "setting".ljust(title) + "vs. best so far".ljust(_RATIO)
    if width >= 64:
        text += "vs. baseline".ljust(_RATIO)
    text += ("memory".ljust(memory) if memory else "") + ("loss".ljust(loss) if loss else "")
    return ((text + ("why" if why else ""), "dim"),)


def _candidate(row: TuningRow, width: int) -> Row:
    title, loss, memory, why = _widths(width)
    symbol, style = _STATES.get(row.state, ("?", "text"))
    name = (column(foreign(row.candidate.title), title), "dim" if row.state == "skipped" else "text")
    spans: list[Span] = [(f"{symbol} {row.state}".ljust(_STATE), style), name]
    if row.trial is None:
        rest = max(width - _STATE - title, 0)
        return (*spans, (shorten(foreign(row.reason), rest), "dim"))
    style, both = VERDICTS.get(row.trial.verdict, "text"), width >= 64
    if row.trial.ratio is None:
        # Without a ratio, the reason uses the room of the ratios.
        spans.append((column(foreign(row.reason) or row.trial.verdict, _RATIO * (1 + both)), style))
    else:
        spans.append((_ratio(row.trial).ljust(_RATIO), style))
        spans += [(_ratio(row.to_start).ljust(_RATIO), "text")] if both else []
    if memory:
        spans.append((size(row.trial.change.get("peak_bytes")).ljust(memory), "text"))
    if loss:
        losses = _LOSSES.get(row.trial.loss, foreign(row.trial.loss))
        spans.append((losses.ljust(loss), "warn" if row.trial.loss == "differs" else "text"))
    if why and row.trial.ratio is not None:
        spans.append((shorten(foreign(row.reason), why), "dim"))
    return tuple(spans)


def _ratio(trial: TrialEvent | None) -> str:
    """ "1.42x 1.35-1.49"; "" without a ratio."""
    if trial is None or trial.ratio is None:
        return ""
    if trial.low is None or trial.high is None:
        return times(trial.ratio)
    return f"{times(trial.ratio)} {times(trial.low)[:-1]}-{times(trial.high)[:-1]}"


def below(view: TuningView, width: int, height: int) -> list[Row]:
    """The progress, or the result."""
    state = view.state
    if view.problem:
        return [BLANK, *paragraph(view.problem, width, "bad")[: max(height // 2, 1)]]
    if state is None:
        return [BLANK, (("starting…", "accent"),)]
    rows: list[Row] = [BLANK]
    if state.done:
        rows += paragraph(state.text, width, "good" if state.kept else "text")
        final = state.final
        if final is not None and height >= 16:
            rows += interval_rows(final.ratio, final.low, final.high, min(width, _PLOT), final.verdict)
        rows += paragraph(view.trouble, width, "bad")
        return rows + (paragraph(f"written to {view.saved}", width, "accent") if view.saved else [])
    stage = "stopping; results so far are kept" if view.stopping else foreign(state.stage)
    progress = state.progress
    if progress is None:
        return [*rows, ((f"{stage}…", "accent"),)]
    blocks = counted(progress.abba_blocks, "ABBA block") if progress.abba_blocks else ""
    rows.append(ends(((shorten(f"{stage}…", width - 16), "accent"),), ((blocks, "dim"),), width))
    text = f" {foreign(progress.doing)}, {progress.spent_s:.0f} of {progress.budget_s:.0f} s"
    text = text if cells(text) <= width * 2 // 3 else f" {progress.spent_s:.0f} of {progress.budget_s:.0f} s"
    share = progress.spent_s / progress.budget_s if progress.budget_s else 0.0
    rows.append((*progress_bar(share, max(width - cells(text), 1)), (text, "text")))
    if height >= 18:
        plot = interval_rows(progress.ratio, progress.low, progress.high, min(width - 24, _PLOT))
        # Two rows are reserved, so that the table does not move when the interval appears.
        label = interval_text(progress.ratio, progress.low, progress.high) or f"{MISSING}: no ratio yet"
        rows += [plot[0], (*plot[1], ("  " + label, "text"))] if plot else [BLANK, ((label, "dim"),)]
    return rows
