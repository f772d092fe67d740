"""Two ranks of the engine vs. a plain loop over DistributedDataParallel: what recording on every rank costs.

In a pair of processes, which torchrun starts, 10 steps of the engine and 10 of the plain loop alternate, so that what
else happens on the machine hits both. The engine's steps include the agreements, the windows of all ranks and
their comparison; evaluation and checkpoints are off. The plain loop reads the loss every 10 steps. The step that
Python's profiler sees every 30 s is not part of it.

The engine's threads (recorder, sampler of rank 0, hang watch, ...) run all the time, also during the plain loop. Their
processor time is deducted from the plain loop's: that of this rank from its processor time, and that of both ranks from
its wall time, as both cores are in use and each rank waits for the other.

Where in memory a process has its two models makes one of them up to 1.5 % faster as long as it lives. So the processes
start several times: each start gives one value.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.common import (
    STATISTICS,
    Options,
    Table,
    Target,
    as_ratio,
    say,
    statistics_cells,
)
from benchmarks.engine import ONLY_STEPS, TINY_WORKLOAD, Engine
from benchmarks.loop import bare_loop, keep_memory
from benchmarks.rival_loops import Bare
from torch.nn.parallel import DistributedDataParallel

from ndd_engine.config import read
from ndd_engine.hardware.load import LoadWatch
from ndd_engine.train.parallel.rank_loop import RankLoop
from ndd_engine.train.parallel.rank_place import place
from ndd_engine.train.prepare import prepare_run
from ndd_engine.train.rank_run import met, open_rank
from ndd_engine.train.request import RunRequest

from .job import launch

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
CHUNK = 10  # steps
# The first agreements are one, two, four ... steps apart, up to a second.
SETTLED_S = 3.0


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
            bodies += launch(2, "qa.ranks.loop", *words, limit_s=TIMEOUT_S)
        each = {key: [body[key] for body in bodies] for key in bodies[0]}
        step = f"{1e3 * median(each['step_s']):.2f}"
        table.add(name, step, *statistics_cells(each["speed"], as_ratio, TARGET))
        table.add(f"{name}, processor time", "", *statistics_cells(each["cpu"], as_ratio, CPU_TARGET))
        threads = f"the threads of both ranks took {100 * median(each['threads']):.2f} % of the wall time"
        table.note(f"{name}: {threads}; other processes used {watch.foreign():.2f} cores")
    return table


# The rest runs in a rank.


@dataclass
class Spent:
    """Nanoseconds: wall time, processor time of the process, and of the engine's own threads."""

    wall: int = 0
    cpu: int = 0
    threads: int = 0

    @classmethod
    def now(cls) -> Spent:
        """Until now."""
        return cls(time.perf_counter_ns(), time.process_time_ns(), _own_threads())

    def add(self, before: Spent, after: Spent) -> None:
        """Add the time between."""
        self.wall += after.wall - before.wall
        self.cpu += after.cpu - before.cpu
        self.threads += after.threads - before.threads


def _own_threads() -> int:
    spent = 0
    for thread in threading.enumerate():
        if thread.name.startswith("ndd-"):
            try:
                text = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text(encoding="ascii")
            except OSError:
                continue  # it has ended
            spent += int(text.split()[0])
    return spent


class Done(Exception):  # noqa: N818  no error
    """All chunks are trained."""


class Turns:
    """Trains chunks of both loops in turns, from inside the engine's loop. chunks: of each."""

    def __init__(self, loop: RankLoop, bare: Bare, chunks: int) -> None:
        self.engine, self.plain = Spent(), Spent()
        self._bare, self._left = bare, chunks
        self._after_step = loop._after_step
        self._began, self._settled_s = time.monotonic(), SETTLED_S if chunks > 1 else 0.0
        self._before: Spent | None = None
        self._steps = 0
        loop._after_step = self._stepped  # type: ignore[method-assign]
        # Agreements and windows come after so many seconds, of which the engine trains half.
        loop.agreement.every_s *= 2

    def _stepped(self, action: int) -> None:
        self._after_step(action)
        self._steps += 1
        if self._before is None:
            settled = torch.tensor([time.monotonic() - self._began >= self._settled_s])
            if self._steps % CHUNK == 0:
                dist.all_reduce(settled, dist.ReduceOp.MIN)
                if settled:
                    self._turn()
        elif self._steps % CHUNK == 0:
            self.engine.add(self._before, Spent.now())
            self._turn()

    def _turn(self) -> None:
        if not self._left:
            raise Done
        self._left -= 1
        before = Spent.now()
        self._bare.go_on(CHUNK)
        after = self._before = Spent.now()
        self.plain.add(before, after)


def rank(folder: str, chunks: str, *sets: str) -> None:
    """One rank; the first one writes the figures."""
    here = place()
    if here is None:
        raise SystemExit("start this with torchrun --nproc-per-node 2")
    overrides = {"parallel": {"ranks": here.size}}
    draft = read(None, sets, TINY_WORKLOAD, overrides)
    training = met(lambda: RunRequest(draft, Path(folder), probes=False), here)
    assert training is not None
    run = open_rank(training)
    # Before either model is there: what glibc maps for one only would have other addresses.
    keep_memory()
    subject = Engine(run, prepare_run(training.opened))
    bare = bare_loop(subject.prepared.config, torch.device("cpu"))
    # Gradients are views of the buckets, as in the engine.
    bare.model = DistributedDataParallel(bare.model, gradient_as_bucket_view=True)
    bare.go_on(2 * CHUNK)
    loop = subject.loop
    assert isinstance(loop, RankLoop)
    turns = Turns(loop, bare, int(chunks))
    with suppress(Done):
        loop.run()
    subject.prepared.sampler.stop()
    body = _ratios(turns, int(chunks) * CHUNK)
    if here.first:
        Path(folder, "0.json").write_text(json.dumps(body))
    dist.barrier()
    run.close()


def _ratios(turns: Turns, steps: int) -> dict[str, Any]:
    """speed, cpu: the engine's, relative to the plain loop; step_s of that; threads: of both ranks, as a share of that.

    The engine's threads also ran during the plain loop: their time is deducted from it.
    """
    engine, plain = turns.engine, turns.plain
    threads = torch.tensor(plain.threads)
    dist.all_reduce(threads)
    wall = plain.wall - int(threads)
    return {
        "speed": wall / engine.wall,
        "cpu": engine.cpu / (plain.cpu - plain.threads),
        "step_s": wall / steps * 1e-9,
        "threads": int(threads) / wall,
    }


if __name__ == "__main__":
    rank(*sys.argv[1:])
