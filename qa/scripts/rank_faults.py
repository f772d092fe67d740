"""A workload of several ranks with faults: a rank has the one that the file `fault-RANK` in its folder names.

The file is looked for in every step, so that a fault can be planted at any time; "KIND STEP" plants it at that call of
the loss. Steps take about 12 ms and draw random numbers on each rank.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

RANK = int(os.environ.get("RANK", "0"))
FILE = Path(f"fault-{RANK}")
PLACES = {"sleep": "item", "raise": "item"}


class Faults:
    """Carries out the fault of this rank where it belongs: in an item, or in the loss."""

    calls = 0

    def at(self, place: str) -> str:
        """The fault to carry out here, "" for none."""
        self.calls += place == "loss"
        try:
            kind, _, step = FILE.read_text().partition(" ")
        except OSError:
            return ""
        if PLACES.get(kind, "loss") != place or (step and self.calls < int(step)):
            return ""
        FILE.unlink()
        return kind


faults = Faults()


class Items(Dataset):  # type: ignore[type-arg]
    """Numbers, and what becomes of them."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(count, 16, generator=generator)
        self.y = self.x.sin().sum(dim=1, keepdim=True)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        kind = faults.at("item")
        if kind == "sleep":
            time.sleep(3600)
        elif kind == "raise":
            raise ValueError("the planted error")
        return self.x[index], self.y[index]


def no_compiler(*_: Any, **_more: Any) -> Any:
    """In place of torch.compile."""
    raise RuntimeError("the planted error of a compiler")


def endless() -> None:
    """Never returns."""
    while True:
        sum(range(1000))


def loss(output: Tensor, batch: Any) -> Tensor:
    """The squared error, after a pause that stands for a larger model."""
    time.sleep(0.01)
    found = (output - batch[1]).square().mean()
    kind = faults.at("loss")
    if kind == "loop":
        endless()
    elif kind == "lock":
        ctypes.PyDLL(None).sleep(3600)  # holds the interpreter lock
    elif kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "extra":
        dist.broadcast(torch.zeros(3), 0)  # one that the other ranks do not make
    elif kind == "nan":
        found = found * float("nan")
    elif kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    return found


def factory(settings: Any) -> dict[str, Any]:
    """Of `ndd-console train --workload rank_faults:factory`."""
    if settings.option("refuse", -1) == RANK:
        raise RuntimeError("the planted error of a factory")
    if settings.option("killed", -1) == RANK:
        os.kill(os.getpid(), signal.SIGKILL)
    if settings.option("uncompiled", -1) == RANK:
        torch.compile = no_compiler
    time.sleep(settings.option("slow_s", 0.0))
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 1))
    return {"model": model, "train_data": Items(4096), "eval_data": Items(256), "loss": loss}
