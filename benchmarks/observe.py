"""What observing a script costs: steps with the observer's hooks over steps without them, in one process.

Blocks alternate (A B B A B A A B); a process of its own for every length of a step. Wall time and processor time.
`--traceml PYTHON` adds whole runs, also under traceml: see `whole_runs`.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from ndd_watch import FOLDER, SITE

from . import whole_runs
from .common import Options, Table, say, summarise

TITLE = "observe: steps of a script with the observer / without, hooks switched in one process"
COLUMNS = (
    "step", "blocks", "wall time", "95 % CI", "processor time a step", "phases timed", "windows off by", "target", "",
)  # fmt: skip
# Milliseconds of a step -> the highest overhead.
CASES = {1.0: 0.02, 5.0: 0.01, 44.0: 0.01}
BLOCKS, QUICK = 30, 4
BLOCK_S = 0.4
_LOOP = Path(__file__).with_name("observed_loop.py")


def measure(options: Options) -> list[Table]:
    """All lengths of a step."""
    table = Table(TITLE, COLUMNS)
    for step_ms, limit in CASES.items():
        say(f"observe: steps of {step_ms:g} ms")
        table.add(*_row(step_ms, limit, QUICK if options.quick else BLOCKS))
    table.note(
        "phases timed: every n-th step; windows off by: the largest difference of a window from its phases, in ns"
    )
    return [table, whole_runs.measure(options)] if options.traceml else [table]


def _row(step_ms: float, limit: float, blocks: int) -> tuple[str, ...]:
    body, off = run(step_ms, blocks)
    ratios, used = [], []
    for block in body["blocks"]:
        for half in (block[:4], block[4:]):
            by_side: dict[int, list[tuple[float, float]]] = {0: [], 1: []}
            for on, wall_s, used_s in half:
                by_side[on].append((wall_s, used_s))
            without, with_hooks = by_side[0], by_side[1]
            ratios.append(
                math.exp(sum(math.log(b[0] / a[0]) for a, b in zip(without, with_hooks, strict=True)) / 2)
            )
            used.append(sum(b[1] - a[1] for a, b in zip(without, with_hooks, strict=True)) / 2)
    found = summarise(ratios)
    low, high = found.interval or (math.nan, math.nan)
    verdict = "reached" if high <= 1 + limit else "not reached" if low > 1 + limit else "within the noise"
    return (
        f"{body['step_s'] * 1e3:.2f} ms", str(len(ratios)), f"{(found.median - 1) * 100:+.2f} %",
        f"{(low - 1) * 100:+.2f} to {(high - 1) * 100:+.2f} %", f"{median(used) * 1e6:+.1f} us",
        f"1 of {body['every']}", str(off), f"at most {limit * 100:g} %", verdict,
    )  # fmt: skip


def run(step_ms: float, blocks: int) -> tuple[dict[str, Any], int]:
    """(what the loop measured, the largest difference of a window from the sum of its phases in nanoseconds)."""
    with tempfile.TemporaryDirectory(prefix="ndd-observe-") as folder:
        # Windows shorter than a block: how often steps are timed by phase is decided at their ends.
        more = {FOLDER: folder, "PYTHONPATH": str(SITE), "OMP_NUM_THREADS": "1", "NDD_WATCH_WINDOW_S": "0.25"}
        done = subprocess.run(
            [sys.executable, str(_LOOP), str(step_ms), str(blocks), str(BLOCK_S)], env={**os.environ, **more},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        windows = [
            line
            for path in Path(folder).glob("*.jsonl")
            for line in map(json.loads, path.read_text().splitlines())
            if line["type"] == "window"
        ]
    if not windows:
        raise RuntimeError("nothing was observed")
    off = max(
        abs(sum(phase["host_ns"] for phase in line["phases"].values()) - line["wall_ns"]) for line in windows
    )
    body: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return body, off
