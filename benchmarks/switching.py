"""Does one process that switches between both sides measure the same as pairs of processes?

`python -m benchmarks switching` measures changes with an effect both ways, in turn, and compares the ratios. What
repetitions in one process differ by beyond their intervals shows what those intervals lack.
"""

from __future__ import annotations

import threading
from statistics import stdev

from ndd_engine.trial.estimates import Estimate, estimate_of, joined, over, standard_error
from ndd_engine.trial.outcome import times, with_interval
from ndd_engine.trial.trial import run_trial
from ndd_engine.trial.trial_request import Base, TrialRequest

from .common import Options, Table, as_percent, say

TITLE = "changes measured in one process and in pairs of processes"
CASES = (
    ("chartext", ("workload.size=mini", "run.epochs=1000"), "run.threads=1"),
    ("chartext", ("workload.size=mini", "run.epochs=1000"), "precision.amp=bf16"),
    ("chartext", ("workload.size=mini", "run.epochs=1000"), "loader.workers=1"),
    ("eeg", ("run.epochs=1000",), "loader.fetch=item"),
    ("antispoof", ("run.epochs=1000",), "loader.workers=1"),
    ("finetune", ("run.epochs=1000",), "speed.attention=math"),
)


def measure(options: Options) -> list[Table]:
    """Every case both ways, several times."""
    columns = (
        "workload",
        "change",
        "one process",
        "pairs",
        "quotient",
        "agree",
        "repetitions differ by",
        "expected",
    )
    table = Table(TITLE, columns)
    rounds, budget_s = options.repeats(3, 1), options.seconds(60.0, 20.0, least=2.0)
    for workload, sets, change in options.cases(case for case in CASES if options.wants(case[0])):
        ways: tuple[list[Estimate], list[Estimate]] = ([], [])
        for turn in range(rounds):
            for restarts in (False, True) if turn % 2 == 0 else (True, False):
                say(f"switching: {workload}, {change}, {'pairs' if restarts else 'one process'}")
                request = TrialRequest(
                    Base(workload, None, workload, sets), (change,), budget_s, restarts=restarts
                )
                event = run_trial(request, lambda _: None, threading.Event())
                if (found := estimate_of(event)) is not None:
                    ways[restarts].append(found)
        table.add(workload, change, *_cells(*ways))
    table.note("quotient: one process over pairs, with its 95 % CI; they agree if it contains 1")
    table.note(
        "expected: what repetitions in one process would differ by if their intervals were complete (sd)"
    )
    return [table]


def _cells(together: list[Estimate], pairs: list[Estimate]) -> tuple[str, ...]:
    if not together or not pairs:
        return ("n/a",) * 6
    first, second = joined(together), joined(pairs)
    both = over(first, second)
    spread = as_percent(stdev(one.ratio for one in together) / first.ratio) if len(together) > 1 else "n/a"
    expected = as_percent((sum(standard_error(one) ** 2 for one in together) / len(together)) ** 0.5)
    agree = "yes" if both.low <= 1 <= both.high else "NO"
    return _shown(first), _shown(second), _shown(both), agree, spread, expected


def _shown(found: Estimate) -> str:
    return with_interval(f"{times(found.ratio)}x", 0.95, found.low, found.high, times)
