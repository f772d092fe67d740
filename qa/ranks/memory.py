"""Predicted memory of one rank, vs. recordings in ranks that exchange gradients with each other by gloo.

The prediction is made in one process, with a fake process group; the real ranks are processes that
torch.distributed.run starts on this machine's CPU. Both record the allocations of two steps with one micro-batch and of
one step with two. Compared is the peak of the rank with the most memory.

torch.profiler does not record what gloo's threads free. So a real rank waits until each exchange is done and they have
let go of its tensors, and gloo's own copies count until something else is allocated or freed.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.common import TARGETS, Options, Table, as_percent, quantile, say
from benchmarks.memory import CPU, prober_of
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ndd_engine.config import read
from ndd_engine.predict.estimate import FREED, HOST_GRANULE, MANY, ONE, Trace
from ndd_engine.predict.rank_memory import pretended
from ndd_engine.predict.step_probes import EXCHANGE
from ndd_engine.text import size
from ndd_engine.train.parallel import strategy
from ndd_engine.train.parallel.strategy import GATHER, SCATTER

from .job import finish, launch

RANKS = (2, 3, 4)
LIMIT_S = 300
# Seconds after an asynchronous exchange until gloo's threads have let go of its tensors, also where ranks share cores.
RELEASE_S = 0.1
MODELS: dict[str, tuple[str, ...]] = {
    "chartext": ("workload.size=small", "batch.micro=16"),
    "antispoof": ("workload.size=tiny", "workload.clips=320", "batch.micro=8"),
}
STRATEGIES: dict[str, tuple[str, ...]] = {
    "ddp": (),
    "ddp, fp16": ("parallel.compress=fp16",),
    "fsdp2": ("parallel.strategy=fsdp2",),
    "fsdp2, kept": ("parallel.strategy=fsdp2", "parallel.reshard=false"),
}
MARKS = {ONE: "1 micro-batch", MANY: "2 micro-batches"}


@dataclass(frozen=True)
class Case:
    """One comparison. predicted: bytes; real: bytes of the rank with the most, by repeat."""

    workload: str
    strategy: str
    ranks: int
    mark: str
    predicted: int
    real: tuple[int, ...]

    @property
    def error(self) -> float:
        """Predicted over the median of the recorded peaks, minus 1."""
        return self.predicted / statistics.median(self.real) - 1


def measure(options: Options) -> list[Table]:
    """All combinations; --quick uses two ranks, one repeat and one workload."""
    cases = list(_cases(options))
    table = Table(
        "peak of allocated memory of one rank: predicted in one process, and recorded in real ranks (gloo)",
        ("workload", "strategy", "ranks", "step of", "predicted", "recorded: median", "lowest", "highest", "error"),
    )  # fmt: skip
    for one in cases:
        table.add(
            one.workload, one.strategy, str(one.ranks), MARKS[one.mark], size(one.predicted),
            size(int(statistics.median(one.real))), size(min(one.real)), size(max(one.real)), f"{one.error:+.3%}",
        )  # fmt: skip
    table.note(
        f"recorded: of the rank with the most memory, {len(cases[0].real)} times; error: to the median"
    )
    table.note("kept: parallel.reshard = false; fp16: parallel.compress")
    return [table, _targets(cases)]


def _targets(cases: list[Case]) -> Table:
    table = Table("targets", TARGETS)
    for kind in dict.fromkeys(one.strategy.partition(",")[0] for one in cases):
        errors = [abs(one.error) for one in cases if one.strategy.startswith(kind)]
        for name, share in (("median", 0.5), ("largest", 1.0)):
            table.target(f"{kind}: {name} error", quantile(errors, share), 0.005, as_percent)
    return table


def _cases(options: Options) -> Iterator[Case]:
    torch.set_num_threads(1)
    for workload, model in MODELS.items():
        if options.quick and workload != "chartext":
            continue
        for shared, sets in options.cases(STRATEGIES.items()):
            for ranks in RANKS[: options.repeats(3, 1)]:
                all_sets = (*model, *sets, f"parallel.ranks={ranks}", "run.device=cpu", "run.max_steps=9")
                config = read(sets=all_sets, workload=workload).resolve()
                say(f"ranks_memory: {workload} {shared} {ranks} ranks")
                with pretended(ranks, CPU):
                    predicted = peaks(prober_of(config, CPU).trace(config.batch.micro))
                repeats = [_real(workload, all_sets, ranks) for _ in range(options.repeats(3, 1))]
                for mark, name in enumerate(MARKS):
                    real = tuple(found[mark] for found in repeats)
                    yield Case(workload, shared, ranks, name, predicted[mark], real)


def peaks(found: Trace) -> list[int]:
    """Bytes at the peak, by mark."""
    return [found.until(mark).peak(HOST_GRANULE) for mark in MARKS]


def as_seen(found: Trace) -> Trace:
    """The trace, in which gloo's copies live until the exchange ends: not all threads that free them are recorded."""
    copies = {key for key, label in enumerate(found.labels) if label.startswith(EXCHANGE)}
    events: list[tuple[int, int]] = []
    places: list[int] = []
    held: list[int] = []
    for key, size_ in found.events:
        if key not in copies:
            events += [(copy, FREED) for copy in held]
            held = []
        places.append(len(events))
        if key not in copies:
            events.append((key, size_))
        elif size_ != FREED:
            events.append((key, size_))
            held.append(key)
    places.append(len(events))
    marks = {name: places[place] for name, place in found.marks.items()}
    return Trace(tuple(events), found.labels, marks)


def _waiting(exchange: Callable[..., Any]) -> Callable[..., Any]:
    def exchanged(*args: Any, **options: Any) -> Any:
        tensors = [value for value in (*args, *options.values()) if isinstance(value, Tensor)]
        owners = [_owners(tensor) for tensor in tensors]
        found = exchange(*args, **options)
        if found is not None:
            found.wait()  # the last rank may arrive much later
            time.sleep(RELEASE_S)  # `found` itself keeps the tensors
            return found
        deadline = time.monotonic() + LIMIT_S
        while any(_owners(tensor) > count for tensor, count in zip(tensors, owners, strict=True)):
            if time.monotonic() > deadline:
                raise RuntimeError("gloo did not let go of its tensors")
            time.sleep(0.001)
        return found

    return exchanged


def _owners(tensor: Tensor) -> int:
    """How many references to its memory there are, those of gloo's threads included."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def _real(workload: str, sets: tuple[str, ...], ranks: int) -> list[int]:
    """The peaks of the rank with the most memory. Raises RuntimeError if a rank fails."""
    found = launch(ranks, "qa.ranks.memory", workload, *sets, limit_s=LIMIT_S)
    return [max(own[mark] for own in found) for mark in range(len(MARKS))]


def _main(folder: str, workload: str, *sets: str) -> None:
    """One real rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    # The copies of the first broadcast of the weights are freed before the first step, by gloo's threads.
    strategy.DistributedDataParallel = partial(DistributedDataParallel, init_sync=False)  # type: ignore[misc]
    for name in (GATHER, SCATTER, "all_reduce"):
        setattr(dist, name, _waiting(getattr(dist, name)))
    config = read(sets=sets, workload=workload).resolve()
    finish(folder, peaks(as_seen(prober_of(config, CPU).trace(config.batch.micro))))


if __name__ == "__main__":
    _main(*sys.argv[1:])
