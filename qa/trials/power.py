"""Is a planted 5 % of real work found? In one process that switches, and in pairs of processes.

`python -m benchmarks power` tries `run.threads=1` with a workload that does a twentieth more of its work with two
threads, and with its innocent twin. `--real N` trials of each (default: 4, of 60 s each: 16 minutes).
"""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from statistics import median

from benchmarks.common import Options, Table, as_percent, say

from ndd_engine.record.events import TrialEvent
from ndd_engine.trial.outcome import Base, TrialRequest
from ndd_engine.trial.trial import run_trial
from qa.scripts.planted_gain import UNITS

TITLE = "power: a planted 5 % of real work, in one process and in pairs of processes"
FOLDER = Path(__file__).parents[1] / "scripts"
SETS = (
    f'workload.path=["{FOLDER}"]',
    "run.epochs=100000",
    "run.threads=2",
    "run.device=cpu",
    "batch.micro=16",
)
CHANGE = ("run.threads=1",)
# The gain of the work, and the least that is left of it with the rest of a step.
MOST, LEAST = (UNITS + 1) / UNITS, 1 + 0.9 / UNITS


def measure(options: Options) -> Table:
    """Every way, with and without the planted work, in turn."""
    count, budget_s = options.real or options.repeats(4, 1), options.seconds(60.0, 20.0, least=2.0)
    columns = ("planted", "measured", "trials", "faster", "no difference", "slower", "inconclusive", "other")
    table = Table(TITLE, (*columns, "contains the truth", "ratio", "half-width", "seconds"))
    found: dict[tuple[str, bool], list[TrialEvent]] = {}
    for number in range(count):
        for case in options.cases(
            (name, restarts) for name in ("factory", "innocent") for restarts in (False, True)
        ):
            name, restarts = case
            say(f"power: {number + 1} of {count}, {name}, {'pairs' if restarts else 'one process'}")
            base = Base(name, None, f"planted_gain:{name}", SETS)
            request = TrialRequest(base, CHANGE, budget_s, restarts=restarts)
            event = run_trial(request, lambda _: None, threading.Event())
            say(f"power: {event.text}")
            found.setdefault(case, []).append(event)
    for (name, restarts), events in found.items():
        planted = name == "factory"
        table.add(
            "5 %" if planted else "nothing", "pairs" if restarts else "one process", *cells(events, planted)
        )
    table.note(
        f"the truth with the planted work: {LEAST:g}x to {MOST:g}x, since a step does more than this work; "
        "without it 1x"
    )
    table.note(f"budget {budget_s:g} s; ratio, half-width and seconds: medians")
    return table


def cells(events: list[TrialEvent], planted: bool) -> list[str]:
    """Verdicts, and how often the interval contains the truth."""
    calls = Counter(event.verdict for event in events)
    known = [calls[name] for name in ("faster", "no difference", "slower", "inconclusive")]
    least, most = (LEAST, MOST) if planted else (1.0, 1.0)
    spans = [
        (event.ratio, event.low, event.high)
        for event in events
        if event.ratio is not None and event.low is not None and event.high is not None
    ]
    inside = sum(low <= most and high >= least for _, low, high in spans)
    figures = ["n/a"] * 2
    if spans:
        width = median((high - low) / 2 for _, low, high in spans)
        figures = [f"{median(ratio for ratio, _, _ in spans):.3f}x", as_percent(width)]
    seconds = f"{median(event.seconds for event in events):.0f}"
    counts = map(str, (len(events), *known, len(events) - sum(known)))
    return [*counts, f"{inside} of {len(spans)}", *figures, seconds]
