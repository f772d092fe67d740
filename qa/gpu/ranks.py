"""Part "marks of ranks": what marking the exchange costs two GPUs; and the ranks that `tests/gpu` starts.

A rank is this module under torchrun: `… -m qa.gpu.ranks FOLDER KIND DEVICE WORDS`.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.common import paired, say
from benchmarks.memory import prober_of
from torch import Tensor, nn

from ndd_engine.config import read
from ndd_engine.config.schema import ParallelSection
from ndd_engine.measure.capture import ProfilerCapture
from ndd_engine.predict.estimate import Trace
from ndd_engine.train.parallel.strategy import PART, Ddp, Fsdp2, StreamWaits, mark_collectives
from ndd_watch import clock as phase
from ndd_watch.clock import NEVER, PhaseClock, no_phase
from qa.ranks.job import finish, launch

from .figures import FAIL, Task, one_line
from .overhead import TARGET, put_ratio

MODULE = "qa.gpu.ranks"
RANKS = 2
STRATEGIES = ("ddp", "fsdp2")
WARM_UP = 5
MEASURED = 10  # less than what a DeviceClock keeps


def measure(given: Task) -> None:
    """Measure the cost of the marks with both strategies."""
    if given.on_gpu and torch.cuda.device_count() < RANKS:
        given.skip("marks of the exchange", "needs two CUDA GPUs")
        return
    for strategy in STRATEGIES:
        say(f"marks of ranks: {strategy}")
        name = f"{strategy}: marks of the exchange, on / off"
        pairs = int(given.of(16, 8, 2))
        try:
            found = launched("cost", given.device, strategy, pairs, limit_s=given.left_s)
        except RuntimeError as error:
            given.put(name, "not measured", f"≥ {TARGET}", FAIL, one_line(error))
            continue
        put_ratio(given, name, found["ratios"], f"step {found['step_ms']:.2f} ms")


def launched(kind: str, device: str, *words: object, limit_s: float = 150.0) -> dict[str, Any]:
    """What rank 0 of two found. Raises RuntimeError if a rank fails or takes too long."""
    found: dict[str, Any] = launch(RANKS, MODULE, kind, device, *words, limit_s=limit_s)[0]
    return found


# The rest runs in a rank.


@dataclass
class Subject:
    """A model that the ranks share, with or without marks. clock: None without. marking: the context of its steps.

    before_backward: of its strategy, with marks of DDP.
    """

    compute: nn.Module
    batch: Tensor
    optimizer: torch.optim.Optimizer
    clock: PhaseClock | None = None
    marking: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    before_backward: Callable[[Tensor], None] = lambda loss: None

    def step(self) -> None:
        """One optimizer step."""
        enter = no_phase if self.clock is None else self.clock.enter
        enter(phase.FORWARD)
        loss = self.compute(self.batch).square().mean()
        enter(phase.BACKWARD)
        self.before_backward(loss)
        loss.backward()
        enter(phase.OPTIMIZER)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.clock is not None:
            self.clock.end_step()


def subject(strategy: str, device: torch.device, items: int, marked: bool) -> Subject:
    """Equal layers; beside the computation of few items their exchange takes long."""
    torch.manual_seed(0)
    width, layers = (4096, 8) if device.type == "cuda" else (128, 4)
    section = ParallelSection(ranks=dist.get_world_size(), strategy=strategy)  # type: ignore[arg-type]
    shared = (Fsdp2 if strategy == "fsdp2" else Ddp)(section, device)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    shared.place(model)
    model.to(device)
    compute = shared.computing()
    batch = torch.randn(items, width, device=device)
    found = Subject(compute, batch, torch.optim.SGD(model.parameters(), 1e-4))
    if not marked:
        return found
    found.clock = clock = clock_on(device)
    if isinstance(shared, Ddp):
        shared.mark_exchange(clock)
        found.before_backward = shared.before_backward
    elif device.type == "cuda":
        found.marking = partial(_stream_waits, clock, device)
    else:
        mark_collectives(model.modules(), clock)
    return found


@contextlib.contextmanager
def _stream_waits(clock: PhaseClock, device: torch.device) -> Iterator[None]:
    waits = StreamWaits(clock, torch.cuda.current_stream(device))
    try:
        yield
    finally:
        waits.stop()


def clock_on(device: torch.device) -> PhaseClock:
    """The clock that a run would use."""
    clock = PhaseClock()
    if device.type == "cuda":
        clock.gpu.prepare(partial(torch.cuda.Event, enable_timing=True), torch.cuda.current_stream)
    return clock


def wait_for(device: torch.device) -> None:
    """Wait until the device has done all work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def cost(device: torch.device, strategy: str, pairs: str) -> dict[str, Any]:
    """Rates of steps with marks / without, in neighbouring blocks of the same number of steps on all ranks."""
    bare, marked = (subject(strategy, device, 2048, marked) for marked in (False, True))

    def rate(which: Subject, steps: int) -> float:
        dist.barrier()
        wait_for(device)
        begin = time.perf_counter()
        with which.marking():
            for _ in range(steps):
                which.step()
            wait_for(device)
        return steps / (time.perf_counter() - begin)

    for which in (bare, marked):
        rate(which, WARM_UP)
    steps = torch.tensor([max(round(rate(bare, WARM_UP) * 0.5), 5)])
    dist.broadcast(steps, 0)
    ratios = paired(partial(rate, bare, int(steps)), partial(rate, marked, int(steps)), int(pairs), math.inf)
    rates = sorted(ratio.rates[0] for ratio in ratios)
    return {"ratios": [ratio.value for ratio in ratios], "step_ms": 1e3 / rates[len(rates) // 2]}


def exchange(device: torch.device, strategy: str) -> dict[str, Any]:
    """Exposed exchange of equal steps, in nanoseconds: by the events of the marks, and by a profiler capture.

    The steps of a capture carry no events.
    """
    marked = subject(strategy, device, 128, marked=True)
    clock = marked.clock
    assert clock is not None
    clock.gpu.due = NEVER
    with marked.marking():
        for index in range(WARM_UP + MEASURED):
            if index >= WARM_UP:
                clock.gpu.begin(phase.OTHER)
            marked.step()
        wait_for(device)
        rows = clock.gpu.take()
        capture = ProfilerCapture(device, clock)
        capture.start()
        marked.step()
        wait_for(device)
        capture.begin()
        for _ in range(MEASURED):
            marked.step()
            capture.step_ended()
        wait_for(device)
        event = capture.end(MEASURED)
    by_events = sum(
        spent for _, row in rows for index, spent in row.items() if clock.names[index].endswith(f"/{PART}")
    )
    return {
        "events_ns": by_events,
        "exposed_ns": event.exposed_ns,
        "collective_ns": event.collective_ns,
        "steps": len(rows),
    }


def memory(device: torch.device, *sets: str) -> dict[str, Any]:
    """Most bytes that any rank allocates in the steps that a prediction records."""
    trace(device, *sets)
    most = torch.tensor([torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)])
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return {"allocated": int(most[0]), "reserved": int(most[1])}


def trace(device: torch.device, *sets: str) -> Trace:
    """The allocations of steps of chartext, in the present process group."""
    config = read(sets=sets, workload="chartext").resolve()
    return prober_of(config, device).trace(config.batch.micro)


KINDS: dict[str, Callable[..., dict[str, Any]]] = {"cost": cost, "exchange": exchange, "memory": memory}


def rank(folder: str, kind: str, device: str, *words: str) -> None:
    """One rank, to the end of its process."""
    here = torch.device("cpu")
    if device == "cuda":
        here = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(here)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=here)
    else:
        dist.init_process_group("gloo")
    finish(folder, KINDS[kind](here, *words))


if __name__ == "__main__":
    rank(*sys.argv[1:])
