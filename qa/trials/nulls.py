"""Trials of a change without effect (A/A), kept as they end, so that they can be continued, and of a planted 5 %."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Self

from benchmarks.common import Options, Table, as_percent, say
from benchmarks.engine import tried

from ndd_engine.record.events import TrialEvent
from ndd_engine.trial.estimates import judged
from qa.console import append, read_lines
from qa.faults.cases import MODULE
from qa.scripts.planted_models import UNITS

CALLS = ("faster", "slower")
VERDICTS = (*CALLS, "no difference", "inconclusive")
COLUMNS = ("subject", "trials", "contains 1", *VERDICTS, "other", "half-width", "seconds", "ratio from", "to")
# The shares of trials: with a false gain or loss, with 1 in their interval, and without a verdict.
FALSE, CONTAINED, UNDECIDED = 0.05, 0.93, 0.30


@dataclass(frozen=True)
class Null:
    """One trial; without a ratio, `verdict` says why. restarts: whether it measured in pairs of processes."""

    number: int
    subject: str
    verdict: str
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    seconds: float = 0.0
    restarts: bool = True

    @classmethod
    def of(cls, number: int, subject: str, event: TrialEvent, restarts: bool) -> Self:
        """The result of a trial."""
        return cls(
            number, subject, event.verdict, event.ratio, event.low, event.high, event.seconds, restarts
        )

    @property
    def way(self) -> str:
        """How it measured."""
        return "pairs of processes" if self.restarts else "one process"


def run(record: Path, count: int, resume: bool, one: Callable[[int], Null]) -> list[Null]:
    """`count` trials by `one`, which is called with their numbers; with `resume` only those not in the record."""
    if not resume:
        record.unlink(missing_ok=True)
    done = {null.number: null for null in read_lines(record, lambda line: Null(**json.loads(line)))}
    for number in range(count):
        if number in done:
            continue
        done[number] = null = one(number)
        append(record, json.dumps(asdict(null)))
        ratio = "" if null.ratio is None else f" {null.ratio:.3f}x"
        say(f"{number + 1:3} of {count}  {null.subject}, {null.way}: {null.verdict}{ratio}")
    return [done[number] for number in sorted(done) if number < count]


def tables(nulls: Sequence[Null], title: str) -> list[Table]:
    """A table for each way in which the trials measured."""
    ways = dict.fromkeys(null.way for null in nulls)
    return [table([null for null in nulls if null.way == way], f"{title}: {way}") for way in ways]


def table(nulls: Sequence[Null], title: str) -> Table:
    """Verdicts and intervals by subject and in total, and whether there are as many as promised."""
    found = Table(title, COLUMNS)
    for subject in (*dict.fromkeys(null.subject for null in nulls), None):
        found.add(subject or "all", *counts([null for null in nulls if subject in (None, null.subject)]))
    spans, rated = _spans(nulls), [null for null in nulls if null.ratio is not None and null.low is not None]
    called = sum(null.verdict in CALLS for null in rated)
    undecided = sum(null.verdict == "inconclusive" for null in nulls)
    inside = sum(low <= 1 <= high for low, high in spans)
    found.note(_rate("called faster or slower", called, len(rated), "at most", FALSE))
    found.note(_rate("intervals that contain 1", inside, len(spans), "at least", CONTAINED))
    found.note(_rate("inconclusive", undecided, len(nulls), "at most", UNDECIDED))
    odd = sum(null.verdict != judged(null.ratio, null.low, null.high) for null in rated)  # type: ignore[arg-type]
    found.note(f"{odd} verdicts do not follow from their interval" if odd else "")
    unrated = len(nulls) - len(rated)
    found.note(f"{unrated} trials have no ratio: they need more time" if unrated else "")
    return found


def _spans(nulls: Sequence[Null]) -> list[tuple[float, float]]:
    return [(null.low, null.high) for null in nulls if null.low is not None and null.high is not None]


def counts(nulls: Sequence[Null], truth: tuple[float, float] = (1.0, 1.0)) -> list[str]:
    """Verdicts, and how often the interval contains the truth, which is in this range."""
    calls = Counter(null.verdict for null in nulls)
    known = [calls[name] for name in VERDICTS]
    spans, ratios = _spans(nulls), [null.ratio for null in nulls if null.ratio is not None]
    inside = sum(low <= truth[1] and high >= truth[0] for low, high in spans)
    width = as_percent(median((high - low) / 2 for low, high in spans)) if spans else "n/a"
    seconds = f"{median(null.seconds for null in nulls):.0f}" if nulls else "n/a"
    told = map(str, (*known, len(nulls) - sum(known)))
    ends = [f"{end(ratios):.3f}x" for end in (min, max)] if ratios else []
    return [str(len(nulls)), f"{inside} of {len(spans)}", *told, width, seconds, *ends]


def _rate(what: str, hits: int, count: int, words: str, target: float) -> str:
    """A share with its interval against its target. words: "at least" or "at most"."""
    if not count:
        return ""
    low, high = binomial_interval(hits, count)
    share = hits / count
    reached = share >= target if words == "at least" else share <= target
    return (
        f"{what}: {hits} of {count} ({share:.1%}; exact binomial 95 % CI {low:.1%} … {high:.1%}); target: {words} "
        f"{target:.0%}: {'reached' if reached else 'not reached'}"
    )


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


# A change with an effect.

POWER_TITLE = "power: a planted 5 % of real work, in one process and in pairs of processes"
PLACE = f'workload.path=["{MODULE.parent}"]'
SETS = (PLACE, "run.epochs=100000", "run.threads=2", "run.device=cpu", "batch.micro=16")
CHANGE = ("run.threads=1",)
# The gain of the work, and the least that is left of it with the rest of a step.
MOST, LEAST = (UNITS + 1) / UNITS, 1 + 0.9 / UNITS


def power(options: Options) -> Table:
    """Is a planted 5 % of real work found? In one process that switches, and in pairs of processes, in turn.

    Tries `run.threads=1` with a workload that does a twentieth more of its work with two threads, and with its innocent
    twin. `--real N` trials of each (default: 4, of 60 s each: 16 minutes).
    """
    count, budget_s = options.real or options.repeats(4, 1), options.seconds(60.0, 20.0, least=2.0)
    table = Table(POWER_TITLE, ("planted", "measured", "trials", "contains the truth", *COLUMNS[3:]))
    found: dict[tuple[int, bool], list[Null]] = {}
    for number in range(count):
        for case in options.cases((more, restarts) for more in (1, 0) for restarts in (False, True)):
            more, restarts = case
            say(f"power: {number + 1} of {count}, {5 * more} %, {'pairs' if restarts else 'one process'}")
            sets = (*SETS, f"workload.options.more={more}")
            event = tried(f"{MODULE.stem}:gain", sets, CHANGE, budget_s, restarts)
            say(f"power: {event.text}")
            found.setdefault(case, []).append(Null.of(number, MODULE.stem, event, restarts))
    for (more, restarts), events in found.items():
        planted = "5 %" if more else "nothing"
        table.add(
            planted,
            "pairs" if restarts else "one process",
            *counts(events, (LEAST, MOST) if more else (1.0, 1.0)),
        )
    table.note(
        f"the truth with the planted work: {LEAST:g}x to {MOST:g}x, since a step does more than this work; "
        "without it 1x"
    )
    table.note(f"budget {budget_s:g} s; half-width and seconds: medians")
    return table
