"""Runs the cases in order, and saves each outcome at once, so that an interrupted suite can be resumed."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.common import say
from benchmarks.engine import tried

from ndd_engine.errors import NddError
from ndd_engine.record.events import TrialEvent
from qa.console import append, read_lines
from qa.trials import nulls
from qa.trials.nulls import Null

from .cases import PLAIN, Case
from .faulty import ANTISPOOF, CHARTEXT, FINETUNE, NDD, SUMMARISE
from .observed import CaseError, neighbours, observed
from .outcome import Measured, Outcome, same_change

# Seconds of a trial of the proposed fix, and the share of that for a trial of the cure if that is a different change.
FIX_S = 24.0
CURE_SHARE = 0.75
# Seconds beyond the budget of a trial before it is stopped.
PATIENCE_S = 240.0
NO_FINDING = ("healthy", "too-short")


class TrialError(Exception):
    """A trial could not begin."""


@dataclass(frozen=True)
class Suite:
    """folder: for outcomes and the files of each case. trials: whether to measure fixes. budget_s: of each trial."""

    folder: Path
    trials: bool = True
    budget_s: float = FIX_S

    @property
    def record(self) -> Path:
        """One outcome per line."""
        return self.folder / "cases.jsonl"

    def kept(self) -> list[Outcome]:
        """The newest outcome of each completed case; a torn last line is ignored."""
        return list(
            {outcome.case.name: outcome for outcome in read_lines(self.record, Outcome.from_json)}.values()
        )

    def run(self, cases: Sequence[Case], resume: bool) -> list[Outcome]:
        """Run all cases; with `resume` only those without an outcome. Returns the outcomes of `cases`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if not resume:
            self.record.unlink(missing_ok=True)
        done = {outcome.case.name: outcome for outcome in self.kept() if not outcome.error}
        begin = time.monotonic()
        for number, case in enumerate(cases, start=1):
            if case.name in done:
                continue
            outcome = self.carry_out(case)
            done[case.name] = outcome
            append(self.record, outcome.to_json())
            told = f"{case.name}: {described(outcome)}" + ("" if outcome.right else "  << WRONG")
            say(f"{number:3} of {len(cases)}  {time.monotonic() - begin:5.0f} s  {told}")
        return [done[case.name] for case in cases if case.name in done]

    def carry_out(self, case: Case) -> Outcome:
        """One case: the run, its diagnosis, and the trials that verify it."""
        folder = self.folder / case.name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        begin = time.monotonic()
        try:
            with neighbours(case.busy, case.asleep) as pids:
                outcome = self._carry_out(case, folder, pids)
        except CaseError as error:
            outcome = Outcome(case, error=str(error))
        return replace(outcome, seconds=round(time.monotonic() - begin, 1))

    def _carry_out(self, case: Case, folder: Path, pids: tuple[int, ...]) -> Outcome:
        found = observed(case, folder, pids, alone=bool(pids) and self.trials)
        verdict = found.findings[0]
        outcome = Outcome(
            case,
            named=verdict.cause,
            found=tuple((finding.cause, finding.ceiling) for finding in found.findings),
            fix=verdict.sets,
            outside=bool(verdict.changes) and not verdict.changes[0].sets,
            foreign=round(found.foreign, 2),
            where=" ".join([verdict.title, *(change.where or "" for change in verdict.changes)]),
        )
        if not self.trials or not case.proved:
            return outcome
        if verdict.sets and verdict.cause not in NO_FINDING:
            tried = self._trial(case, verdict.sets, verdict.cause, self.budget_s)
            outcome = replace(outcome, tried=tried)
        if case.kind != "fault":
            return outcome
        if case.busy:
            return replace(outcome, cured=Measured.of_estimate(found.alone))
        if outcome.tried is not None and same_change(verdict.sets, case.cure):
            return replace(outcome, cured=outcome.tried)
        if case.cure:
            cured = self._trial(case, case.cure, None, self.budget_s * CURE_SHARE)
            outcome = replace(outcome, cured=cured)
        return outcome

    def _trial(self, case: Case, sets: tuple[str, ...], cause: str | None, budget_s: float) -> Measured:
        seconds = max(budget_s, case.trial_s)
        try:
            return Measured.of_trial(trial(case.workload_name, case.all_sets, sets, seconds, cause=cause))
        except TrialError as error:
            # The diagnosis remains valid.
            return Measured(sets, "not measured", None, None, None, 0.0, str(error))


def trial(
    workload: str,
    sets: Sequence[str],
    change: Sequence[str],
    budget_s: float,
    *,
    cause: str | None = None,
    restarts: bool = False,
) -> TrialEvent:
    """A trial as `ndd-console try` makes it; stopped if it hangs. Raises TrialError."""
    stop = threading.Event()
    timer = threading.Timer(budget_s + PATIENCE_S, stop.set)
    timer.daemon = True
    timer.start()
    try:
        return tried(workload, sets, change, budget_s, restarts, cause=cause, stop=stop)
    except NddError as error:
        raise TrialError(str(error)) from None
    finally:
        timer.cancel()


def described(outcome: Outcome) -> str:
    """What was found, and what the trials measured."""
    if outcome.error:
        return outcome.error
    ceiling = "" if outcome.ceiling is None else f" (at most {outcome.ceiling:.2f}x)"
    parts = [f"{outcome.named}{ceiling}"]
    for name, measured in (("fix", outcome.tried), ("without the fault", outcome.cured)):
        if measured is not None:
            figure = measured.verdict if measured.ratio is None else f"{measured.ratio:.2f}x"
            parts.append(f"{name} {figure}")
    return ", ".join(parts)


# A/A trials of the five workloads: how often a change without effect is called faster or slower.
NULL_TITLE = "A/A trials: false gains and losses"
NULL_S = 16.0
# The interval of progress lines in headless runs; trials print none.
NULL_CHANGE = ("log.headless_s=7.5",)
SIDES = (
    ("eeg", NDD), ("chartext", CHARTEXT), ("antispoof", ANTISPOOF), ("finetune", FINETUNE), ("summarise", SUMMARISE),
)  # fmt: skip
PAIRS_EVERY = 6


def without_effect(
    folder: Path, count: int, resume: bool, budget_s: float = NULL_S, both: bool = False
) -> list[Null]:
    """`count` trials, cycling through the workloads; with `resume` only missing ones.

    both: one round of PAIRS_EVERY in pairs of processes, the others in one process, as by default; else all in pairs.
    """

    def one(number: int) -> Null:
        workload, sets = SIDES[number % len(SIDES)]
        restarts = not both or number // len(SIDES) % PAIRS_EVERY == 0
        try:
            event = trial(workload, (*PLAIN, *sets), NULL_CHANGE, budget_s, restarts=restarts)
        except TrialError as error:
            return Null(number, workload, f"failed: {error}", restarts=restarts)
        return Null.of(number, workload, event, restarts)

    folder.mkdir(parents=True, exist_ok=True)
    return nulls.run(folder / "null.jsonl", count, resume, one)
