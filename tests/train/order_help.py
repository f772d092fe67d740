"""Workloads whose factory decides the order of the data, and a plain PyTorch loop over the same data."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

SOURCE = '''
import itertools
import random
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, Sampler, TensorDataset, WeightedRandomSampler,
    get_worker_info,
)

ITEMS = 50

class Data(Dataset):
    def __len__(self):
        return ITEMS
    def __getitem__(self, index):
        x = torch.sin(torch.arange(1.0, 5.0) * (index + 1))
        return x, x.sum()

class Endless(Sampler):
    """Indices without an end; its state is that of its generator and its place in the present order."""
    def __init__(self, seed=3):
        self.generator = torch.Generator().manual_seed(seed)
        self.order, self.at = [], 0
    def __iter__(self):
        while True:
            if self.at >= len(self.order):
                self.order, self.at = torch.randperm(ITEMS, generator=self.generator).tolist(), 0
            self.at += 1
            yield self.order[self.at - 1]
    def state_dict(self):
        return {"generator": self.generator.get_state(), "order": self.order, "at": self.at}
    def load_state_dict(self, state):
        self.generator.set_state(state["generator"])
        self.order, self.at = state["order"], state["at"]

class Buckets(Sampler):
    """Batches of neighbours of different sizes, in a random order; draws from the global generators."""
    def __init__(self, with_len=True):
        self.batches = [list(range(at, at + size)) for at, size in zip(range(0, 48, 6), itertools.cycle((3, 6, 5)))]
        self.left = None
    def __len__(self):
        return len(self.batches)
    def __iter__(self):
        if not self.left:
            self.left = random.sample(range(len(self.batches)), len(self.batches))
        while self.left:
            yield self.batches[self.left.pop(0)]
    def state_dict(self):
        return {"left": self.left}
    def load_state_dict(self, state):
        self.left = state["left"]

class Items(IterableDataset):
    """Its length is known to nobody; random numbers are part of the items."""
    def __init__(self, count=50, noise=False, shard=True):
        self.count, self.at, self.noise, self.shard = count, 0, noise, shard
    def __iter__(self):
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info is not None and self.shard else (0, 1)
        while self.at < self.count:
            at = self.at
            self.at += 1
            if at % step == first:
                x = torch.sin(torch.arange(1.0, 5.0) * (at + 1))
                if self.noise:
                    x = x + torch.rand(4) * random.random()
                yield x, x.sum()
        self.at = 0
    def state_dict(self):
        return {"at": self.at}
    def load_state_dict(self, state):
        self.at = state["at"]

class Forgetful(Items):
    """The same without a state."""
    state_dict = load_state_dict = None

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)
    def forward(self, x):
        return self.linear(x)

def loss(output, batch):
    return nn.functional.mse_loss(output.squeeze(-1), batch[1])

def parts(**more):
    torch.manual_seed(5)
    return dict(model=Net(), train_data=Data(), eval_data=Data(), loss=loss, **more)
'''
SETS = (
    "batch.micro=4", "batch.sequence=4", "run.threads=1", "run.device=cpu", "optimizer.name=sgd",
    "optimizer.lr=0.05", "optimizer.weight_decay=0", "log.every_steps=1", "log.window_s=0",
    "evaluate.every_epochs=0", "evaluate.at_end=false", "checkpoint.every_epochs=0",
)  # fmt: skip
Sets = Callable[..., tuple[str, ...]]
_numbers = itertools.count()


@pytest.fixture
def ordered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sets:
    """ordered("parts(shuffle=False)") writes a module whose factory returns that, and returns a run's settings."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])

    def sets(result: str, source: str = "") -> tuple[str, ...]:
        name = f"ordered_{next(_numbers)}"
        factory = f"\ndef factory(settings):\n    return {result}\n"
        (tmp_path / f"{name}.py").write_text(SOURCE + source + factory)
        return (f"workload.name={name}:factory", f'workload.path=["{tmp_path}"]', *SETS)

    return sets


def plain_losses(sets: tuple[str, ...], steps: int) -> list[float]:
    """The losses of a plain loop over the DataLoader that the factory returns, pass after pass."""
    module, _, factory = sets[0].partition("=")[2].partition(":")
    made: Any = getattr(importlib.import_module(module), factory)(
        SimpleNamespace(micro=4, seed=1337, sequence=4, option=lambda _, default: default)
    )
    optimizer = torch.optim.SGD(made["model"].parameters(), lr=0.05)
    found: list[float] = []
    while len(found) < steps:
        for batch in made["train_data"]:
            value = made["loss"](made["model"](batch[0]), batch)
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(float(value.detach()))
            if len(found) == steps:
                break
    return found
