"""A campaign: candidates are measured one after another within a budget, and the results are told as they come.

Tuning, scaling, claims and the verification of the wizard are campaigns. Each says what its candidates are and what it
does with a result.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from ndd_engine.child import ChildError, StoppedError, spec_of, ticker
from ndd_engine.config import Config, Draft, anywhere, read
from ndd_engine.errors import NddError
from ndd_engine.record.events import TrialEvent

from .outcome import Base, Measure, Progress, TrialRequest
from .sides import SideProcess
from .trial import run_trial

Row = TypeVar("Row")
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class CampaignState(Generic[Row]):
    """How far a campaign is. rows: the results. stage: what it does. progress: of the current trial.

    stopped: it was interrupted. failed: why nothing more is measured, "" otherwise. The rows hold what was measured.
    """

    rows: tuple[Row, ...] = ()
    stage: str = ""
    progress: Progress | None = None
    elapsed_s: float = 0.0
    stopped: bool = False
    failed: str = ""


State = TypeVar("State", bound=CampaignState[Any])


class Campaign(Generic[State]):
    """Measures one candidate after another.

    tell: receives the state whenever it changes. stop: set it to end with what is known. budget_s: of each trial,
    unless one is given another; `share` is of this budget, too. keep: receives each trial that was not stopped.
    clock: seconds.
    """

    def __init__(
        self,
        state: State,
        tell: Callable[[State], None],
        stop: threading.Event | None,
        budget_s: float,
        measure: Measure = run_trial,
        keep: Callable[[TrialEvent], None] = lambda _trial: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.state, self.stop, self.budget_s = state, stop or threading.Event(), budget_s
        self._tell, self._measure, self._keep = tell, measure, keep
        self._clock, self._begun, self._measured = clock, clock(), False

    @property
    def share(self) -> float:
        """The share of the budget that has passed since the begin; may exceed 1."""
        return (self._clock() - self._begun) / self.budget_s

    def say(self, stage: str | None = None, progress: Progress | None = None, **changes: Any) -> None:
        """Tell how far it is. stage: None if it is still the same."""
        stage = self.state.stage if stage is None else stage
        elapsed_s = round(self._clock() - self._begun, 1)
        self.state = replace(self.state, stage=stage, progress=progress, elapsed_s=elapsed_s, **changes)
        self._tell(self.state)

    def put(self, index: int, **changes: Any) -> None:
        """Change a row, and tell it."""
        rows = list(self.state.rows)
        rows[index] = replace(rows[index], **changes)
        self.say(rows=tuple(rows))

    def trial(
        self, base: Base, sets: Sequence[str], budget_s: float | None = None, **options: Any
    ) -> TrialEvent:
        """Measure settings against a baseline. options: see TrialRequest."""
        request = TrialRequest(base, tuple(sets), budget_s or self.budget_s, **options)
        trial = self._measure(request, lambda progress: self.say(progress=progress), self.stop)
        self._measured = True
        if trial.verdict != "stopped":
            self._keep(trial)
        return trial

    def each(self, items: Sequence[Item], one: Callable[[int, Item], None]) -> None:
        """Measure the items in order until all are measured, one fails, or it is stopped.

        A failure ends the campaign with what was measured; before the first trial has ended, it is raised: NddError.
        """
        for index, item in enumerate(items):
            if self.stop.is_set() or self.state.failed:
                break
            try:
                one(index, item)
            except StoppedError:
                break
            except NddError as error:
                if not self._measured:
                    raise
                self.say(failed=f"{self.state.stage}: {error}")
        self.say(stopped=self.stop.is_set())

    def start_config(self, base: Base, draft: Draft) -> Config:
        """Resolve the draft: choose size "auto" by measurement and make the data path absolute.

        Raises NddError if no size can be chosen, or when stopped.
        """
        if draft.size != "auto":
            return anywhere(draft.resolve())
        try:
            with SideProcess(spec_of(base.config, base.workload, base.sets)) as side:
                text = side.choose(ticker("choosing the model size", self.say, self.stop))
        except StoppedError:
            raise StoppedError("stopped before anything was measured") from None
        except ChildError as error:
            raise NddError(f"the model size cannot be chosen: {error}") from None
        with tempfile.TemporaryDirectory(prefix="ndd-campaign-") as folder:
            chosen = Path(folder, "chosen.toml")
            chosen.write_text(text, encoding="utf-8")
            return read(chosen).resolve()
