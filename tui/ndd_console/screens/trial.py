"""The trial screen: a change is chosen, measured in processes of its own, and its result shown."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable
from dataclasses import replace

from textual import events

from ndd_console.screens.interfaces import TrialJob, TrialSource
from ndd_console.view.style import Row
from ndd_console.view.trial import Choice, TrialState, trial_rows
from ndd_engine.diagnose import Finding
from ndd_engine.errors import UsageError
from ndd_engine.record.events import TrialEvent

from .base import CanvasScreen, Look

_LOOK_S = 0.25  # between looks at a trial that runs
# A trial takes less where the difference is clear before; slow steps need more.
BUDGETS_S = (60.0, 120.0, 300.0)
_TYPED = 200  # characters of own edits at most


def choices(findings: Iterable[Finding]) -> tuple[Choice, ...]:
    """Every change of the configuration that the findings propose, each once, in their order."""
    found: dict[tuple[str, ...], Choice] = {}
    for finding in findings:
        for change in finding.changes:
            if change.sets:
                choice = Choice(change.sets, finding.title, finding.cause, finding.ceiling)
                found.setdefault(change.sets, choice)
    return tuple(found.values())


class TrialScreen(CanvasScreen):
    """One trial after the other. `earlier` gives the trials of this run so far, the newest last."""

    def __init__(
        self,
        look: Look,
        trials: TrialSource,
        offered: tuple[Choice, ...],
        earlier: Callable[[], tuple[TrialEvent, ...]],
    ) -> None:
        super().__init__(look)
        self._trials = trials
        self._earlier = earlier
        self._job: TrialJob | None = None
        self.state = TrialState(
            "choose",
            trials.base,
            offered,
            earlier=earlier(),
            pauses=trials.pauses(),
            budget_s=BUDGETS_S[0],
        )

    def on_mount(self) -> None:
        self.set_interval(_LOOK_S, self.look_again)

    def on_unmount(self) -> None:
        # However the screen is left, nothing may go on measuring behind it, with the run standing still.
        if self._job is not None:
            self._job.stop()

    def draw(self, width: int, height: int) -> list[Row]:
        return trial_rows(self.state, width, height)

    def show(self, state: TrialState) -> None:
        """Take a new state and draw it."""
        if state != self.state:
            self.state = state
            self.paint()

    def look_again(self) -> None:
        """Take up how far the trial is, and its end."""
        job = self._job
        if job is None:
            return
        if not job.done:
            self.show(replace(self.state, progress=job.progress))
            return
        self._job = None
        self.show(
            replace(
                self.state, stage="result", result=job.result, problem=job.problem, stopping=False, saved=""
            )
        )

    def on_key(self, event: events.Key) -> None:
        event.stop()
        key = event.character if event.is_printable and event.character else event.key
        if self.state.stage == "measure":
            if key in ("escape", "q", "ctrl+q", "ctrl+c"):
                self._stop()
        elif self.state.stage == "result":
            self._on_result(key)
        elif key in ("escape", "ctrl+q", "ctrl+c") or (key == "q" and not self.state.own):
            self.go_back()
        else:
            self._on_choice(key, event.character if event.is_printable else None)

    # Choosing.

    def _on_choice(self, key: str, character: str | None) -> None:
        state = self.state
        step = {"up": -1, "down": 1, "tab": 1, "shift+tab": -1}.get(key)
        if step is None and not state.own:
            step = {"k": -1, "j": 1}.get(key)
        if step is not None:
            chosen = min(max(state.chosen + step, 0), len(state.choices))
            self.show(replace(state, chosen=chosen, problem=""))
        elif key == "enter":
            self._measure()
        elif key == "ctrl+t" or (key == "m" and not state.own):
            later = BUDGETS_S[(BUDGETS_S.index(state.budget_s) + 1) % len(BUDGETS_S)]
            self.show(replace(state, budget_s=later))
        elif state.own:
            self._type(key, character)
        elif key == "e":
            typed = shlex.join(state.choices[state.chosen].sets)
            self.show(replace(state, chosen=len(state.choices), typed=typed, cursor=len(typed), problem=""))

    def _type(self, key: str, character: str | None) -> None:
        state = self.state
        text, at = state.typed, state.cursor
        if key == "backspace":
            text, at = text[: max(at - 1, 0)] + text[at:], max(at - 1, 0)
        elif key == "delete":
            text = text[:at] + text[at + 1 :]
        elif key == "ctrl+u":
            text, at = text[at:], 0
        elif key in ("left", "right"):
            at = min(max(at + (1 if key == "right" else -1), 0), len(text))
        elif key in ("home", "ctrl+a"):
            at = 0
        elif key in ("end", "ctrl+e"):
            at = len(text)
        elif character is not None and len(text) < _TYPED:
            text, at = text[:at] + character + text[at:], at + 1
        self.show(replace(state, typed=text, cursor=at, problem=""))

    def on_paste(self, event: events.Paste) -> None:
        event.stop()
        if self.state.stage == "choose" and self.state.own:
            for character in " ".join(event.text.split()):
                if character.isprintable():
                    self._type("", character)

    def _measure(self) -> None:
        state = self.state
        cause = None
        if state.own:
            try:
                sets = tuple(shlex.split(state.typed))
            except ValueError as error:
                self.show(replace(state, problem=f"cannot be read: {error}"))
                return
            if not sets:
                self.show(replace(state, problem="type what to change, as in loader.workers=2"))
                return
        else:
            sets = state.choices[state.chosen].sets
            cause = state.choices[state.chosen].cause
        problem = self._trials.refusal() or self._trials.check(sets)
        if problem:
            self.show(replace(state, problem=problem))
            return
        pauses = self._trials.pauses()
        self._job = self._trials.start(sets, cause, state.budget_s)
        self.show(
            replace(
                state, stage="measure", trying=sets, problem="", progress=None, pauses=pauses, stopping=False
            )
        )

    # Measuring and the result.

    def _stop(self) -> None:
        if self._job is not None:
            self._job.stop()
        self.show(replace(self.state, stopping=True))

    def _on_result(self, key: str) -> None:
        state = self.state
        if key == "w" and state.result is not None and state.result.verdict != "failed" and not state.saved:
            try:
                self.show(replace(state, saved=str(self._trials.write(state.result)), problem=""))
            except UsageError as error:
                self.show(replace(state, problem=str(error)))
        elif key in ("t", "enter"):
            self.show(replace(state, stage="choose", problem="", result=None, earlier=self._earlier()))
        elif key in ("escape", "q", "ctrl+q", "ctrl+c"):
            self.go_back()
