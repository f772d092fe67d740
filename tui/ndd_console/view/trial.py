"""The trial screen: select a change, measure it, show the result."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from ndd_console.render.rows import block_rows
from ndd_console.words.figures import at_most, interval_text, pairs_text
from ndd_console.words.trial import VERDICTS, trial_facts, trial_text
from ndd_engine.record.events import TrialEvent
from ndd_engine.text import foreign, number

from .bars import progress_bar
from .frame import Entry
from .interval import interval_rows
from .rows import BLANK, cells, column, labelled, paragraph, rule, shorten
from .style import Row

if TYPE_CHECKING:
    from ndd_engine.trial.request import Progress

# A trial ends earlier if the difference is clear; slow steps need more time.
BUDGETS_S = (60.0, 120.0, 300.0)
_BUDGET_HINT = re.compile(r"; raise --budget[^;]*")
_PLOT = 60  # maximum width of the interval
_EARLIER = 6
_pair = partial(labelled, indent=12)


@dataclass(frozen=True, slots=True)
class ProposedChange:
    """A change to try, and the finding that proposes it.

    ceiling: upper bound of the speedup, None if unbounded. text: the sentence of the finding that proposes it.
    """

    sets: tuple[str, ...]
    title: str
    cause: str | None = None
    ceiling: float | None = None
    text: str = ""


@dataclass(frozen=True, slots=True)
class TrialState:
    """Everything that the trial screen shows.

    base: the baseline, as text. problem: why the change cannot be tried or the trial failed. pauses: the run that is
    paused during the trial, or "". saved: path of the written configuration.
    """

    stage: Literal["choose", "measure", "result"]
    base: str
    offered: tuple[ProposedChange, ...] = ()
    problem: str = ""
    earlier: tuple[TrialEvent, ...] = ()
    trying: tuple[str, ...] = ()
    pauses: str = ""
    budget_s: float = 60.0
    progress: Progress | None = None
    stopping: bool = False
    result: TrialEvent | None = None
    saved: str = ""

    @property
    def can_write(self) -> bool:
        """Whether the candidate was faster and its configuration can be written."""
        found = self.result
        return (
            found is not None
            and found.verdict == "faster"
            and found.in_effect is not False
            and not self.saved
        )

    @property
    def longer_s(self) -> float | None:
        """The next larger budget after an inconclusive result; None otherwise."""
        if self.result is None or self.result.verdict != "inconclusive":
            return None
        return next((budget for budget in BUDGETS_S if budget > self.budget_s), None)


def sets_text(sets: Sequence[str]) -> str:
    """The edits of a change in one line."""
    return "  ".join(foreign(item) for item in sets)


# Selecting a change.


def heading(state: TrialState, width: int, room: int) -> list[Row]:
    """What a trial does; only its title where there is little room."""
    lines = [rule(f"measure a change against {foreign(state.base)}", width)]
    about = (
        "Baseline and candidate train alternately until the difference is clear, for up to "
        f"{number(state.budget_s)} s."
    )
    if state.pauses:
        about += f" {state.pauses} is paused and resumes afterwards."
    return [*lines, *paragraph(about, width, "dim"), BLANK] if room >= 13 else lines


def entries(state: TrialState, width: int) -> list[Entry]:
    """The proposed changes, in two rows each."""
    return [Entry(change, _proposal(change, width)) for change in state.offered]


def _proposal(change: ProposedChange, width: int) -> tuple[Row, Row]:
    title = shorten(sets_text(change.sets), width)
    end = "" if change.ceiling is None else f", {at_most(change.ceiling)}"
    why = shorten(f"for: {foreign(change.title)}", max(width - 2 - cells(end), 1))
    text = f": {foreign(change.text)}" if change.text else ""
    if cells(title) + cells(text) > width:
        text = ""
    return ((title, "bold"), (text, "text")), (("  " + why + end, "dim"),)


def problems(state: TrialState, width: int, room: int) -> list[Row]:
    """Why the change cannot be tried, and the earlier trials as far as there is room."""
    rows = paragraph(state.problem, width, "bad")
    return [*rows, *_earlier(state.earlier, width, min(room - len(rows) - 1, _EARLIER))]


def _earlier(trials: Sequence[TrialEvent], width: int, count: int) -> list[Row]:
    """Earlier trials, newest first."""
    if not trials or count < 1:
        return []
    rows = [rule("earlier trials", width)]
    shown = list(reversed(trials))[:count]
    longest = min(max(cells(sets_text(trial.sets)) for trial in shown), max(width - 34, 8))
    for trial in shown:
        sets = f"  {column(sets_text(trial.sets), longest + 1)}  "
        rows.append(((sets, "text"), (foreign(trial_text(trial)), VERDICTS.get(trial.verdict, "text"))))
    return rows


# Measuring.


def measuring(state: TrialState, width: int) -> list[Row]:
    """The progress, and the ratio so far."""
    progress = state.progress
    lines = [rule(f"measuring {sets_text(state.trying)}", width)]
    lines += [*paragraph(f"baseline: {state.base}", width, "dim"), BLANK]
    stage = progress.doing if progress is not None else "starting"
    if state.stopping:
        stage = "stopping; the run resumes when the processes have ended" if state.pauses else "stopping"
    lines += paragraph(f"{stage}…", width, "accent")
    spent = progress.spent_s if progress is not None else 0.0
    budget = progress.budget_s if progress is not None else state.budget_s
    text = f" {spent:.0f} of {budget:.0f} s"
    room = max(width - cells(text), 1)
    lines += [(*progress_bar(spent / budget if budget else 0.0, room), (text, "text")), BLANK]
    if progress is not None:
        so_far = interval_text(progress.ratio, progress.low, progress.high)
        order = "(baseline, candidate, candidate, baseline)"
        blocks = f"{number(progress.abba_blocks)} {order}{pairs_text(progress.pairs)}"
        lines += _pair("ABBA blocks", blocks, width)
        lines += _pair("so far", f"{so_far} candidate vs. baseline" if so_far else "no ratio yet", width)
        lines += [BLANK, *interval_rows(progress.ratio, progress.low, progress.high, min(width, _PLOT))]
    if state.pauses:
        lines += [BLANK, *paragraph(f"{state.pauses} is paused and resumes after the trial", width, "dim")]
    return lines


# The result.


def result(state: TrialState, width: int, height: int) -> list[Row]:
    """The result with its interval and its figures."""
    trial = state.result
    if trial is None:
        return [rule("the trial failed", width, "bad"), *paragraph(state.problem, width)]
    style = VERDICTS.get(trial.verdict, "text")
    lines = [rule(f"{trial_text(trial)}: {sets_text(trial.sets)}", width, style)]
    hint = "; press m for more time" if state.longer_s else ""
    lines += paragraph(_BUDGET_HINT.sub(hint, trial.text), width)
    plot = interval_rows(trial.ratio, trial.low, trial.high, min(width, _PLOT), trial.verdict)
    if plot and height >= 16:
        lines += [BLANK, *plot]
    lines.append(BLANK)
    lines += block_rows([trial_facts(trial)], width)
    if state.problem:
        lines += [BLANK, *paragraph(state.problem, width, "bad")]
    if state.saved:
        lines += [BLANK, *paragraph(f"written to {state.saved}", width, "good")]
    return lines
