"""One of several ranks of `benchmarks.ranks_loop`, started by torchrun: `ranks_worker.py OUTPUT PAIRS BLOCK_S SET...`.

Trains blocks with the engine and with a plain loop over DistributedDataParallel, in turns on all ranks.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ndd_engine.config import read
from ndd_engine.hardware.sampler import Sampler
from ndd_engine.train.parallel.place import place
from ndd_engine.train.prepare import prepare_run
from ndd_engine.train.rank_run import met
from ndd_engine.train.run import RunRequest

from .engine import TINY_WORKLOAD, Engine
from .loop import BareLoop, keep_memory

# Before the first step that counts: a block begins an epoch, for which its order is drawn.
WARM_UP = 3
# The engine's first votes are one, two, four ... steps apart, up to a second. A run begins only once.
SETTLED_S = 2.5


def main() -> None:
    """Measure; rank 0 writes its figures as JSON."""
    output, pairs, block_s, *sets = sys.argv[1:]
    here = place()
    if here is None:
        raise SystemExit("start this with torchrun --nproc-per-node 2")
    overrides = {"parallel": {"ranks": here.size}}
    draft = read(None, tuple(sets), TINY_WORKLOAD, overrides)
    meeting = met(lambda: RunRequest(draft, Path(output).parent, probes=False), here)
    assert meeting is not None
    run = meeting.open(meeting.request)
    subject = Engine(run, prepare_run(run))
    sampler = subject.prepared.sampler if here.first else None  # others run without one on a CPU
    subject.prepared.sampler.stop()
    keep_memory()
    bare = BareLoop(subject.prepared.config, torch.device("cpu"))
    # Gradients are views of the buckets, as in the engine.
    bare.model = DistributedDataParallel(bare.model, gradient_as_bucket_view=True)
    body = _measure(subject, sampler, bare, int(pairs), float(block_s))
    if here.first:
        Path(output).write_text(json.dumps(body))
    dist.barrier()
    run.close()


class Ticks:
    """A hook that notes (wall time, processor time of the process), in seconds, at each call of a model."""

    def __init__(self) -> None:
        self.calls: list[tuple[float, float]] = []

    def __call__(self, *_: object) -> None:
        self.calls.append((time.perf_counter(), time.process_time()))


def _measure(
    subject: Engine, sampler: Sampler | None, bare: BareLoop, pairs: int, block_s: float
) -> dict[str, Any]:
    """speed, cpu: engine / bare of neighbouring blocks; step_s of the bare loop; steps of a block."""
    ticks = Ticks()
    subject.loop.stepper.model.register_forward_pre_hook(ticks)
    bare.model.register_forward_pre_hook(ticks)

    def timed(train: Callable[[int], None], steps: int, warm_up: int = WARM_UP) -> tuple[float, float]:
        dist.barrier()
        ticks.calls.clear()
        train(warm_up + steps + 1)
        (begin, used), (end, used_then) = ticks.calls[warm_up], ticks.calls[warm_up + steps]
        return (end - begin) / steps, (used_then - used) / steps

    def with_engine(steps: int) -> tuple[float, float]:
        if sampler is None:
            return timed(subject.train, steps, settled)
        sampler.start()
        try:
            return timed(subject.train, steps, settled)
        finally:
            sampler.stop()

    timed(bare.train, 20)
    step_s = torch.tensor([timed(bare.train, 40)[0]])
    dist.all_reduce(step_s, dist.ReduceOp.MAX)
    steps, settled = (max(round(seconds / float(step_s)), 8) for seconds in (block_s, SETTLED_S))
    with_engine(steps)
    speed, cpu, bares = [], [], []
    for index in range(pairs):
        order: tuple[Callable[[], tuple[float, float]], ...]
        order = (lambda: timed(bare.train, steps), lambda: with_engine(steps))
        found = [order[index % 2](), order[1 - index % 2]()]
        plain, engine = found[index % 2], found[1 - index % 2]
        speed.append(plain[0] / engine[0])
        cpu.append(engine[1] / plain[1])
        bares.append(plain[0])
    return {"speed": speed, "cpu": cpu, "step_s": sorted(bares)[len(bares) // 2], "steps": steps}


if __name__ == "__main__":
    main()
