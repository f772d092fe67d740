"""A workload of about 75 ms a step on one core, in which one rank may be slower; for `qa.ranks.late`.

LATE_RANK, LATE_PHASE and LATE_MS say which one, where and by how much; see `factory`. Each rank writes when its steps
end to a file in the folder LATE_CLOCKS, by a clock that the engine does not read.
"""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import Dataset

MINE = os.environ.get("RANK") == os.environ.get("LATE_RANK")
PHASE = os.environ.get("LATE_PHASE", "") if MINE else ""
LATE_S = float(os.environ.get("LATE_MS", "0")) / 1e3
WIDTH, ITEMS, MICRO = 768, 8192, 128


def work(seconds: float) -> None:
    """Compute in Python for so long."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        sum(range(50))


class Items(Dataset[tuple[Tensor, Tensor]]):
    """Items that are in memory; on the straggler, reading one takes longer."""

    def __init__(self) -> None:
        self.x = torch.rand(ITEMS, WIDTH)
        self.y = self.x.sum(dim=1, keepdim=True) / WIDTH

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if PHASE == "data_wait":
            read(LATE_S / MICRO)
        return self.x[index], self.y[index]


# Seconds that reading has still to take: a shorter sleep would take longer than it says.
_owed = [0.0]
SLEEP_S = 1e-3


def read(seconds: float) -> None:
    """Wait for a disk, so long in the mean over several items."""
    _owed[0] += seconds
    if _owed[0] >= SLEEP_S:
        begin = time.perf_counter()
        time.sleep(_owed[0])
        _owed[0] -= time.perf_counter() - begin


def write_clock(folder: Path) -> None:
    """Write when each step of the optimizer ends."""
    file = (folder / os.environ.get("RANK", "0")).open("w")

    def ended(*_: object) -> None:
        print(time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW), file=file, flush=True)

    register_optimizer_step_post_hook(ended)


class _SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(_context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_context: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        work(LATE_S)
        return gradient


class Model(nn.Module):
    """Layers of equal width; the late one is in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))
        self.head = nn.Linear(WIDTH, 1)
        self.cycles: list[Any] = []

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x = batch[0]
        for index, layer in enumerate(self.layers):
            x = torch.relu(layer(x))
            if index == 4:
                x = self.late(x)
        out: Tensor = self.head(x)
        return out

    def late(self, x: Tensor) -> Tensor:
        """What only the straggler does in forward and backward."""
        if PHASE == "forward":
            work(LATE_S)
        elif PHASE == "garbage":
            begin = time.perf_counter()
            while time.perf_counter() - begin < LATE_S:
                gc.collect()
        elif PHASE == "backward":
            x = _SlowBackward.apply(x)
        return x


def factory(_settings: Any) -> dict[str, Any]:
    """LATE_PHASE: data_wait, forward, backward, optimizer, garbage (collections of Python in forward) or core (its core
    is shared with another process; LATE_MS is not used)."""
    if folder := os.environ.get("LATE_CLOCKS"):
        write_clock(Path(folder))
    if PHASE == "core":
        _share_a_core()
    elif PHASE == "optimizer":
        register_optimizer_step_pre_hook(lambda *_: work(LATE_S))
    model = Model()
    return {
        "model": model,
        "train_data": Items(),
        "forward": lambda model, batch: model(batch),
        "loss": lambda out, batch: (out - batch[1]).square().mean(),
    }


def _share_a_core() -> None:
    """Train on one core, on which a child process computes, too."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[-1]})
    parent = os.getpid()
    if os.fork() == 0:
        while os.getppid() == parent:
            work(0.1)
        os._exit(0)
