"""The trial screen: select a change, measure it, show the result."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable

from textual import events

from ndd_console.screens.interfaces import TrialJob, TrialSource
from ndd_console.view.style import Look
from ndd_console.view.trial import BUDGETS_S, ProposedChange, TrialState, trial_rows
from ndd_engine.diagnose import Finding
from ndd_engine.errors import UsageError
from ndd_engine.record.events import TrialEvent

from .base import LEAVE, POLL_S, ViewScreen, bounded, key_of

_TYPED = 200  # maximum length of a custom change


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
        super().__init__(look, view, trial_rows)
        self._trials = trials
        self._earlier = earlier
        self._job: TrialJob | None = None
        self._refusal = view.problem

    def on_mount(self) -> None:
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

    def on_key(self, event: events.Key) -> None:
        event.stop()
        key = key_of(event)
        if self.view.stage == "measure":
            if key in LEAVE:
                self._stop()
        elif self.view.stage == "result":
            self._on_result(key)
        elif key in LEAVE and not (key == "q" and self.view.custom):
            self.go_back()
        else:
            self._on_choice(key, event.character if event.is_printable else None)

    # Selecting a change.

    def _on_choice(self, key: str, character: str | None) -> None:
        state = self.view
        step = {"up": -1, "down": 1, "tab": 1, "shift+tab": -1}.get(key)
        if step is None and not state.custom:
            step = {"k": -1, "j": 1}.get(key)
        if step is not None:
            self.show(chosen=bounded(state.chosen + step, len(state.offered) + 1), problem="")
        elif key == "enter":
            self._measure()
        elif key == "ctrl+t" or (key == "m" and not state.custom):
            later = BUDGETS_S[(BUDGETS_S.index(state.budget_s) + 1) % len(BUDGETS_S)]
            self.show(budget_s=later)
        elif state.custom:
            self._type(key, character)
        elif key == "e":
            typed = shlex.join(state.offered[state.chosen].sets)
            self.show(chosen=len(state.offered), typed=typed, cursor=len(typed), problem="")

    def _type(self, key: str, character: str | None) -> None:
        state = self.view
        text, at = state.typed, state.cursor
        if key == "backspace":
            text, at = text[: max(at - 1, 0)] + text[at:], max(at - 1, 0)
        elif key == "delete":
            text = text[:at] + text[at + 1 :]
        elif key == "ctrl+u":
            text, at = text[at:], 0
        elif key in ("left", "right"):
            at = bounded(at + (1 if key == "right" else -1), len(text) + 1)
        elif key in ("home", "ctrl+a"):
            at = 0
        elif key in ("end", "ctrl+e"):
            at = len(text)
        elif character is not None and len(text) < _TYPED:
            text, at = text[:at] + character + text[at:], at + 1
        self.show(typed=text, cursor=at, problem="")

    def on_paste(self, event: events.Paste) -> None:
        event.stop()
        if self.view.stage == "choose" and self.view.custom:
            for character in " ".join(event.text.split()):
                if character.isprintable():
                    self._type("", character)

    def _measure(self) -> None:
        state = self.view
        cause = None
        problem = ""
        if state.custom:
            try:
                sets = tuple(shlex.split(state.typed))
                problem = "" if sets else "enter a change, e.g. loader.workers=2"
            except ValueError as error:
                sets, problem = (), f"cannot parse: {error}"
        else:
            sets = state.offered[state.chosen].sets
            cause = state.offered[state.chosen].cause
        problem = problem or self._trials.refusal() or self._trials.check(sets)
        if problem:
            self.show(problem=problem)
            return
        pauses = self._trials.pauses()
        self._job = self._trials.start(sets, cause, state.budget_s)
        self.show(stage="measure", trying=sets, pauses=pauses, stopping=False, problem="", progress=None)

    # Measuring and the result.

    def _stop(self) -> None:
        if self._job is not None:
            self._job.stop()
        self.show(stopping=True)

    def _on_result(self, key: str) -> None:
        state = self.view
        if key == "w" and state.result is not None and state.can_write:
            try:
                self.show(saved=str(self._trials.write(state.result)), problem="")
            except UsageError as error:
                self.show(problem=str(error))
        elif key == "m" and state.longer_s is not None:
            self.show(budget_s=state.longer_s)
            self._measure()
        elif key in ("t", "enter"):
            self.show(stage="choose", problem="", result=None, earlier=self._earlier())
        elif key in LEAVE:
            self.go_back()
