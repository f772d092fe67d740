"""Is a planted 5 % of real work found? In one process that switches, and in pairs of processes.

`python -m benchmarks power` tries `run.threads=1` with a workload that does a twentieth more of its work with two
threads, and with its innocent twin. `--real N` trials of each (default: 4, of 60 s each: 16 minutes).
"""

from __future__ import annotations

from benchmarks.common import Options, Table, say
from benchmarks.engine import tried

from qa.faults.cases import MODULE
from qa.scripts.planted_models import UNITS

from .nulls import COLUMNS, Null, counts

TITLE = "power: a planted 5 % of real work, in one process and in pairs of processes"
PLACE = f'workload.path=["{MODULE.parent}"]'
SETS = (PLACE, "run.epochs=100000", "run.threads=2", "run.device=cpu", "batch.micro=16")
CHANGE = ("run.threads=1",)
# The gain of the work, and the least that is left of it with the rest of a step.
MOST, LEAST = (UNITS + 1) / UNITS, 1 + 0.9 / UNITS


def measure(options: Options) -> Table:
    """Every way, with and without the planted work, in turn."""
    count, budget_s = options.real or options.repeats(4, 1), options.seconds(60.0, 20.0, least=2.0)
    table = Table(TITLE, ("planted", "measured", "trials", "contains the truth", *COLUMNS[3:]))
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
