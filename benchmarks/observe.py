"""What observing a script costs: each step as it is observed over steps without, in one process.

Steps with the hooks in place, timed by phase or as a whole, and steps without hooks follow one another in random order,
so that all meet the same neighbours on a shared machine. A process of its own for every length of a step.
`--traceml PYTHON` adds whole runs, also under traceml: see `whole_runs`.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from ndd_engine.script.records import Records
from ndd_engine.script.script_run import POLL_S
from ndd_watch import FOLDER, SITE

from . import whole_runs
from .common import Options, Table, say

TITLE = "observe: microseconds of the processor that a step takes longer with the observer, and the wall time of all"
COLUMNS = (
    "step", "timed as a whole", "timed by phase", "without, again", "by phase", "besides",
    "on average", "wall time", "target",
)  # fmt: skip
# Milliseconds of a step, rounds of four steps, the highest overhead of the wall time.
CASES = ((1.0, 8000, 0.02), (5.0, 6000, 0.01), (44.0, 1000, 0.01))
# Seconds of the usual observation, of which one step is profiled every 30 s.
USUAL_S = 30.0
# Seconds of observed training before.
WARM_S = 2.0
CLOSING = "observe: windows vs. a clock that the observer does not read, at the ends of the same steps"
CLOSING_COLUMNS = ("step", "windows", "clock", "sum of the windows", "phases off by, ns", "target", "")
# How close the windows have to come.
CLOSE = 0.005
_LOOP = Path(__file__).with_name("observed_loop.py")


def measure(options: Options) -> list[Table]:
    """All lengths of a step."""
    table = Table(TITLE, COLUMNS)
    for step_ms, rounds, limit in options.cases(CASES):
        say(f"observe: steps of {step_ms:g} ms")
        count = options.repeats(rounds, rounds // 20, 20)
        body, _ = _observed(options, step_ms, "steps", count, options.seconds(USUAL_S, USUAL_S))
        table.add(*_row(body, limit))
    table.note("95 % intervals of medians")
    table.note("by phase: how often the observer times a step so")
    table.note(
        "besides: ends of windows and closer looks, which are part of the average and of the wall time"
    )
    table.note("one step in 30 s runs under a profiler; what that slows it down is in none of the figures")
    tables = [table, _closing(options)]
    return [*tables, whole_runs.measure(options)] if options.traceml else tables


def _closing(options: Options) -> Table:
    """Do windows add up to the time that another clock shows?"""
    table = Table(CLOSING, CLOSING_COLUMNS)
    seconds = options.seconds(20.0, 5.0, least=1.0)
    for step_ms, *_ in options.cases(CASES):
        say(f"observe: windows of steps of {step_ms:g} ms")
        body, windows = _observed(options, step_ms, "ends", seconds)
        ends = {int(step): end for step, end in body["ends"].items()}
        known = [line for line in windows if line["step"] in ends]
        outside = ends[known[-1]["step"]] - ends[known[0]["step"]]
        inside = sum(line["wall_ns"] for line in known[1:]) / 1e9
        off = inside / outside - 1
        table.add(
            f"{body['step_s'] * 1e3:.2f} ms", str(len(known) - 1), f"{outside:.3f} s", f"{off * 100:+.4f} %",
            str(_off(known)), "within 0.5 %", "reached" if abs(off) <= CLOSE else "not reached",
        )  # fmt: skip
    return table


@dataclass(frozen=True)
class Cost:
    """A median with its 95 % interval, in microseconds."""

    low: float
    median: float
    high: float

    def times(self, factor: float, plus: float = 0.0) -> Cost:
        """Multiplied, and shifted."""
        return Cost(*(value * factor + plus for value in (self.low, self.median, self.high)))

    def verdict(self, limit: float) -> str:
        """Whether it is at most so much."""
        return "reached" if self.high <= limit else "not reached" if self.low > limit else "within the noise"


def cost(differences_ns: Sequence[float]) -> Cost:
    """The median, and its interval from order statistics."""
    ordered = sorted(value / 1e3 for value in differences_ns)
    aside = max(int(len(ordered) / 2 - 0.98 * math.sqrt(len(ordered))), 0)
    return Cost(ordered[aside], median(ordered), ordered[-1 - aside])


def _row(body: dict[str, Any], limit: float) -> tuple[str, ...]:
    wall, used = (_costs(body, which) for which in (0, 1))
    step_us = body["step_s"] * 1e6
    besides = body["besides"]
    average = used["average"].times(1, besides * step_us)
    whole = wall["average"].times(1 / step_us, besides)
    return (
        f"{body['step_s'] * 1e3:.2f} ms",
        *(_shown(used[kind]) for kind in ("untimed", "timed", "again")),
        f"1 of {body['every']}", f"{besides:.3%}",
        _shown(average),
        f"{whole.median:+.2%} ({whole.low * 100:+.2f} to {whole.high * 100:+.2f})",
        f"at most {limit:.0%}: {whole.verdict(limit)}",
    )  # fmt: skip


def _costs(body: dict[str, Any], which: int) -> dict[str, Cost]:
    """By kind of step, over steps without hooks. which: of the clocks, 0 for the wall time.

    average: of the steps as the observer times them.
    """
    part = 1 / body["every"]
    rounds = [{kind: each[kind][which] for kind in each} for each in body["steps"]]
    for each in rounds:
        each["average"] = (1 - part) * each["untimed"] + part * each["timed"]
    return {
        kind: cost([each[kind] - each["without"] for each in rounds])
        for kind in ("untimed", "timed", "again", "average")
    }


def _shown(found: Cost) -> str:
    return f"{found.median:+.1f} ({found.low:+.1f} to {found.high:+.1f})"


def _off(windows: list[dict[str, Any]]) -> int:
    return max(
        abs(
            sum(phase["host_ns"] for name, phase in line["phases"].items() if "/" not in name)
            - line["wall_ns"]
        )
        for line in windows
    )


def _observed(
    options: Options, step_ms: float, *words: object
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What the loop prints with these arguments, and the windows of the observer. Raises RuntimeError without any."""
    with tempfile.TemporaryDirectory(prefix="ndd-observe-") as folder:
        more = {FOLDER: folder, "PYTHONPATH": str(SITE), "OMP_NUM_THREADS": "1"}
        warm_s = options.seconds(WARM_S, WARM_S, least=0.5)
        command = [sys.executable, _LOOP, step_ms, warm_s, *words]
        if options.smoke:
            more["NDD_WATCH_WINDOW_S"] = "0.1"
        records, lines = Records(Path(folder)), []
        with tempfile.TemporaryFile("w+") as out:
            running = subprocess.Popen([*map(str, command)], env={**os.environ, **more}, stdout=out)
            while running.poll() is None:
                time.sleep(POLL_S)
                lines += records.new()
            lines += records.new(final=True)
            out.seek(0)
            printed = out.read().splitlines()
    windows = [line for _, line in lines if line["type"] == "window"]
    if running.returncode or not windows:
        raise RuntimeError("nothing was observed")
    body: dict[str, Any] = json.loads(printed[-1])
    return body, windows
