"""A/A trials of the five workloads: how often a change without effect is called faster or slower."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from qa.trials import nulls
from qa.trials.nulls import Null

from .cases import PLAIN
from .faulty import ANTISPOOF, CHARTEXT, FINETUNE, NDD, SUMMARISE
from .suite import TrialError, trial

TITLE = "A/A trials: false gains and losses"
BUDGET_S = 16.0
# The interval of progress lines in headless runs; trials print none.
CHANGE = ("log.headless_s=7.5",)
SIDES = (
    ("eeg", NDD), ("chartext", CHARTEXT), ("antispoof", ANTISPOOF), ("finetune", FINETUNE), ("summarise", SUMMARISE),
)  # fmt: skip
PAIRS_EVERY = 6


def run(folder: Path, count: int, resume: bool, budget_s: float = BUDGET_S, both: bool = False) -> list[Null]:
    """Run `count` trials, cycling through the workloads; with `resume` only missing ones.

    both: one round of PAIRS_EVERY in pairs of processes, the others in one process, as by default; else all in pairs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    return nulls.run(folder / "null.jsonl", count, resume, partial(_one, budget_s=budget_s, both=both))


def _one(number: int, budget_s: float, both: bool) -> Null:
    workload, sets = SIDES[number % len(SIDES)]
    restarts = not both or number // len(SIDES) % PAIRS_EVERY == 0
    try:
        event = trial(workload, (*PLAIN, *sets), CHANGE, budget_s, restarts=restarts)
    except TrialError as error:
        return Null(number, workload, f"failed: {error}", restarts=restarts)
    return Null(number, workload, event.verdict, event.ratio, event.low, event.high, event.seconds, restarts)
