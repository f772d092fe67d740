"""One rank of the training tests: train_worker.py FOLDER NAME..., which leave what `Case` measured in NAME.pt.

The tests run the same cases in one process and compare. All ranks run all cases, in the same order.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks_worker import ended_by, error_of, whole
from torch import Tensor, nn

from ndd_engine.config import Config, read
from ndd_engine.config.schema import ParallelSection
from ndd_engine.measure.phase_clock import PhaseClock
from ndd_engine.train.data.loader import Batches, EvalBatches
from ndd_engine.train.data.order import Share
from ndd_engine.train.evaluate import evaluate
from ndd_engine.train.parallel.rank_place import RankPlace, StoreNotes
from ndd_engine.train.parallel.strategy import Strategy, strategy_of
from ndd_engine.train.parallel.world import World, check_data, check_model
from ndd_engine.train.prepare import seed, total_steps, training_batches
from ndd_engine.train.step.stepper import Stepper
from ndd_engine.workloads.factory_data import prepare

HERE = Path(__file__).parent
CPU = torch.device("cpu")
COMMON = (
    f'workload.path=["{HERE}"]', "run.threads=1", "run.device=cpu", "run.epochs=2", "batch.sequence=13",
    "optimizer.lr=0.05",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A configuration. sets: of all numbers of ranks. ranks: of several only. items: micro x accumulation, of all."""

    sets: tuple[str, ...]
    ranks: tuple[str, ...] = ()
    steps: int = 8

    def config(self, ranks: int, accumulation: int, micro: int = 4) -> Config:
        own = (f"parallel.ranks={ranks}", *self.ranks) if ranks > 1 else ()
        sizes = (f"batch.accumulation={accumulation}", f"batch.micro={micro}")
        return read(None, [*COMMON, *self.sets, *sizes, *own]).resolve()


POINTS, LINES = "workload.name=ranks_workloads:points", "workload.name=ranks_workloads:lines"
FSDP2 = ("parallel.strategy=fsdp2",)
CLIP = ("clip.max_norm=0.05", "optimizer.weight_decay=0.1")
SGD = ("optimizer.name=sgd", "optimizer.momentum=0.9")
SINGLE = "workload.options.double=false"
CASES = {
    "ddp": Case((POINTS, *CLIP)),
    "ddp-fp32": Case((POINTS, SINGLE, *CLIP)),
    "ddp-fp32-sgd": Case((POINTS, SINGLE, *SGD), ("parallel.bucket_mb=0.0005",)),
    "ddp-unused": Case((POINTS, *SGD), ("parallel.find_unused=true",)),
    "ddp-closure": Case((POINTS, *CLIP, "workload.options.call=closure")),
    "ddp-parts": Case((POINTS, *CLIP, "workload.options.call=parts")),
    "ddp-workers": Case((POINTS, *CLIP, "loader.workers=2")),
    "ddp-amp": Case((POINTS, SINGLE, *CLIP, "precision.amp=bf16")),
    "fsdp2": Case((POINTS, *SGD), FSDP2),
    "fsdp2-clip": Case((POINTS, *CLIP), FSDP2),
    "fsdp2-kept": Case((POINTS, *CLIP), (*FSDP2, "parallel.reshard=false")),
    "fsdp2-amp": Case((POINTS, SINGLE, *CLIP, "precision.amp=bf16"), FSDP2),
    "fsdp2-gathered": Case((POINTS, SINGLE, *SGD), (*FSDP2, "parallel.param_dtype=bf16")),
    "fsdp2-reduced": Case((POINTS, SINGLE, *SGD), (*FSDP2, "parallel.reduce_dtype=bf16")),
    "lines": Case((LINES, *CLIP)),
    "lines-fsdp2": Case((LINES, *CLIP), FSDP2),
    "short": Case((POINTS, *CLIP, "workload.options.eval_items=3"), steps=1),
    "short-fsdp2": Case((POINTS, *CLIP, "workload.options.eval_items=3"), FSDP2, steps=1),
    "two-of-three": Case((POINTS, *CLIP, "evaluate.batches=2"), FSDP2, steps=1),
}


def named(items: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: whole(item) for name, item in items}


def trained(case: Case, config: Config, world: World | None = None) -> dict[str, Any]:
    """Train as the loop does; the losses, the gradients before clipping, the weights, the evaluation."""
    rank, ranks = (0, 1) if world is None else (world.rank, world.size)
    seed(config.run.seed)
    workload = prepare(config)
    share = Share(rank, ranks)
    strategy = strategy_of(config, CPU, workload.training)
    batches = training_batches(workload, config, CPU, lambda _text: None, share)
    stepper = Stepper(workload, config, CPU, total_steps(config, batches.steps_per_epoch), strategy)
    if rank:
        seed(rank)
    gradients: list[dict[str, Tensor]] = []
    update = stepper.update

    def noted(enter: Callable[[int], object]) -> None:
        gradients.append(
            named(
                (name, item.grad) for name, item in stepper.model.named_parameters() if item.grad is not None
            )
        )
        update(enter)

    stepper.update = noted  # type: ignore[method-assign]
    losses, clock = [], PhaseClock()
    for step in range(case.steps):
        epoch, at = batches.place(step)
        if not at:
            iterator = batches.epoch(epoch, 0)
        loss = stepper.step(iterator, clock, step)
        assert loss is not None
        mean = loss / ranks
        if world is not None:
            dist.all_reduce(mean)
        losses.append(float(mean))
        clock.end_step()
    evaluation = EvalBatches(workload.eval_data, config, workload.collate, CPU, share=share)
    shared = None if world is None else world.exchange.everywhere
    result = evaluate(stepper, evaluation, lambda: None, shared)
    return {
        "losses": losses, "gradients": gradients, "weights": named(iter(stepper.model.state_dict().items())),
        "metrics": result.metrics, "batches": result.batches, "waits": "loss/exchange" in clock.names,
    }  # fmt: skip


class Buffers(nn.Module):
    """Buffers of layouts and types that not every backend takes."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        mine = torch.arange(6.0).reshape(2, 3) + rank
        self.register_buffer("turned", mine.t())
        self.register_buffer("part", mine.clone()[:, 1:])
        self.register_buffer("short", mine.to(torch.int16))
        self.register_buffer("flag", mine > 3)
        self.register_buffer("number", torch.tensor(rank))
        self.register_buffer("repeated", torch.ones(1).expand(4))
        self.register_buffer("complex", torch.complex(mine, mine))


def buffers(world: World) -> dict[str, Tensor]:
    """The buffers of a rank after it took over those of rank 0."""
    strategy = Strategy(ParallelSection(ranks=2), CPU)
    strategy.place(Buffers(world.rank))
    strategy.sync_buffers()
    return named(strategy.module.named_buffers())


def bypassed(world: World) -> dict[str, str]:
    """What is said if forward calls only parts of a sharded model."""
    case = Case((POINTS, "workload.options.call=parts"), FSDP2, steps=1)
    return {"parts": error_of(lambda: trained(case, case.config(world.size, 1), world))}


def differing(world: World) -> dict[str, str]:
    """What is said if a rank reads other data or builds another model."""
    config = Case((POINTS, f"workload.options.items={45 + world.rank}")).config(world.size, 1)
    workload = prepare(config)
    other = Batches(workload.train_data, config, share=Share(world.rank, world.size))
    changed = Batches(torch.utils.data.TensorDataset(torch.ones(9, 2) * world.rank), config)
    found = {
        "items": error_of(lambda: check_data(world, other)),
        "data": error_of(lambda: check_data(world, changed)),
    }
    torch.manual_seed(world.rank)
    found["model"] = error_of(lambda: check_model(world, nn.Linear(3, 3)))
    torch.manual_seed(0)
    found["same"] = error_of(lambda: check_model(world, nn.Linear(3, 3)))
    return found


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    world = World(RankPlace(rank, size, rank, size), store, StoreNotes(store), CPU)
    folder = Path(sys.argv[1])
    for name in sys.argv[2:]:
        if name in CASES:
            found: Any = trained(CASES[name], CASES[name].config(size, 2 // size or 1), world)
        else:
            found = globals()[name](world)
        torch.save(found, folder / f"{name}.{rank}.pt")
        dist.barrier(group=world.control)


if __name__ == "__main__":
    ended_by(main)
