"""What observing a script costs: steps with the observer's hooks over steps without them, in one process.

Blocks alternate (A B B A B A A B); a process of its own for every length of a step. Blocks are short, so that both
sides of a pair meet the same neighbours on a shared machine. Wall time and processor time.
`--traceml PYTHON` adds whole runs, also under traceml: see `whole_runs`.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ndd_watch import FOLDER, SITE

from . import whole_runs
from .common import Options, Summary, Table, say, summarise

TITLE = "observe: steps of a script with the observer / without, hooks switched in one process"
COLUMNS = (
    "step", "pairs", "wall time", "95 % CI", "processor time a step", "95 % CI",
    "phases timed", "windows off by", "target", "",
)  # fmt: skip
# Milliseconds of a step, whether every step is timed by phase however short it is, the highest overhead, and the most
# microseconds of processor time a step.
CASES = (
    (1.0, False, 0.02, 18.0),
    (1.0, True, None, 30.0),
    (5.0, False, 0.01, 30.0),
    (44.0, False, 0.01, 30.0),
)
# Rounds of eight blocks, and seconds of a block.
ROUNDS = {1.0: 300, 5.0: 240, 44.0: 60}
QUICK = 8
BLOCK_S = 0.06
CLOSING = "observe: windows vs. a clock that the observer does not read, at the ends of the same steps"
CLOSING_COLUMNS = ("step", "windows", "clock", "sum of the windows", "phases off by, ns", "target", "")
# Seconds of training, and how close the windows have to come.
CLOSING_S, QUICK_S, CLOSE = 20.0, 5.0, 0.005
_LOOP = Path(__file__).with_name("observed_loop.py")


def measure(options: Options) -> list[Table]:
    """All lengths of a step."""
    table = Table(TITLE, COLUMNS)
    for step_ms, full, limit, limit_us in CASES:
        say(f"observe: steps of {step_ms:g} ms{', all timed by phase' * full}")
        body, off = run(step_ms, QUICK if options.quick else ROUNDS[step_ms], full)
        table.add(*_row(body, off, limit, limit_us))
    table.note(
        "phases timed: every n-th step; windows off by: the largest difference of a window from its phases, in ns"
    )
    tables = [table, _closing(QUICK_S if options.quick else CLOSING_S)]
    return [*tables, whole_runs.measure(options)] if options.traceml else tables


def _closing(seconds: float) -> Table:
    """Do windows add up to the time that another clock shows?"""
    table = Table(CLOSING, CLOSING_COLUMNS)
    for step_ms in ROUNDS:
        say(f"observe: windows of steps of {step_ms:g} ms")
        body, windows = _observed(str(step_ms), "0", str(seconds), NDD_WATCH_WINDOW_S="1")
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


def _row(body: dict[str, Any], off: int, limit: float | None, limit_us: float) -> tuple[str, ...]:
    ratios, used = [], []
    for blocks in body["rounds"]:
        for half in (blocks[:4], blocks[4:]):
            by_side: dict[int, list[tuple[float, float]]] = {0: [], 1: []}
            for on, wall_s, used_s in half:
                by_side[on].append((wall_s, used_s))
            without, with_hooks = by_side[0], by_side[1]
            ratios.append(
                math.exp(sum(math.log(b[0] / a[0]) for a, b in zip(without, with_hooks, strict=True)) / 2)
            )
            used.append(sum(b[1] - a[1] for a, b in zip(without, with_hooks, strict=True)) / 2)
    found, cost = summarise(ratios), summarise([value * 1e6 for value in used])
    target = f"at most {limit_us:g} us" if limit is None else f"at most {limit * 100:g} %, {limit_us:g} us"
    verdicts = [] if limit is None else [_verdict(found, 1 + limit)]
    return (
        f"{body['step_s'] * 1e3:.2f} ms", str(len(ratios)), f"{(found.median - 1) * 100:+.2f} %",
        _within(found, lambda value: f"{(value - 1) * 100:+.2f}", " %"), f"{cost.median:+.1f} us",
        _within(cost, lambda value: f"{value:+.1f}", " us"), f"1 of {body['every']}", str(off), target,
        ", ".join([*verdicts, _verdict(cost, limit_us)]),
    )  # fmt: skip


def _within(found: Summary, shown: Callable[[float], str], unit: str) -> str:
    low, high = found.interval or (math.nan, math.nan)
    return f"{shown(low)} to {shown(high)}{unit}"


def _verdict(found: Summary, limit: float) -> str:
    low, high = found.interval or (math.nan, math.nan)
    return "reached" if high <= limit else "not reached" if low > limit else "within the noise"


def run(step_ms: float, rounds: int, full: bool) -> tuple[dict[str, Any], int]:
    """(what the loop measured, the largest difference of a window from the sum of its phases in nanoseconds)."""
    more = {"NDD_WATCH_SHARE": "0"} if full else {}
    body, windows = _observed(str(step_ms), str(rounds), str(BLOCK_S), NDD_WATCH_WINDOW_S="0.25", **more)
    return body, _off(windows)


def _off(windows: list[dict[str, Any]]) -> int:
    return max(
        abs(sum(phase["host_ns"] for phase in line["phases"].values()) - line["wall_ns"]) for line in windows
    )


def _observed(*words: str, **settings: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What the loop prints with these arguments, and the windows of the observer. Raises RuntimeError without any."""
    with tempfile.TemporaryDirectory(prefix="ndd-observe-") as folder:
        more = {FOLDER: folder, "PYTHONPATH": str(SITE), "OMP_NUM_THREADS": "1", **settings}
        done = subprocess.run(
            [sys.executable, str(_LOOP), *words], env={**os.environ, **more}, capture_output=True, text=True, check=True
        )  # fmt: skip
        windows = [
            line
            for path in Path(folder).glob("*.jsonl")
            for line in map(json.loads, path.read_text().splitlines())
            if line["type"] == "window"
        ]
    if not windows:
        raise RuntimeError("nothing was observed")
    body: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return body, windows
