"""Does one process that switches between both sides measure the same as pairs of processes?

`python -m benchmarks switching` measures every key that one process switches and whose effect a processor can show,
both ways in turn, four times each: about an hour and a half. `--only KEY` limits it, `--pairs N` sets the number of
rounds. What repetitions in one process differ by beyond their intervals shows what those intervals lack.
"""

from __future__ import annotations

from statistics import stdev

from ndd_engine.record.events import TrialEvent
from ndd_engine.text import factor, times
from ndd_engine.trial.estimates import Estimate, estimate_of, joined, over, standard_error
from ndd_engine.trial.outcome import with_interval
from ndd_watch.changes import AROUND, LOADER, MODEL, switched_by

from .common import Options, Table, as_percent, say
from .engine import tried

TITLE = "changes measured in one process and in pairs of processes"
ENDLESS = "run.epochs=100000"
CHARTEXT = ("workload.size=mini", ENDLESS)
# key: (workload, settings of both sides, change).
CASES: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "run.threads": ("chartext", CHARTEXT, ("run.threads=1",)),
    "precision.amp": ("chartext", CHARTEXT, ("precision.amp=bf16",)),
    "speed.attention": ("finetune", (ENDLESS,), ("speed.attention=math",)),
    "run.gc_every_steps": ("chartext", CHARTEXT, ("run.gc_every_steps=1",)),
    "loader.fetch": ("eeg", (ENDLESS,), ("loader.fetch=item",)),
    "loader.workers": ("chartext", CHARTEXT, ("loader.workers=1",)),
    "loader.persistent": ("eeg", (ENDLESS, "loader.workers=1"), ("loader.persistent=false",)),
    "loader.prefetch": ("eeg", (ENDLESS, "loader.workers=1", "loader.prefetch=1"), ("loader.prefetch=8",)),
    "loader.in_order": ("eeg", (ENDLESS, "loader.workers=2"), ("loader.in_order=false",)),
    "log.every_steps": ("eeg", (ENDLESS, "log.every_steps=1000"), ("log.every_steps=1",)),
    "log.window_s": ("eeg", (ENDLESS,), ("log.window_s=0",)),
}
# Cases that --only knows.
ONLY = tuple(CASES)
_OF_A_GPU = "concerns copies to a GPU"
_NO_STEP = "no step of a trial depends on it"
# The other keys that one process switches.
NOT_SHOWN = {
    "loader.pin_memory": _OF_A_GPU,
    "loader.non_blocking": _OF_A_GPU,
    "precision.tf32": "concerns matrix products of a GPU",
    "loader.timeout_s": _NO_STEP,
    "log.profile_every_s": "a profiled step is part of no measurement",
    "log.headless_s": _NO_STEP,
    "console.refresh_hz": _NO_STEP,
    "console.on_hangup": _NO_STEP,
}
KEYS = switched_by(LOADER, MODEL, AROUND)


def measure(options: Options) -> list[Table]:
    """Every case both ways, several times."""
    columns = ("key", "workload", "change", "one process", "pairs", "quotient", "agree")
    table = Table(TITLE, (*columns, "repetitions differ by", "expected", "rounds"))
    rounds = options.pairs or options.repeats(4, 1)
    budget_s = options.seconds(60.0, 20.0, least=2.0)
    for key in options.wanted(CASES, str):
        workload, sets, change = CASES[key]
        ways: tuple[list[TrialEvent], list[TrialEvent]] = ([], [])
        for turn in range(rounds):
            for restarts in (False, True) if turn % 2 == 0 else (True, False):
                say(f"switching: {key}, {turn + 1} of {rounds}, {'pairs' if restarts else 'one process'}")
                event = tried(workload, sets, change, budget_s, restarts)
                say(f"switching: {event.text}")
                if event.ratio is not None:
                    ways[restarts].append(event)
        table.add(key, workload, " ".join(change), *cells(*ways), f"{len(ways[0])} and {len(ways[1])}")
    table.note("quotient: one process over pairs, with its 95 % CI; they agree if it contains 1")
    table.note(
        "expected: what repetitions in one process would differ by if their intervals were complete (sd)"
    )
    for key, why in NOT_SHOWN.items():
        table.note(f"not measured on a processor: {key}: {why}")
    return [table]


def cells(together: list[TrialEvent], pairs: list[TrialEvent]) -> tuple[str, ...]:
    """Of a case: both ratios, their quotient, whether they agree, and what repetitions differ by and should."""
    first, second = (estimate_of(joined(trials)) if trials else None for trials in (together, pairs))
    if first is None or second is None:
        return ("n/a",) * 6
    both = over(first, second)
    each = [found for one in together if (found := estimate_of(one)) is not None]
    spread = as_percent(stdev(one.ratio for one in each) / first.ratio) if len(each) > 1 else "n/a"
    expected = as_percent((sum(standard_error(one) ** 2 for one in each) / len(each)) ** 0.5)
    agree = "yes" if both.low <= 1 <= both.high else "NO"
    return _shown(first), _shown(second), _shown(both), agree, spread, expected


def _shown(found: Estimate) -> str:
    return with_interval(times(found.ratio), 0.95, found.low, found.high, factor)
