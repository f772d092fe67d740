"""One rank of the checkpoint tests: sharded_worker.py FOLDER SCENARIO..., which leave what the tests compare."""

from __future__ import annotations

import os
import random
import resource
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from ranks_worker import ended_by, error_of, whole
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ndd_engine.train.checkpoint import CheckpointStore, Saved, newest_good
from ndd_engine.train.checkpoint_state import (
    finite_buffers,
    is_sharded,
    not_finite,
    placed_like,
    random_state,
    restore_random_state,
    unloadable,
)
from ndd_engine.train.checkpoint_tensors import EntryWriter
from ndd_engine.train.parallel.world import Exchange
from ndd_engine.train.step.optimizers import decay_groups

CPU = torch.device("cpu")


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
        self.group = dist.new_group(backend="gloo")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.leads = self.rank == 0

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
        globals()[name](ranks, *arguments)
        dist.barrier()


if __name__ == "__main__":
    ended_by(main)
