"""Two ranks of the engine vs. a plain loop over DistributedDataParallel: what recording on every rank costs.

In a pair of processes (see `ranks_worker`), blocks of about 60 steps and more alternate in the order A B B A. The
engine's blocks include the votes, the windows of all ranks and their fold, the recorders, the sampler of rank 0 and the
hang watch; evaluation and checkpoints are off. The plain loop reads the loss every 10 steps.

Where in memory a process has its two models makes one of them up to 1.5 % faster as long as it lives. So the processes
start several times: a row has the medians of the starts.

Times are from the call of the model in one step to that in a later one. So the beginning of a block, at which the order
of an epoch is drawn, and its end, at which all ranks meet, do not count: a run has neither every few seconds. Nor does
the step that Python's profiler sees every 30 s.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from .common import (
    STATISTICS,
    LoadWatch,
    Options,
    Table,
    Target,
    as_ratio,
    say,
    statistics_cells,
)
from .engine import ONLY_STEPS

TITLE = "ranks_loop: two ranks of the engine / plain loop with DDP (steps per second; medians of starts)"
TARGET = Target(0.99, at_least=True)
CPU_TARGET = Target(1.01, at_least=False)
# (name, seconds of a block, settings).
CASES = (
    ("about 10 ms", 1.6, ("workload.size=tiny", "batch.micro=32")),
    ("larger steps", 4.0, ("workload.size=mini", "batch.micro=16")),
)
STARTS, PAIRS = 10, 6
TIMEOUT_S = 900


def measure(options: Options) -> Table:
    """Two rows for each case: speed and processor time of rank 0."""
    table = Table(TITLE, ("case", "step, ms", "steps per block", *STATISTICS))
    starts, pairs = (2, 2) if options.quick else (STARTS, PAIRS)
    for name, seconds, sets in CASES:
        watch = LoadWatch()
        common = (*ONLY_STEPS, "precision.amp=off", "run.threads=1", "log.profile_every_s=0")
        bodies = []
        for start in range(starts):
            say(f"ranks_loop: {name}, start {start + 1} of {starts}")
            bodies.append(_run((*sets, *common), pairs, 0.4 if options.quick else seconds))
        step, steps = f"{1e3 * median(body['step_s'] for body in bodies):.2f}", str(bodies[0]["steps"])
        speed, used = ([median(body[what]) for body in bodies] for what in ("speed", "cpu"))
        table.add(name, step, steps, *statistics_cells(speed, as_ratio, TARGET))
        table.add(f"{name}, processor time", "", "", *statistics_cells(used, as_ratio, CPU_TARGET))
        table.note(
            f"{name}: {pairs} pairs of blocks in each start; other processes used {watch.foreign():.2f} cores"
        )
    return table


def _run(sets: tuple[str, ...], pairs: int, block_s: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="ndd-ranks-") as folder:
        output = Path(folder) / "out.json"
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
            "-m", "benchmarks.ranks_worker", str(output), str(pairs), str(block_s), *sets,
        ]  # fmt: skip
        done = subprocess.run(
            command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
        if not output.exists():
            raise RuntimeError(done.stdout[-2000:])
        body: dict[str, Any] = json.loads(output.read_text())
        return body
