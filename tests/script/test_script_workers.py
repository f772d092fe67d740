"""Loader workers of an observed script, from inside."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from script_help import events, report, run

from ndd_engine.record.events import WorkersEvent

SCRIPT = """import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Crop:
    def __call__(self, x):
        time.sleep(0.001)
        return x


class Files(Dataset):
    def __init__(self):
        self.transforms = [Crop()]

    def __len__(self):
        return 480

    def __getitem__(self, index):
        x = self.fetch(index)
        for transform in self.transforms:
            x = transform(x)
        return x, torch.ones(1)

    def fetch(self, index):
        time.sleep(0.4 if index == 77 else 0.015)
        return torch.full((8,), float(index))


model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), 1e-6)
for x, y in DataLoader(Files(), batch_size=8, num_workers=2, multiprocessing_context="fork"):
    optimizer.zero_grad()
    ((model(x) - y) ** 2).mean().backward()
    optimizer.step()
"""


@pytest.mark.long
@pytest.mark.promise
def test_the_function_and_the_slow_item_inside_a_worker_are_named(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SCRIPT)
    run(tmp_path, "run", "--", sys.executable, "slow.py")
    (*_, newest) = [event for event in events(tmp_path, "slow-001") if isinstance(event, WorkersEvent)]
    assert sum(worker.batches for worker in newest.workers) == 60
    first = newest.functions[0]
    assert (first[2], next(iter(first[6]))) == ("Files.fetch", "sleeps")
    assert [name for name, _ in newest.transforms] == ["Files[0] Crop"]
    slowest = max((ns, name) for worker in newest.workers for ns, name in worker.slow)
    assert slowest[1] == "77" and slowest[0] >= 400_000_000
    found = report(tmp_path, "slow-001")
    # What a finding says of it: tests/diagnose/test_worker_facts.py. So short a run may have none on a busy machine.
    assert found["workers"]["functions"][0][2] == "Files.fetch"


SHORT = """import os

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Items(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.full((8,), float(index)), torch.ones(1)


model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), 1e-6)
for epoch in range(30):
    for x, y in DataLoader(Items(), batch_size=2, num_workers=1, multiprocessing_context="fork"):
        optimizer.zero_grad()
        ((model(x) - y) ** 2).mean().backward()
        optimizer.step()
    with torch.no_grad():
        for x, y in DataLoader(Items(), batch_size=1, num_workers=1, multiprocessing_context="fork"):
            model(x)
"""


@pytest.mark.long
def test_each_pass_is_known_however_short_and_evaluations_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "short.py").write_text(SHORT)
    run(tmp_path, "run", "--", sys.executable, "short.py")
    (*_, newest) = [event for event in events(tmp_path, "short-001") if isinstance(event, WorkersEvent)]
    (worker,) = newest.workers
    # The training may not have read its first iterator yet when the first pass is looked at.
    assert 29 <= worker.starts <= 31
    assert 29 * 12 <= worker.batches <= 31 * 24
