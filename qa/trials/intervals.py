"""Do the intervals of trials contain the truth? Simulated trials, and real trials of a change without effect.

`python -m benchmarks intervals` simulates: each noise model draws processes, blocks and drifts, and trials decide on
them as in reality. `--real N` adds N real A/A trials, spread over the five workloads, at the default budget: one round
of six in pairs of processes, the others in one process; with `--keep DIR` they can be interrupted and continued.

`python -m benchmarks coverage` fixes the number of pairs, and what a machine knows of its processes from earlier
trials. Its second table tells which share of trials without an effect stays inconclusive, by their budget.
"""

from __future__ import annotations

import math
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks.common import Options, Table, as_percent, say

from ndd_engine.trial.blocks import GOOD_ABBA, SHORT_S
from ndd_engine.trial.estimates import ENOUGH, Estimate, Replicates, Usual, pooled
from qa.faults.suite import without_effect

from . import nulls
from .nulls import UNDECIDED
from .simulated import MODELS, ORDERS, Course, Machine, Noise, ladder, rates, simulate, trial

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
    with tempfile.TemporaryDirectory(prefix="ndd-intervals-") as temporary:
        found = without_effect(Path(keep or temporary), count, bool(keep), DEFAULT_BUDGET_S, both=True)
    return nulls.tables(found, f"real A/A trials at {DEFAULT_BUDGET_S:g} s")


# Few pairs, and budgets.


COVERAGE_TITLE = "coverage: how often the 95 % interval of so many pairs of processes contains the truth"
EARLIER = (0, 5, 20)
PAIRS = range(1, ENOUGH + 1)
# Two cores of which others use a part: half-widths and inconclusive trials are those of the real A/A trials.
SHARED = "two shared cores"
NOISES = {**MODELS, SHARED: Noise(0.03, 0.04)}
SHARED_START_S = 8.0
BUDGETS_S = (60.0, 120.0, 240.0, 480.0, 960.0)
# Trials of one machine, which knows as much before each of them.
SAME_MACHINE = 20


def coverage(options: Options) -> list[Table]:
    """Both tables."""
    count = options.repeats(1000, 100, 20)
    return [_coverage(options, count), _budgets(options, options.repeats(300, 60, 10))]


def _coverage(options: Options, count: int) -> Table:
    columns = [
        f"{pairs} of {earlier}" for pairs in PAIRS for earlier in EARLIER if pairs < ENOUGH or not earlier
    ]
    table = Table(COVERAGE_TITLE, ("noise (sd of a pair of processes, of a block)", *columns))
    for name in options.cases(NOISES):
        say(f"coverage: {name}")
        cells = []
        for pairs in PAIRS:
            for earlier in EARLIER if pairs < ENOUGH else (0,):
                found = few_pairs(NOISES[name], pairs, earlier, count)
                inside = sum(one.low <= 1 <= one.high for one in found) / count
                width = median(math.log(one.high / one.low) / 2 for one in found)
                cells.append(f"{inside * 100:.1f} % (±{width * 100:.1f} %)")
        table.add(name, *cells)
    usual = Usual()
    table.note(
        f"2 of 5: two pairs of {GOOD_ABBA} blocks, after 5 earlier trials; in brackets the median half-width"
    )
    table.note(
        f"the default of the usual difference is {as_percent(usual.sd)} with {usual.df:g} degrees of freedom; each "
        f"value is from {count:,} trials"
    )
    return table


def few_pairs(noise: Noise, pairs: int, earlier: int, count: int, seed: int = 5) -> list[Estimate]:
    """`count` intervals of trials without an effect. earlier: trials from which a machine knows its processes."""
    source, found, usual = random.Random(seed), [], Usual()
    for number in range(count):
        if number % SAME_MACHINE == 0 and earlier:
            known = (trial(Machine(noise, 1.0, source), Course(start_s=3.0)).between for _ in range(earlier))
            usual = pooled([one for one in known if one is not None])
        machine, replicates = Machine(noise, 1.0, source), Replicates(usual, True)
        for pair in range(pairs):
            replicates.begin()
            machine.start()
            for _ in range(GOOD_ABBA):
                replicates.add(machine.block(ORDERS[pair % 2], SHORT_S))
        estimated = replicates.estimate()
        assert estimated is not None
        found.append(estimated)
    return found


def _budgets(options: Options, count: int) -> Table:
    columns = ("noise", "measured", *(f"{seconds:g} s" for seconds in BUDGETS_S), "decides")
    table = Table("budgets: share of trials without an effect that stay inconclusive", columns)
    for name in options.cases(NOISES):
        for switched in (True, False):
            say(f"coverage: budgets, {name}, {'one process' if switched else 'pairs'}")
            shares: list[float] = []
            for seconds in BUDGETS_S:
                if shares and shares[-1] == 0:
                    shares.append(0.0)
                    continue
                course = Course(seconds, SHARED_START_S if name == SHARED else 3.5)
                # Long trials in one process have thousands of blocks.
                trials = max(round(count * BUDGETS_S[0] / seconds), 20) if switched else count
                found = rates(simulate(NOISES[name], 1.0, trials, course, switched=switched))
                shares.append(found["inconclusive"])
            enough = (
                f"{seconds:g} s"
                for seconds, share in zip(BUDGETS_S, shares, strict=True)
                if share <= UNDECIDED
            )
            way = "one process" if switched else "pairs"
            table.add(name, way, *map(as_percent, shares), next(enough, f"more than {BUDGETS_S[-1]:g} s"))
    table.note(f"decides: the smallest of these budgets with at most {UNDECIDED:.0%} inconclusive")
    table.note(f"starting a pair takes 3.5 s, on {SHARED} {SHARED_START_S:g} s")
    return table
