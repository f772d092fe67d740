"""A trial: candidate vs. baseline on this machine, in ABBA blocks of two processes.

The candidate is prepared first and alone, so that an out-of-memory error is its own; the baseline's process only
imports meanwhile. If both do not fit into memory at once, only one process is open at a time.
"""

from __future__ import annotations

import math
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from ndd_engine.child import ChildError, StoppedError, Tick, spec_of, ticker
from ndd_engine.config import Draft, read
from ndd_engine.errors import UsageError
from ndd_engine.record.events import TrialEvent
from ndd_engine.text import duration

from .blocks import (
    BlockPlan,
    BlocksDoNotFitError,
    SidePace,
    lead,
    needs_epochs,
    never_happens,
    period,
    plan_blocks,
    saves,
    switched_off,
)
from .drafts import drafts
from .outcome import differences, result
from .paired import FEWEST_ABBA, FLOOR, abba_log_ratio, early, estimate, last
from .pausing import alone
from .process import SideProcess
from .request import Progress, TrialRequest
from .side import LOSSES, SideFacts

Tell = Callable[[Progress], None]
T = TypeVar("T")

# Seconds for the first steps of a side, and for a first estimate of its step time.
WARMUP_S = 4.0
ESTIMATE_S = 0.4
# Interval of progress reports.
TELL_S = 0.5
# Seconds beyond the budget after which a side that does not answer has failed.
PATIENCE_S = 120.0
# By index.
SIDES = ("the baseline", "the candidate")


class _SideFailedError(Exception):
    """A side failed. index: into SIDES. kind: as in ChildError."""

    def __init__(self, index: int, kind: str, text: str) -> None:
        super().__init__(text)
        self.index, self.kind = index, kind


class _NotMeasurableError(Exception):
    """Nothing can be measured; the message says why."""


def run_trial(request: TrialRequest, tell: Tell, stop: threading.Event | None = None) -> TrialEvent:
    """Measure candidate vs. baseline. Failures of either are results; mistakes in the request raise UsageError.

    tell: called on this thread, a few times per second. stop: set it to end early with what is known. Waits while
    another trial measures on the same device; this does not count towards the budget. Does not pause or record
    anything, see `pausing` and `store`. Leaves no process and no file behind.
    """
    base, change = drafts(request)

    def waiting(text: str) -> None:
        tell(Progress(text, 0.0, request.budget_s))

    with alone(base.resolve().run.device, waiting, stop), _Trial(request, base, change, tell, stop) as trial:
        return trial.run()


class _Trial:
    """A trial in progress. _sides: the open ones, by index into SIDES."""

    def __init__(
        self, request: TrialRequest, base: Draft, change: Draft, tell: Tell, stop: threading.Event | None
    ) -> None:
        self.request = request
        self._begin = time.monotonic()
        self._tell, self._stop = tell, stop
        self._base = request.base
        self._drafts = (base, change)
        self._chosen: tempfile.TemporaryDirectory[str] | None = None
        self._learn_difference()
        self._sides: dict[int, SideProcess] = {}
        self._facts = [SideFacts(), SideFacts()]
        self._exclusive = False
        self._values: list[float] = []
        self._rates: tuple[list[float], list[float]] = ([], [])
        self._stage = "starting"
        self._told_s = 0.0

    def __enter__(self) -> _Trial:
        return self

    def __exit__(self, *_: object) -> None:
        for index in list(self._sides):
            self._close(index)
        if self._chosen is not None:
            self._chosen.cleanup()

    def run(self) -> TrialEvent:
        """Measure and return the result."""
        try:
            verdict, reason = self._measure()
        except StoppedError:
            verdict, reason = "stopped", "stopped before there was a result"
        except _NotMeasurableError as error:
            verdict, reason = "inconclusive", str(error)
        except BlocksDoNotFitError as error:
            needed_s = (self._elapsed_s + error.needed_s) * 1.2
            verdict, reason = "inconclusive", f"{error}; raise --budget to about {math.ceil(needed_s)}"
        except _SideFailedError as error:
            verdict, reason = self._failed(error)
        for rates, facts in zip(self._rates, self._facts, strict=True):
            if rates:
                facts.items_per_s = sum(rates) / len(rates)
                facts.step_s = facts.items_per_step / facts.items_per_s
        found, sides = estimate(self._values), (self._facts[0], self._facts[1])
        blocks = len(self._values)
        return result(self.request, verdict, reason, found, sides, self._changed, self._elapsed_s, blocks)

    def _measure(self) -> tuple[str, str]:
        self._choose()
        for index in (1, 0):
            self._open(index)
        changes = self._prepare(1)
        try:
            verdict, reason = self._compare(self._prepare(0), changes)
        except _SideFailedError as error:
            if error.kind != "oom" or len(self._sides) < 2:
                raise
            # Both do not fit at once: from here on each run opens its side.
            self._exclusive = True
            self._values.clear()
            for index, rates in enumerate(self._rates):
                rates.clear()
                self._close(index)
            self._open(0)
            verdict, reason = self._compare(self._prepare(0), changes)
        for index, side in self._sides.items():
            with suppress(ChildError):  # keep what is known
                side.learn(self._tick())
                first, now = self._facts[index], side.facts
                first.settings = now.settings
                first.peak_bytes = most(first.peak_bytes, now.peak_bytes)
                first.reserved_bytes = most(first.reserved_bytes, now.reserved_bytes)
        return verdict, reason

    def _compare(self, base_s: float, change_s: float) -> tuple[str, str]:
        """(verdict, reason), given the approximate seconds of a step of both sides."""
        return self._measure_blocks(self._plan(self._pace(0, base_s), self._pace(1, change_s)))

    def _failed(self, error: _SideFailedError) -> tuple[str, str]:
        if error.kind == "late":
            setup = self._facts[error.index].prepare_s is None
            why = f"setup took more than {self._elapsed_s:.0f} s" if setup else str(error)
            return "inconclusive", f"{why}; raise --budget above {self.request.budget_s:g}"
        if error.index == 0:
            return "failed", f"the baseline itself fails: {error}"
        return ("out of memory" if error.kind == "oom" else "failed"), str(error)

    # Configurations.

    def _learn_difference(self) -> None:
        base, change = (draft.resolve() for draft in self._drafts)
        self._configs = (base, change)
        self._changed = list(differences(base, change))

    def _choose(self) -> None:
        """Choose the size "auto" once, so that both sides have the same."""
        if self._drafts[0].size != "auto":
            return
        self._stage = "choosing the model size"
        self._open(0)
        found = self._asked(0, lambda side, tick: side.choose(tick))
        self._close(0)
        self._chosen = tempfile.TemporaryDirectory(prefix="ndd-trial-")
        path = Path(self._chosen.name, "base.toml")
        path.write_text(found, encoding="utf-8")
        self._base = replace(self._base, config=path, workload=None, sets=())
        self._drafts = (read(path), read(path, self.request.sets))
        self._learn_difference()
        if not self._changed:
            raise UsageError(
                f"{', '.join(self.request.sets)}: {self.request.base.name} already resolves to this on this machine; "
                "there is nothing to compare"
            )

    # Sides.

    def _open(self, index: int) -> None:
        base, run = self._base, self._base.run
        sets = (*base.sets, *(self.request.sets if index else ()))
        spec = spec_of(base.config, base.workload, sets, switched_off(self._changed))
        # On the run's own disk if write speed matters, else in the temporary folder.
        place = run.path.parent if run is not None and saves(self._changed) else None
        with _failures_of(index):
            self._sides[index] = SideProcess(spec, place)

    def _close(self, index: int) -> None:
        if (side := self._sides.pop(index, None)) is not None:
            side.close()

    def _prepare(self, index: int) -> float:
        """Prepare and warm up. Returns the approximate seconds of a step."""
        self._stage = f"preparing {SIDES[index]}"
        self._asked(index, lambda side, tick: side.prepare(max(self._left_s, 0.1), tick))
        self._stage = f"warming up {SIDES[index]}"
        limit_s = min(WARMUP_S, self.request.budget_s / 12)
        warmup = self._train(index, LOSSES, until_s=limit_s, first=True)
        seconds, steps = self._train(index, 1 << 40, until_s=min(ESTIMATE_S, self.request.budget_s / 60))
        side = self._sides[index]
        self._asked(index, lambda side, tick: side.learn(tick))
        side.facts.warmup_s, side.facts.warmup_steps = warmup
        if self._facts[index].prepare_s is None:  # a reopened side profits from warm caches
            self._facts[index] = side.facts
        return seconds / steps

    def _train(
        self,
        index: int,
        steps: int,
        plan: BlockPlan | None = None,
        until_s: float | None = None,
        first: bool = False,
    ) -> tuple[float, int]:
        """(seconds, steps) of a run. first: without untimed lead steps, and at least two steps."""
        before = 0 if first else lead(plan.step_s[index]) if plan is not None else 1
        limit_s = max(self._left_s, 0.0) + PATIENCE_S
        within, least = plan is not None and plan.within, 2 if first else 1
        return self._asked(
            index,
            lambda side, tick: side.train(
                steps, limit_s, tick, lead=before, until_s=until_s, least=least, within=within
            ),
        )

    def _asked(self, index: int, ask: Callable[[SideProcess, Tick], T]) -> T:
        with _failures_of(index):
            return ask(self._sides[index], self._tick())

    def _tick(self) -> Tick:
        def tell(stage: str) -> None:
            if stage != self._stage or self._elapsed_s - self._told_s >= TELL_S:
                self._progress(stage)

        self._progress()
        return ticker(self._stage, tell, self._stop)

    def _progress(self, stage: str | None = None) -> None:
        self._stage = stage if stage is not None else self._stage
        self._told_s = self._elapsed_s
        found = estimate(self._values)
        numbers = (found.ratio, found.low, found.high) if found is not None else (None, None, None)
        budget_s = self.request.budget_s
        self._tell(Progress(self._stage, self._elapsed_s, budget_s, len(self._values), *numbers))

    @property
    def _elapsed_s(self) -> float:
        return time.monotonic() - self._begin

    @property
    def _left_s(self) -> float:
        return self.request.budget_s - self._elapsed_s

    # Blocks.

    def _pace(self, index: int, step_s: float) -> SidePace:
        facts = self._facts[index]
        recurs = period(
            self._configs[index], self._changed, facts.steps_per_epoch, step_s, self.request.budget_s
        )
        return SidePace(facts.items_per_step, facts.steps_per_epoch, step_s, recurs)

    def _plan(self, base: SidePace, change: SidePace) -> BlockPlan:
        if missing := never_happens(*self._configs, self._changed):
            raise _NotMeasurableError(missing)
        if self._left_s < self.request.budget_s / 10:
            enough_s = FEWEST_ABBA * 4 * max(base.step_s, change.step_s, ESTIMATE_S)
            raise BlocksDoNotFitError(f"preparing both sides took {duration(self._elapsed_s)}", enough_s)
        by_epochs = needs_epochs(*self._configs, self._changed)
        if by_epochs:
            # The first estimate does not show the cost of the start of an epoch.
            self._stage = "timing a whole epoch"
            base, change = self._over_epoch(0, base), self._over_epoch(1, change)
        plan = plan_blocks(base, change, self._left_s, by_epochs)
        if plan.within or self._exclusive or by_epochs:
            return plan
        # The first estimate does not show the cost of periodic events.
        self._stage = "timing a whole segment"
        paces = []
        whole = True
        for index, pace in enumerate((base, change)):
            limit_s = self._left_s / (FEWEST_ABBA * 4)
            seconds, steps = self._train(index, plan.steps[index], plan, until_s=limit_s)
            whole = whole and steps == plan.steps[index]
            paces.append(
                replace(pace, step_s=max(seconds / steps, pace.step_s if steps < plan.steps[index] else 0))
            )
        return plan_blocks(paces[0], paces[1], self._left_s, by_epochs, whole)

    def _over_epoch(self, index: int, pace: SidePace) -> SidePace:
        """The pace over a whole epoch, its start included; unchanged if an epoch takes too long."""
        seconds, steps = self._train(index, pace.per_epoch, until_s=self._left_s / (FEWEST_ABBA * 2))
        return replace(pace, step_s=seconds / steps) if steps == pace.per_epoch else pace

    def _measure_blocks(self, plan: BlockPlan) -> tuple[str, str]:
        abba_s = plan.abba_s
        while self._left_s >= abba_s * (0.9 if len(self._values) >= FEWEST_ABBA else 0.5):
            begin = time.monotonic()
            self._stage = "measuring"
            a1, b1, b2, a2 = (self._block(index, plan) for index in (0, 1, 1, 0))
            self._values.append(abba_log_ratio(a1, b1, b2, a2))
            abba_s = time.monotonic() - begin
            self._progress("measuring")
            if (clear := early(self._values)) is not None:
                return clear, ""
        if (count := len(self._values)) < FEWEST_ABBA:
            raise BlocksDoNotFitError(
                f"the budget is enough for {count} of at least {FEWEST_ABBA} ABBA blocks",
                (FEWEST_ABBA + 1 - count) * abba_s,
            )
        verdict = last(self._values)
        noisy = f"too noisy to resolve a difference of {FLOOR * 100:.0f} %; raise --budget"
        return verdict, noisy if verdict == "inconclusive" else ""

    def _block(self, index: int, plan: BlockPlan) -> float:
        """Items per second of one run."""
        if self._exclusive and index not in self._sides:
            self._close(1 - index)
            self._open(index)
            self._prepare(index)
            self._stage = "measuring"
        seconds, steps = self._train(index, plan.steps[index], plan)
        rate = steps * self._facts[index].items_per_step / seconds
        self._rates[index].append(rate)
        return rate


@contextmanager
def _failures_of(index: int) -> Iterator[None]:
    try:
        yield
    except ChildError as error:
        raise _SideFailedError(index, error.kind, str(error)) from None


def most(first: int | None, second: int | None) -> int | None:
    """The larger of the known values."""
    return max((value for value in (first, second) if value is not None), default=None)
