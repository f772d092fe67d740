"""The trial screen: select a change, measure it, show the result."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from ndd_engine.record.events import TrialEvent
from ndd_engine.text import MISSING, counted, duration, number, size

from .bars import progress_bar
from .findings import at_most
from .frame import Entry
from .interval import VERDICTS, interval_rows, interval_text, pairs_text, trial_text
from .rows import BLANK, cells, column, foreign, labelled, paragraph, rule, shorten
from .style import Row

if TYPE_CHECKING:
    from ndd_engine.trial.request import Progress

Fact = tuple[str, str, str]  # (label, text, style)

# A trial ends earlier if the difference is clear; slow steps need more time.
BUDGETS_S = (60.0, 120.0, 300.0)
_BUDGET_HINT = re.compile(r"; raise --budget[^;]*")
_PLOT = 60  # maximum width of the interval
_EARLIER = 6
_pair = partial(labelled, indent=12)
# Figures of both sides: (label, field, text of a value).
_FIGURES = (("memory", "peak_bytes", size), ("step", "step_s", duration), ("setup", "prepare_s", duration))


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
        blocks = (
            f"{number(progress.quads)} (baseline, candidate, candidate, baseline){pairs_text(progress.pairs)}"
        )
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
    for label, text, tone in _facts(trial):
        lines += _pair(label, text, width, style=tone)
    if state.problem:
        lines += [BLANK, *paragraph(state.problem, width, "bad")]
    if state.saved:
        lines += [BLANK, *paragraph(f"written to {state.saved}", width, "good")]
    return lines


def _took(trial: TrialEvent) -> str:
    """ "24 of 60 s", or "60 s, and 10 s to finish" beyond the budget."""
    over_s = trial.seconds - trial.budget_s
    if not trial.budget_s:
        return duration(trial.seconds)
    if over_s < 0.5:
        return f"{min(trial.seconds, trial.budget_s):.0f} of {number(trial.budget_s)} s"
    return f"{number(trial.budget_s)} s, and {duration(over_s)} to finish"


def _facts(trial: TrialEvent) -> list[Fact]:
    """The figures of a result."""
    facts: list[Fact] = []
    if trial.ratio is not None:
        text = f"{trial.confidence * 100:.0f} % CI from {counted(trial.quads, 'ABBA block')}{pairs_text(trial.pairs)}"
        if trial.between is not None:
            text += f" and the usual difference between processes, {trial.between * 100:.2g} %"
        facts.append(("interval", text, "text"))
    where = f" on {trial.device}" if trial.device else ""
    facts.append(("baseline", f"{trial.against}; measured for {_took(trial)}{where}", "text"))
    if trial.in_effect is False:
        facts.append(("in effect", f"no: {trial.not_in_effect or 'it changed nothing'}", "warn"))
    else:
        facts.append(("in effect", "yes" if trial.in_effect else f"{MISSING}: cannot be verified", "text"))
    loss = trial.loss + (f": {trial.loss_text}" if trial.loss_text else "")
    facts.append(("loss", loss, "warn" if trial.loss == "differs" else "text"))
    for label, key, shown in _FIGURES:
        base, candidate = trial.base.get(key), trial.change.get(key)
        if base is not None or candidate is not None:
            facts.append((label, f"baseline {shown(base)}, candidate {shown(candidate)}", "text"))
    steps = trial.break_even_steps
    if steps is not None:
        text = f"after {counted(steps, 'optimizer step')}" if steps else "immediately: no extra setup time"
        facts.append(("break-even", text, "text"))
    return facts
