"""Two ranks of the engine vs. a plain loop over DistributedDataParallel: what recording on every rank costs.

In a pair of processes (see `worker`), 10 steps of the engine and 10 of the plain loop alternate, so that what
else happens on the machine hits both. The engine's steps include the votes, the windows of all ranks and their fold;
evaluation and checkpoints are off. The plain loop reads the loss every 10 steps. Not part of it is the step that
Python's profiler sees every 30 s.

The engine's threads (recorder, sampler of rank 0, hang watch, ...) run all the time, also during the plain loop. Their
processor time is deducted from the plain loop's: that of this rank from its processor time, and that of both ranks from
its wall time, as both cores are in use and each rank waits for the other.

Where in memory a process has its two models makes one of them up to 1.5 % faster as long as it lives. So the processes
start several times: each start gives one value.
"""

from __future__ import annotations

from statistics import median

from benchmarks.common import (
    STATISTICS,
    LoadWatch,
    Options,
    Table,
    Target,
    as_ratio,
    say,
    statistics_cells,
)
from benchmarks.engine import ONLY_STEPS

from .launch import launch

TITLE = (
    "ranks_loop: two ranks of the engine / plain loop with DDP (steps per second; one value for each start)"
)
TARGET = Target(0.99, at_least=True)
CPU_TARGET = Target(1.01, at_least=False)
# (name, chunks of 10 steps in a start, settings).
CASES = (
    ("about 10 ms", 100, ("workload.size=tiny", "batch.micro=32")),
    ("larger steps", 30, ("workload.size=mini", "batch.micro=16")),
)
TIMEOUT_S = 900


def measure(options: Options) -> Table:
    """Two rows for each case: speed and processor time of rank 0."""
    table = Table(TITLE, ("case", "step, ms", *STATISTICS))
    for name, chunks, sets in options.cases(CASES):
        watch = LoadWatch()
        common = (*ONLY_STEPS, "precision.amp=off", "run.threads=1", "log.profile_every_s=0")
        bodies: list[dict[str, float]] = []
        for start in range(options.repeats(8, 2)):
            say(f"ranks_loop: {name}, start {start + 1}")
            words = (options.repeats(chunks, chunks // 10, 1), *sets, *common)
            bodies += launch(2, "qa.ranks.worker", *words, limit_s=TIMEOUT_S)
        each = {key: [body[key] for body in bodies] for key in bodies[0]}
        step = f"{1e3 * median(each['step_s']):.2f}"
        table.add(name, step, *statistics_cells(each["speed"], as_ratio, TARGET))
        table.add(f"{name}, processor time", "", *statistics_cells(each["cpu"], as_ratio, CPU_TARGET))
        threads = f"the threads of both ranks took {100 * median(each['threads']):.2f} % of the wall time"
        table.note(f"{name}: {threads}; other processes used {watch.foreign():.2f} cores")
    return table
