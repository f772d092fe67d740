"""Do the intervals of trials contain the truth? Simulated trials, and real trials of a change without effect.

`python -m benchmarks intervals` simulates: each noise model draws processes, blocks and drifts, and trials decide on
them as in reality. `--real N` adds N real A/A trials, spread over the five workloads, at the default budget: one round
of six in pairs of processes, the others in one process; with `--keep DIR` they can be interrupted and continued.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.common import Options, Table, as_percent, say

from qa.faults.null import run

from . import nulls
from .simulated import MODELS, Course, ladder, rates, simulate

TITLE = "intervals: how often the 95 % interval of a trial contains the truth (simulated, 60 s)"
COLUMNS = (
    "noise (sd of a pair of processes, of a block)",
    "trials",
    "contains truth",
    "A/A called",
    "A/A inconclusive",
    "5 % called",
    "pairs",
    "seconds",
    "target 93-97 %",
)
GAIN = 1.05
LOW, HIGH = 0.93, 0.97
# Starts of a pair: as of the built-in workloads on a quiet CPU, and expensive ones, where few pairs fit.
CHEAP, DEAR = Course(start_s=3.5), Course(start_s=25.0)
# One process is prepared, and warms up both sides.
TOGETHER = Course(start_s=6.0)
SETTINGS = 20
DEFAULT_BUDGET_S = 60.0


def measure(options: Options) -> list[Table]:
    """The simulation, and real trials if asked for."""
    count, models = options.repeats(2000, 200, 20), options.cases(MODELS)
    found = [
        _simulated(models, TOGETHER, count, 0, switched=True),
        _simulated(models, CHEAP, count, 0),
        _simulated(models, DEAR, count, 5),
        _tuning(models, options.repeats(400, 40, 4)),
    ]
    if options.real:
        found += _real(options.real, options.keep)
    return found


def _simulated(
    models: Sequence[str], course: Course, count: int, earlier: int, switched: bool = False
) -> Table:
    title = f"{TITLE}: pairs of processes"
    if switched:
        title = f"{TITLE}: one process that switches between both sides"
    elif earlier:
        title = f"few pairs: starting a pair takes {course.start_s:g} s, compilation for example"
    table = Table(title, COLUMNS)
    for name in models:
        noise = MODELS[name]
        say(f"intervals: {name}, {course.start_s:g} s per start")
        null = rates(simulate(noise, 1.0, count, course, earlier=earlier, switched=switched))
        gain = rates(simulate(noise, GAIN, count, course, seed=14, earlier=earlier, switched=switched))
        covered = (null["covered"] + gain["covered"]) / 2
        shares = (covered, null["faster"] + null["slower"], null["inconclusive"], gain["faster"])
        verdict = "reached" if LOW <= covered <= HIGH else "above" if covered > HIGH else "below"
        cells = (f"{null['pairs']:.1f}", f"{null['seconds']:.0f}", verdict)
        table.add(name, f"{2 * count:,}", *map(as_percent, shares), *cells)
    starts = "preparing the process" if switched else "starting a pair of processes"
    table.note(f"{starts} takes {course.start_s:g} s; half of the trials have a gain of 5 %")
    if earlier:
        table.note(f"the difference between processes is known from {earlier} earlier trials and the default")
    return table


def _tuning(models: Sequence[str], count: int) -> Table:
    table = Table(
        f"tuning: {SETTINGS} settings without effect", ("noise", "repetitions", "none kept", "target", "")
    )
    for name in models:
        noise = MODELS[name]
        say(f"intervals: tuning, {name}")
        clean = sum(ladder(noise, SETTINGS, random.Random(seed), CHEAP) == 0 for seed in range(count)) / count
        table.add(
            name, str(count), as_percent(clean), "≥ 95 %", "reached" if clean >= 0.95 else "not reached"
        )
    return table


def _real(count: int, keep: str) -> list[Table]:
    with ExitStack() as stack:
        folder = Path(keep or stack.enter_context(tempfile.TemporaryDirectory(prefix="ndd-intervals-")))
        found = run(folder, count, bool(keep), DEFAULT_BUDGET_S, both=True)
    return nulls.tables(found, f"real A/A trials at {DEFAULT_BUDGET_S:g} s")
