"""One of several ranks of `qa.ranks.loop`, started by torchrun: `worker.py FOLDER CHUNKS SET...`.

Trains with the engine, and after every few steps the same number with a plain loop over DistributedDataParallel.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.engine import TINY_WORKLOAD, Engine
from benchmarks.loop import bare_loop, keep_memory
from benchmarks.rival_loops import Bare
from torch.nn.parallel import DistributedDataParallel

from ndd_engine.config import read
from ndd_engine.train.parallel.loop import RankLoop
from ndd_engine.train.parallel.place import place
from ndd_engine.train.prepare import prepare_run
from ndd_engine.train.rank_run import met
from ndd_engine.train.run import RunRequest

CHUNK = 10  # steps
# The first votes are one, two, four ... steps apart, up to a second.
SETTLED_S = 3.0


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
        # Votes and windows come after so many seconds, of which the engine trains half. Without the second, a window
        # would seem late each time, and the ranks would be called for it.
        loop.team.votes._every_s *= 2
        loop.team._every_s *= 2

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


def main() -> None:
    """Measure; rank 0 writes its figures as JSON."""
    folder, chunks, *sets = sys.argv[1:]
    here = place()
    if here is None:
        raise SystemExit("start this with torchrun --nproc-per-node 2")
    overrides = {"parallel": {"ranks": here.size}}
    draft = read(None, tuple(sets), TINY_WORKLOAD, overrides)
    meeting = met(lambda: RunRequest(draft, Path(folder), probes=False), here)
    assert meeting is not None
    run = meeting.open(meeting.request)
    # Before either model is there: what glibc maps for one only would have other addresses.
    keep_memory()
    subject = Engine(run, prepare_run(run))
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
    main()
