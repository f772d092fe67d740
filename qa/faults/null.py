"""A/A trials: how often a change without effect is called faster or slower."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.common import Table, say

from .cases import PLAIN
from .faulty import ANTISPOOF, CHARTEXT, FINETUNE, NDD, SUMMARISE
from .suite import TaskError, append, read_lines, task

BUDGET_S = 16.0
# The interval of progress lines in headless runs; trials print none.
CHANGE = ("log.headless_s=7.5",)
SIDES = (
    ("eeg", NDD), ("chartext", CHARTEXT), ("antispoof", ANTISPOOF), ("finetune", FINETUNE), ("summarise", SUMMARISE),
)  # fmt: skip
PAIRS_EVERY = 6
CALLS = ("faster", "slower")
LIMIT = 0.05


@dataclass(frozen=True)
class Null:
    """One trial; without a ratio, `verdict` holds the reason. restarts: whether it measured in pairs of processes."""

    number: int
    workload: str
    verdict: str
    ratio: float | None
    low: float | None
    high: float | None
    seconds: float
    restarts: bool = True


def run(folder: Path, count: int, resume: bool, budget_s: float = BUDGET_S, both: bool = False) -> list[Null]:
    """Run `count` trials, cycling through the workloads; with `resume` only missing ones.

    both: one round of PAIRS_EVERY in pairs of processes, the others in one process, as by default; else all in pairs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    record = folder / "null.jsonl"
    if not resume:
        record.unlink(missing_ok=True)
    done = {null.number: null for null in read_lines(record, lambda line: Null(**json.loads(line)))}
    for number in range(count):
        if number in done:
            continue
        restarts = not both or number // len(SIDES) % PAIRS_EVERY == 0
        done[number] = null = _one(folder / f"null-{number:03}", number, budget_s, restarts)
        append(record, json.dumps(asdict(null)))
        ratio = "" if null.ratio is None else f" {null.ratio:.3f}x"
        say(f"{number + 1:3} of {count}  {null.workload}: {null.verdict}{ratio}")
    return [done[number] for number in sorted(done) if number < count]


def _one(folder: Path, number: int, budget_s: float, restarts: bool) -> Null:
    workload, sets = SIDES[number % len(SIDES)]
    folder.mkdir(parents=True, exist_ok=True)
    body = {
        "what": "trial", "workload": workload, "sets": [*PLAIN, *sets], "change": CHANGE, "budget_s": budget_s,
        "cause": None, "restarts": restarts,
    }  # fmt: skip
    try:
        event = task(folder, "null", body)
    except TaskError as error:
        return Null(number, workload, f"failed: {error}", None, None, None, 0.0, restarts)
    numbers = (event["ratio"], event["low"], event["high"], event["seconds"])
    return Null(number, workload, event["verdict"], *numbers, restarts)


def table(nulls: Sequence[Null]) -> Table:
    """Verdicts by workload and in total, with an interval of the false positive rate."""
    found = Table(
        "A/A trials: false gains and losses",
        (
            "workload",
            "trials",
            "faster",
            "slower",
            "no difference",
            "inconclusive",
            "other",
            "ratio from",
            "to",
        ),
    )
    for workload in (*dict.fromkeys(null.workload for null in nulls), None):
        some = [null for null in nulls if workload in (None, null.workload)]
        calls = Counter(null.verdict for null in some)
        known = [calls[name] for name in (*CALLS, "no difference", "inconclusive")]
        ratios = [null.ratio for null in some if null.ratio is not None]
        span = (f"{min(ratios):.3f}x", f"{max(ratios):.3f}x") if ratios else ()
        found.add(workload or "all", *map(str, (len(some), *known, len(some) - sum(known))), *span)
    judged = [null for null in nulls if null.ratio is not None]
    called = sum(null.verdict in CALLS for null in judged)
    if judged:
        low, high = binomial_interval(called, len(judged))
        reached = "reached" if called <= LIMIT * len(judged) else "NOT REACHED"
        found.note(
            f"{called} of {len(judged)} trials called faster or slower ({called / len(judged):.1%}; exact binomial "
            f"95 % CI {low:.1%} … {high:.1%}); target: at most {LIMIT:.0%}: {reached}"
        )
    if len(judged) < len(nulls):
        found.note(f"{len(nulls) - len(judged)} trials have no ratio: raise --budget")
    return found


def binomial_interval(hits: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """The exact (Clopper-Pearson) interval of a rate, given `hits` in `trials`."""
    tail = (1 - confidence) / 2

    def at_most(count: int, rate: float) -> float:
        return math.fsum(
            math.comb(trials, k) * rate**k * (1 - rate) ** (trials - k) for k in range(count + 1)
        )

    def where(count: int, share: float) -> float:
        """The rate at which `count` or fewer hits have the probability `share`."""
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if at_most(count, middle) > share else (low, middle)
        return (low + high) / 2

    lower = 0.0 if hits == 0 else where(hits - 1, 1 - tail)
    upper = 1.0 if hits == trials else where(hits, tail)
    return lower, upper
