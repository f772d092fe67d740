"""How small a slowdown is named: trends laid over the step times of real runs, with what else makes steps slower.

The step times are those that the observer has recorded of five scripts, see `qa.faults.step_times`. A series is made
of pieces of one recording, and has a part that warms up, evaluations, and another program that comes and goes.

With `--real N`, also N real runs that become slower at each of two rates, and twice as many that do not.
"""

from __future__ import annotations

import random
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from qa.faults import step_times
from qa.faults.script_cases import SLOWING
from qa.faults.script_faults import observe

from ndd_engine.diagnose.pace_rules import CLEAR, slowdown, unexplained
from ndd_engine.record.events import WindowEvent
from ndd_engine.record.snapshot import Pace

from .common import Options, Table, quantile, say

TITLE = "trend: the smallest slowdown that is named"
RATES = (0.0, 0.5, 2.0, 5.0, 10.0)  # percent a minute
MINUTES = (3, 15)
SERIES = 200
# Windows that stay together in a series.
PIECE = (8, 30)
# Windows, on average, from one visit of another program to the next, and of a visit; by how much it slows steps down.
AWAY, VISIT, SLOWER = 60.0, 25.0, 0.5
NAMED, FALSE = 0.95, 0.01
STEPS = 50  # of a window
# Of real runs: percent a minute, and seconds of each.
REAL_RATES, REAL_S = (2.0, 10.0), 900.0
PHASES = {
    "data_wait": 0.05,
    "forward": 0.3,
    "backward": 0.5,
    "optimizer": 0.1,
    "other": 0.05,
}  # shares of a step


def measure(options: Options) -> list[Table]:
    """Named slowdowns by rate and minutes, for each recording."""
    runs = step_times.recorded()
    recorded = {name: runs[name] for name in options.cases(runs)}
    table = Table(TITLE, ("step", "minutes", *(f"{rate:g} % a minute" for rate in RATES), "smallest"))
    count = options.repeats(SERIES, 40, 4)
    accused = flat = 0
    for name, times in recorded.items():
        for minutes in options.cases(MINUTES):
            say(f"trend: {name}, {minutes} minutes")
            chance = random.Random(f"{name} {minutes}")
            named = {rate: _named(chance, times, minutes * 60, rate, count) for rate in RATES}
            missed = [rate for rate in RATES if named[rate] < NAMED * count]
            smallest = next((rate for rate in RATES if rate > missed[-1]), None)
            table.add(
                f"{name} ({median(times) / 1e6:.2g} ms)", str(minutes),
                *(f"{named[rate] / count:.1%}" for rate in RATES), "" if smallest is None else f"{smallest:g} %",
            )  # fmt: skip
            accused, flat = accused + named[0.0], flat + count
    verdict = "" if accused <= FALSE * flat else " TOO MANY"
    table.note(f"{count} series a cell; flat ones that were named: {accused} of {flat}{verdict}")
    spread = ", ".join(f"{name} {_spread(times):.0%}" for name, times in recorded.items())
    table.note(f"recorded steps vary (95th over 5th percentile of the windows, less 1) by {spread}")
    return [table, *([_real(options)] if options.real else [])]


def _real(options: Options) -> Table:
    """Real runs of a script whose steps take longer with each minute, by a rate or not at all."""
    table = Table("trend: real runs", ("percent a minute", "runs", "called slower"))
    seconds = options.seconds(REAL_S, REAL_S / 4, least=1.5)
    for rate, runs in ((0.0, 2 * options.real), *((rate, options.real) for rate in REAL_RATES)):
        named = 0
        for number in range(runs):
            say(f"trend: {rate:g} % a minute, real run {number + 1} of {runs}")
            with TemporaryDirectory(prefix="ndd-trend-") as folder:
                found = observe(Path(folder), SLOWING, "drifts", f"{rate:g}", seconds=seconds)
            named += any(finding["cause"] == "slowing" for finding in found)
        table.add(f"{rate:g}", str(runs), str(named))
    table.note(f"each trains for {seconds:.0f} s")
    return table


def _named(chance: random.Random, times: list[float], windows: int, rate: float, count: int) -> int:
    """In how many of so many series the slowdown is named by its times alone."""
    named = 0
    for _ in range(count):
        pace = Pace()
        for index, ns in enumerate(series(chance, times, windows, rate)):
            pace.add(_window(index, round(ns)), index + 1.0)
        found = slowdown(pace.view())
        at_once = found is not None and found.since is not None and unexplained(found, None)
        named += found is not None and (found.bounds is CLEAR or at_once)
    return named


def series(chance: random.Random, times: list[float], windows: int, rate: float) -> list[float]:
    """The step times of a run. rate: by how many percent of the beginning they grow in a minute."""
    found: list[float] = []
    while len(found) < windows:
        length = min(chance.randint(*PIECE), len(times))
        begin = chance.randrange(len(times) - length + 1)
        found += times[begin : begin + length]
    found = found[:windows]
    at = chance.expovariate(1 / AWAY)
    while at < windows:
        until, factor = at + chance.expovariate(1 / VISIT), 1 + SLOWER * chance.random()
        for index in range(int(at), min(int(until), windows)):
            found[index] *= factor
        at = until + chance.expovariate(1 / AWAY)
    for index in range(4):
        found[index] *= 1 + 1.5 * 0.4**index
    every = chance.randint(20, 80)
    for index in range(every, windows, every):
        found[index] *= 1 + 0.6 * chance.random()
    return [ns * (1 + rate / 100 * index / 60) for index, ns in enumerate(found)]


def _window(index: int, ns: int) -> WindowEvent:
    step = STEPS * (index + 1)
    phases = {name: {"host_ns": round(share * ns * STEPS)} for name, share in PHASES.items()}
    return WindowEvent(step, 0, step, STEPS, STEPS, 0, 0, ns * STEPS, ns, ns, ns, phases)


def _spread(values: list[float]) -> float:
    return quantile(values, 0.95) / quantile(values, 0.05) - 1
