"""The trial screen: select a change, measure it, show the result."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ndd_console.render.rows import block_rows
from ndd_console.view.bars import interval_rows, progress_rows
from ndd_console.view.keys import TRIAL_KEYS, Key
from ndd_console.view.rows import BLANK, Entry, aligned, cells, paragraph, rule, shorten, titled
from ndd_console.view.style import Look, Row, Span
from ndd_console.widgets.lines import Lines, RowList, TextField
from ndd_console.words.finding import ceiling_text
from ndd_console.words.stopping import trial_stopping
from ndd_console.words.trial import VERDICTS, about_trial, conditions, paused_text, trial_blocks, trial_text
from ndd_engine.diagnose import Change, Finding
from ndd_engine.errors import UsageError
from ndd_engine.record.events import TrialEvent
from ndd_engine.text import foreign
from ndd_engine.trial.outcome import Progress

from .base import POLL_S, WidgetScreen

if TYPE_CHECKING:
    from ndd_console.jobs.trials import RunTrials, TrialThread

# A trial ends earlier if the difference is clear; slow steps need more time.
BUDGETS_S = (60.0, 120.0, 300.0)
_BUDGET_HINT = re.compile(r"; raise --budget[^;]*")
_EARLIER = 6
_TYPED = 200  # maximum length of a custom change
_HINT = "section.key=value, e.g. loader.workers=2; separate several with spaces"


class ProposedChange(NamedTuple):
    """A change to try, and the finding that proposes it."""

    change: Change
    finding: Finding


def proposed_changes(findings: Iterable[Finding]) -> tuple[ProposedChange, ...]:
    """Every configuration change that the findings propose, without duplicates.

    In order, but what is not worthwhile comes last: the first one is the one that the live screen proposes.
    """
    by_sets: dict[tuple[str, ...], ProposedChange] = {}
    for finding in sorted(findings, key=lambda finding: bool(finding.leave)):
        for change in finding.changes:
            if change.sets:
                by_sets.setdefault(change.sets, ProposedChange(change, finding))
    return tuple(by_sets.values())


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
    def longer_s(self) -> float | None:
        """The next larger budget after an inconclusive result; None otherwise."""
        if self.result is None or self.result.verdict != "inconclusive":
            return None
        return next((budget for budget in BUDGETS_S if budget > self.budget_s), None)


def sets_text(sets: Sequence[str]) -> str:
    return "  ".join(foreign(item) for item in sets)


def heading(state: TrialState, width: int, room: int) -> list[Row]:
    """What a trial does; only its title where there is little room."""
    lines = titled(f"measure a change against {state.base}", width)
    about = about_trial(state.budget_s, state.pauses)
    return [*lines, *paragraph(about, width, "dim"), BLANK] if room >= 13 else lines


def entries(state: TrialState, width: int) -> list[Entry]:
    return [Entry(change, _proposal(change, width)) for change in state.offered]


def _proposal(proposed: ProposedChange, width: int) -> tuple[Row, Row]:
    change, finding = proposed
    title, text = sets_text(change.sets), f": {foreign(finding.advice(change))}"
    gain = ceiling_text(finding)
    end = f", {gain}" if gain else ""
    why = shorten(f"  for: {foreign(finding.title)}", max(width - cells(end), 1))
    text = text if cells(title) + cells(text) <= width else ""
    return ((shorten(title, width), "bold"), (text, "text")), ((why + end, "dim"),)


def problems(state: TrialState, width: int, room: int) -> list[Row]:
    """Why the change cannot be tried, and the earlier trials as far as there is room."""
    rows = paragraph(state.problem, width, "bad")
    shown = [*reversed(state.earlier)][: max(min(room - len(rows) - 1, _EARLIER), 0)]
    lines: list[list[Span]] = [
        [(sets_text(trial.sets), "text"), (trial_text(trial), VERDICTS.get(trial.verdict, "text"))]
        for trial in shown
    ]
    return [*rows, rule("earlier trials", width), *aligned(lines, width, 0)] if shown else rows


def measuring(state: TrialState, width: int) -> list[Row]:
    progress = state.progress or Progress("starting", 0.0, state.budget_s)
    stage = trial_stopping(bool(state.pauses)) if state.stopping else progress.doing
    lines = [
        *titled(f"measuring {sets_text(state.trying)}", width),
        *paragraph(f"baseline: {state.base}", width, "dim"),
        BLANK,
        *progress_rows(progress, stage, width),
    ]
    if state.pauses:
        lines += [BLANK, *paragraph(paused_text(state.pauses), width, "dim")]
    return lines


def result(state: TrialState, width: int, height: int) -> list[Row]:
    trial = state.result
    if trial is None:
        return [rule("the trial failed", width, "bad"), *paragraph(state.problem, width)]
    style = VERDICTS.get(trial.verdict, "text")
    lines = titled(f"{trial.verdict}: {sets_text(trial.sets)}", width, style)
    plot = interval_rows(trial.ratio, trial.low, trial.high, width, trial.verdict)
    if plot and height >= 16:
        lines += [BLANK, *plot, BLANK]
    hint = "; press m for more time" if state.longer_s else ""
    lines += block_rows(trial_blocks(replace(trial, reason=_BUDGET_HINT.sub(hint, trial.reason))), width)
    lines += [BLANK, *paragraph(conditions(trial), width, "dim")]
    if state.problem:
        lines += [BLANK, *paragraph(state.problem, width, "bad")]
    if state.saved:
        lines += [BLANK, *paragraph(f"written to {state.saved}", width, "good")]
    return lines


class TrialScreen(WidgetScreen):
    """Runs one trial at a time. `earlier` returns the trials of this run so far, newest last."""

    keys = TRIAL_KEYS
    selects = "measure"
    every_s = POLL_S
    body: RowList

    def __init__(
        self,
        look: Look,
        trials: RunTrials,
        offered: tuple[ProposedChange, ...],
        earlier: Callable[[], tuple[TrialEvent, ...]],
    ) -> None:
        view = TrialState(
            "choose", trials.base, offered, problem=trials.refusal(), earlier=earlier(), pauses=trials.pauses(),
            budget_s=BUDGETS_S[0],
        )  # fmt: skip
        self.field = TextField(placeholder=_HINT, max_length=_TYPED, classes="field", select_on_focus=False)
        self._label, self.page = Lines(look), Lines(look, scrolls=True)
        body = RowList(look, after=self.field, one_click=False)
        super().__init__(look, body, others=(self.page,), between=(self._label, self.field))
        self.view = view
        self._trials = trials
        self._earlier = earlier
        self._job: TrialThread | None = None
        self._refusal = view.problem

    def on_mount(self) -> None:
        if not self.view.offered:
            self.field.focus()

    def on_descendant_focus(self) -> None:
        self.paint_if_current()  # other keys may work

    def on_unmount(self) -> None:
        # However the screen is closed: a trial must not keep the run paused in the background.
        if self._job is not None:
            self._job.stop()

    def show(self, **changes: Any) -> None:
        before, self.view = self.view, replace(self.view, **changes)
        if self.view != before:
            self.paint_if_current()

    def look_again(self) -> None:
        job = self._job
        if job is not None and not job.done:
            self.show(progress=job.progress)
        elif job is not None:
            self._job, self.message = None, ("", "text")
            self.show(stage="result", stopping=False, saved="", result=job.result, problem=job.failed())
        elif self._refusal and self.view.stage == "choose":
            before, self._refusal = self._refusal, self._trials.refusal()
            if self.view.problem == before != self._refusal:  # what refused the trial may have ended
                self.show(problem=self._refusal)

    def sections(self, width: int, height: int) -> tuple[list[Row], list[Row]]:
        state = self.view
        choosing = state.stage == "choose"
        self.swap(self.body if choosing else self.page)
        self._label.display = self.field.display = choosing
        if not choosing:
            measures = state.stage == "measure"
            self.page.show(measuring(state, width) if measures else result(state, width, height))
            return [], []
        proposed = entries(state, width)
        self.body.show(proposed)
        self._label.show([rule("your own change", width)])
        top = heading(state, width, height)
        return top, problems(state, width, height - len(top) - 2 * len(proposed) - 2)

    # Keys.

    def has(self, need: str) -> bool:
        state = self.view
        match need:
            case "choosing":
                return state.stage == "choose"
            case "proposal":
                return self.body.chosen is not None and not self.field.has_focus  # which takes the key
            case "more time":
                return state.stage == "choose" or (state.stage == "result" and state.longer_s is not None)
            case "faster":
                trial = state.result
                faster = trial is not None and trial.verdict == "faster" and trial.in_effect is not False
                return faster and not state.saved
            case _:
                return state.stage == "result"

    def word(self, key: Key) -> str:
        state = self.view
        if key.action == "longer" and state.longer_s and state.stage == "result":
            return f"measure up to {state.longer_s:.0f} s"
        if key.action == "back" and state.stage == "measure":
            return "stop and resume the run" if state.pauses else "stop"
        if key.action == "write" and self._trials.edits:
            return "write the diff"
        return key.word

    def on_input_submitted(self) -> None:
        self.action_measure()

    def action_measure(self) -> None:
        """Measure the change that has the focus."""
        chosen = self.body.chosen
        if not self.field.has_focus:
            if chosen is not None:
                self._measure(chosen.change.sets, chosen.finding.cause)
            return
        try:
            sets = tuple(shlex.split(self.field.value))
        except ValueError as error:
            self.show(problem=f"cannot parse: {error}")
            return
        if sets:
            self._measure(sets, None)
        else:
            self.show(problem="enter a change, e.g. loader.workers=2")

    def action_switch(self) -> None:
        (self.body if self.field.has_focus and self.view.offered else self.field).focus()

    def action_edit(self) -> None:
        self.field.value = shlex.join(self.body.chosen.change.sets)
        self.field.cursor_position = len(self.field.value)
        self.field.focus()

    def action_longer(self) -> None:
        """Another budget; after an inconclusive result, measure the change again with the larger one."""
        state = self.view
        if state.stage == "result":
            self.show(budget_s=state.longer_s)
            self._measure(state.trying, self._cause)
        else:
            self.show(budget_s=BUDGETS_S[(BUDGETS_S.index(state.budget_s) + 1) % len(BUDGETS_S)])

    def action_again(self) -> None:
        self.message = ("", "text")
        self.show(stage="choose", problem="", result=None, earlier=self._earlier())
        if not self.view.offered:
            self.field.focus()

    def action_write(self) -> None:
        assert self.view.result is not None
        try:
            self.show(saved=str(self._trials.write(self.view.result)), problem="")
        except UsageError as error:
            self.show(problem=str(error))

    def action_copy(self) -> None:
        try:
            self.app.copy_to_clipboard(self._trials.diff(self.view.trying))
            self.say("copied the diff", briefly=True)
        except UsageError as error:
            self.show(problem=str(error))

    def action_back(self) -> None:
        """Stop the trial; if there is none, return to the screen before."""
        if self.view.stage != "measure":
            super().action_back()
        elif self._job is not None:
            self._job.stop()
            self.show(stopping=True)

    # Measuring.

    def _measure(self, sets: tuple[str, ...], cause: str | None) -> None:
        problem = self._trials.refusal() or self._trials.check(sets)
        if problem:
            self.show(problem=problem)
            return
        pauses = self._trials.pauses()
        self._cause = cause
        self._job = self._trials.start(sets, cause, self.view.budget_s)
        self.message = ("", "text")
        self.show(stage="measure", trying=sets, pauses=pauses, stopping=False, problem="", progress=None)
