"""One rank of test_ranks_equal.py: ranks_worker.py FOLDER SCENARIO..., which leave what the tests compare.

A scenario is a case of training, which the tests run in one process as well, or a function with its arguments, such as
load:1:ddp. All ranks run all of them, in the same order.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ndd_engine.config import Config, read
from ndd_engine.config.schema import ParallelSection
from ndd_engine.train.checkpoint import CheckpointStore, Saved, newest_good
from ndd_engine.train.checkpoint_state import (
    finite_buffers,
    is_sharded,
    not_finite,
    random_state,
    restore_random_state,
    unloadable,
)
from ndd_engine.train.checkpoint_tensors import EntryWriter
from ndd_engine.train.data.loader import Batches, EvalBatches
from ndd_engine.train.data.order import Share
from ndd_engine.train.evaluate import evaluate
from ndd_engine.train.parallel.rank_loop import placed_like
from ndd_engine.train.parallel.rank_place import RankPlace, StoreNotes
from ndd_engine.train.parallel.strategy import Strategy, strategy_of
from ndd_engine.train.parallel.world import Exchange, World, check_data, check_model
from ndd_engine.train.prepare import seed, total_steps, training_batches
from ndd_engine.train.step.optimizers import decay_groups
from ndd_engine.train.step.stepper import Stepper
from ndd_engine.workloads.factory_data import prepare
from ndd_watch.clock import PhaseClock

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


def whole(value: Any) -> Any:
    """The state without shards."""
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    if isinstance(value, list):
        return [whole(item) for item in value]
    full = value.full_tensor() if hasattr(value, "full_tensor") else value
    return full.detach().clone() if isinstance(full, Tensor) else full


def error_of(work: Callable[[], Any]) -> str:
    """What it raises; "" if nothing."""
    try:
        work()
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return ""


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


# Checkpoints.


class Net(nn.Module):
    """Tied weights, sizes that no number of ranks divides, a parameter of one element, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 3)
        self.conv = nn.Conv2d(2, 3, 2)
        self.norm = nn.LayerNorm(3)
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("shift", torch.linspace(0, 1, 3))

    def forward(self, x: Tensor) -> Tensor:
        grid = x[:, :8].reshape(-1, 2, 2, 2).float()
        features = self.embed(x).mean(1) + self.conv(grid).flatten(1)
        return self.head(self.norm(features + self.shift)) * self.scale


class Job:
    """Model, optimizer and scaler, distributed by strategy: "one", "ddp" or "fsdp2"."""

    def __init__(self, strategy: str, implementation: str = "foreach", seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = Net()
        self.compute: nn.Module = self.model
        if strategy == "fsdp2":
            fully_shard(self.model)
        else:
            self.model.conv.to(memory_format=torch.channels_last)  # which FSDP2 does not accept
        if strategy == "ddp":
            self.compute = DistributedDataParallel(self.model)
        if implementation == "sgd":
            made: Any = torch.optim.SGD(decay_groups(self.model), lr=0.1, momentum=0.9, foreach=True)
        else:
            made = torch.optim.AdamW(decay_groups(self.model), lr=0.1, **{implementation: True})
        self.optimizer = SimpleNamespace(by_name={"": made})
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (3 + seed))
        rank = dist.get_rank() if dist.is_initialized() else 0
        torch.manual_seed(100 * seed + rank)
        random.seed(100 * seed + rank)

    def train(self, steps: int) -> None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        for step in range(steps):
            x = torch.randint(7, (4, 9), generator=torch.Generator().manual_seed(10 * step + rank))
            self.scaler.scale(self.compute(x).square().mean()).backward()
            self.optimizer.by_name[""].step()
            self.optimizer.by_name[""].zero_grad()

    def state(self) -> dict[str, Any]:
        """As the engine's stepper returns it."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.by_name[""].state_dict(),
            "scaler": self.scaler.state_dict(),
        }

    def checkpoint(self, step: int) -> dict[str, Any]:
        rank = dist.get_rank() if dist.is_initialized() else 0
        # Ranks copy the state of a stream at different moments.
        position = {"since": rank, "state": [torch.full((3 + rank,), float(rank)) for _ in range(2 + rank)]}
        return {
            "step": step, "seed": 7, "effective_batch": 8, "data_crc": 99, "position": position,
            "random": random_state(CPU), **self.state(),
        }  # fmt: skip

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.by_name[""].load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        restore_random_state(state["random"], CPU)


class Ranks:
    """What a scenario needs. All ranks run it together."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.leads = self.rank == 0
        self.group = dist.new_group(backend="gloo")
        store = dist.distributed_c10d._get_default_store()
        self.world = World(
            RankPlace(self.rank, self.size, self.rank, self.size), store, StoreNotes(store), CPU
        )

    def store(self, job: Job, name: str = "checkpoints") -> CheckpointStore:
        like = placed_like(job)  # type: ignore[arg-type]
        return CheckpointStore(self.folder / name, 9, Exchange(self.group), CPU, like)

    def keep(self, name: str, value: Any) -> None:
        """Leave a value for the test: NAME.pt of rank 0, NAME.1.pt of rank 1."""
        torch.save(value, self.folder / f"{name}{f'.{self.rank}' if self.rank else ''}.pt")

    def save(self, job: Job, step: int) -> Saved:
        state = job.checkpoint(step)
        assert unloadable(state) is None
        assert not_finite(job.model, finite_buffers(job.model)) is None
        self.keep(f"saved-{step}", whole(state))
        return self.store(job).save(step, state, None, True)

    def restore(self, job: Job, step: int) -> None:
        """Load a checkpoint as a resumed run does, and leave what was loaded."""
        store = self.store(job)
        store.clean()
        (saved,) = (saved for saved in store.all() if saved.step == step)
        state = store.load(saved)
        job.load(state)
        loaded = {**whole(job.checkpoint(step)), "ranks": state["ranks"]}
        kind = "fsdp2" if any(map(is_sharded, job.model.parameters())) else "ddp"
        self.keep(f"loaded-{step}-{self.size}-{kind}", loaded)


# Scenarios.


def buffers(ranks: Ranks) -> dict[str, Tensor]:
    """The buffers of a rank after it took over those of rank 0."""
    strategy = Strategy(ParallelSection(ranks=2), CPU)
    strategy.place(Buffers(ranks.rank))
    strategy.sync_buffers()
    return named(strategy.module.named_buffers())


def bypassed(ranks: Ranks) -> str:
    """What is said if forward calls only parts of a sharded model."""
    case = Case((POINTS, "workload.options.call=parts"), FSDP2, steps=1)
    return error_of(lambda: trained(case, case.config(ranks.size, 1), ranks.world))


def differing(ranks: Ranks) -> dict[str, str]:
    """What is said if a rank reads other data or builds another model."""
    world = ranks.world
    config = Case((POINTS, f"workload.options.items={45 + world.rank}")).config(world.size, 1)
    other = Batches(prepare(config).train_data, config, share=Share(world.rank, world.size))
    changed = Batches(torch.utils.data.TensorDataset(torch.ones(9, 2) * world.rank), config)
    found = {
        "items": error_of(lambda: check_data(world, other)),
        "data": error_of(lambda: check_data(world, changed)),
    }
    for name, number in (("model", world.rank), ("same", 0)):
        torch.manual_seed(number)
        found[name] = error_of(lambda: check_model(world, nn.Linear(3, 3)))
    return found


def train(ranks: Ranks, strategy: str, step: str, implementation: str = "foreach") -> None:
    job = Job(strategy, implementation)
    job.train(2)
    ranks.save(job, int(step))


def load(ranks: Ranks, step: str, strategy: str, implementation: str = "foreach") -> None:
    ranks.restore(job := Job(strategy, implementation, seed=1), int(step))
    job.train(1)  # what was loaded can be trained


def convert(ranks: Ranks, step: str, strategy: str, to: str) -> None:
    """Load a checkpoint and save it again as another step."""
    job = Job(strategy, seed=2)
    ranks.restore(job, int(step))
    ranks.save(job, int(to))


def limited(ranks: Ranks, step: str, bad: str, room: str) -> None:
    """A rank that cannot write its file."""
    job = Job("fsdp2")
    job.train(1)
    store = ranks.store(job)
    before = sorted(path.name for path in store.folder.iterdir())
    dist.barrier()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if ranks.rank == int(bad):
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(room), limits[1]))
    state = job.checkpoint(int(step))
    text = error_of(lambda: store.save(int(step), state, None, True))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    dist.barrier()
    after = sorted(path.name for path in store.folder.iterdir())
    ranks.keep(f"limited-{step}", {"error": text, "before": before, "after": after})
    dist.barrier()


def damaged(ranks: Ranks, step: str, name: str) -> None:
    """Load a checkpoint with a damaged file, which is repaired afterwards."""
    store = ranks.store(Job("fsdp2"))
    (saved,) = (saved for saved in store.all() if saved.step == int(step))
    path = saved.path / name
    good = path.read_bytes()
    dist.barrier()
    if ranks.leads:
        path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    dist.barrier()
    ranks.keep(f"damaged-{step}", error_of(lambda: newest_good(store)))
    dist.barrier()
    if ranks.leads:
        path.write_bytes(good)


def unequal(ranks: Ranks, step: str) -> None:
    """A tensor that only one rank has."""
    job = Job("ddp")
    state = job.checkpoint(int(step))
    if ranks.rank:
        state["model"]["extra"] = torch.ones(3)
    ranks.keep(f"unequal-{step}", error_of(lambda: ranks.store(job).save(int(step), state, None, True)))


def killed(ranks: Ranks, step: str, bad: str, where: str) -> None:
    """A rank that is killed while the checkpoint is written."""
    job = Job("fsdp2")
    before = getattr(EntryWriter, where)

    def kill(*arguments: Any) -> Any:
        found = before(*arguments)
        if ranks.rank == int(bad):
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    setattr(EntryWriter, where, kill)
    ranks.save(job, int(step))


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks = Ranks(Path(sys.argv[1]))
    for item in sys.argv[2:]:
        name, *arguments = item.split(":")
        if name in CASES:
            found: Any = trained(
                CASES[name], CASES[name].config(ranks.size, 2 // ranks.size or 1), ranks.world
            )
        else:
            found = globals()[name](ranks, *arguments)
        if found is not None:
            ranks.keep(name, found)
        dist.barrier()


if __name__ == "__main__":
    status = 1
    try:
        main()
        status = 0
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # the destructors of gloo's threads can wait for each other
