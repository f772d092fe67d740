"""The trial screen: select a change, measure it, show the result."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable

from textual.widget import Widget

from ndd_console.screens.interfaces import TrialJob, TrialSource
from ndd_console.view.keys import TRIAL_KEYS, Key
from ndd_console.view.rows import rule
from ndd_console.view.style import Look, Row
from ndd_console.view.trial import (
    BUDGETS_S,
    ProposedChange,
    TrialState,
    entries,
    heading,
    measuring,
    problems,
    result,
)
from ndd_console.widgets.lines import Lines, RowList, TextField
from ndd_engine.diagnose import Finding
from ndd_engine.errors import UsageError
from ndd_engine.record.events import TrialEvent

from .base import POLL_S, ViewScreen

_TYPED = 200  # maximum length of a custom change
_HINT = "section.key=value, e.g. loader.workers=2; separate several with spaces"


def proposed_changes(findings: Iterable[Finding]) -> tuple[ProposedChange, ...]:
    """Every configuration change that the findings propose, without duplicates.

    In order, but what is not worthwhile comes last: the first one is the one that the live screen proposes.
    """
    found: dict[tuple[str, ...], ProposedChange] = {}
    for finding in sorted(findings, key=lambda finding: bool(finding.leave)):
        for change in finding.changes:
            if change.sets:
                proposed = ProposedChange(
                    change.sets, finding.title, finding.cause, finding.ceiling, finding.advice(change)
                )
                found.setdefault(change.sets, proposed)
    return tuple(found.values())


class TrialScreen(ViewScreen[TrialState]):
    """Runs one trial at a time. `earlier` returns the trials of this run so far, newest last."""

    keys = TRIAL_KEYS
    body: RowList

    def __init__(
        self,
        look: Look,
        trials: TrialSource,
        offered: tuple[ProposedChange, ...],
        earlier: Callable[[], tuple[TrialEvent, ...]],
    ) -> None:
        view = TrialState(
            "choose", trials.base, offered, problem=trials.refusal(), earlier=earlier(), pauses=trials.pauses(),
            budget_s=BUDGETS_S[0],
        )  # fmt: skip
        self.field = TextField(placeholder=_HINT, max_length=_TYPED, classes="field", select_on_focus=False)
        super().__init__(look, view, RowList(look, after=self.field))
        self._label = Lines(look)
        self.page = Lines(look, scrolls=True)
        self.page.display = False
        self._trials = trials
        self._earlier = earlier
        self._job: TrialJob | None = None
        self._refusal = view.problem

    def parts(self) -> tuple[Widget, ...]:
        return self.top, self.body, self._label, self.field, self.page, self.below

    def text(self) -> Lines:
        return self.page

    def on_mount(self) -> None:
        if not self.view.offered:
            self.field.focus()
        self.set_interval(POLL_S, self.poll)

    def on_unmount(self) -> None:
        # However the screen is closed: a trial must not keep the run paused in the background.
        if self._job is not None:
            self._job.stop()

    def poll(self) -> None:
        """Show the progress or the result of the trial."""
        job = self._job
        if job is not None and not job.done:
            self.show(progress=job.progress)
        elif job is not None:
            self._job = None
            self.show(stage="result", stopping=False, saved="", result=job.result, problem=job.problem)
        elif self._refusal and self.view.stage == "choose":
            before, self._refusal = self._refusal, self._trials.refusal()
            if self.view.problem == before != self._refusal:  # what refused the trial may have ended
                self.show(problem=self._refusal)

    def sections(self, width: int, height: int) -> tuple[list[Row], list[Row]]:
        state = self.view
        choosing = state.stage == "choose"
        self.swap(listed=choosing)
        self._label.display = self.field.display = choosing
        if not choosing:
            self.page.show(
                measuring(state, width) if state.stage == "measure" else result(state, width, height)
            )
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
                return self.body.chosen is not None
            case "more time":
                return state.stage == "choose" or (state.stage == "result" and state.longer_s is not None)
            case "faster":
                return state.can_write
            case _:
                return state.stage == "result"

    def word(self, key: Key) -> str:
        state = self.view
        if key.action == "longer" and state.longer_s and state.stage == "result":
            return f"measure up to {state.longer_s:.0f} s"
        if key.action == "back" and state.stage == "measure":
            return "stop and resume the run" if state.pauses else "stop"
        return key.word

    def on_option_list_option_selected(self) -> None:
        self._measure_selected()

    def on_input_submitted(self) -> None:
        self._measure_typed()

    def action_measure(self) -> None:
        """Measure the change that has the focus."""
        if self.field.has_focus:
            self._measure_typed()
        else:
            self._measure_selected()

    def action_switch(self) -> None:
        (self.body if self.field.has_focus and self.view.offered else self.field).focus()

    def action_edit(self) -> None:
        """Edit the selected change in the field."""
        self.field.value = shlex.join(self.body.chosen.sets)
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
        """Write the change of the trial to a new file."""
        assert self.view.result is not None
        try:
            self.show(saved=str(self._trials.write(self.view.result)), problem="")
        except UsageError as error:
            self.show(problem=str(error))

    def action_copy(self) -> None:
        """Copy the change of the trial as a diff to the clipboard of the terminal."""
        try:
            self.app.copy_to_clipboard(self._trials.diff(self.view.trying))
            self.say("copied the diff")
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

    def _measure_selected(self) -> None:
        chosen = self.body.chosen
        if chosen is not None:
            self._measure(chosen.sets, chosen.cause)

    def _measure_typed(self) -> None:
        try:
            sets = tuple(shlex.split(self.field.value))
        except ValueError as error:
            self.show(problem=f"cannot parse: {error}")
            return
        if sets:
            self._measure(sets, None)
        else:
            self.show(problem="enter a change, e.g. loader.workers=2")

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
