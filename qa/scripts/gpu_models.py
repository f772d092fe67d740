"""Own models for the first checks of `make gpu`."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset


def fallback(settings: Any) -> dict[str, Any]:
    """A loss that waits for the GPU, so its step cannot be captured; dropout draws from the random state of the GPU.

    Option event: it waits in a way that only the capture itself refuses, for an event that was recorded in it.
    """
    x = torch.rand(2000, 64)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 1))
    by_event = settings.option("event", 0)

    def loss(out: Tensor, batch: Any) -> Tensor:
        value = (out - batch[1]).square().mean()
        if by_event and out.is_cuda:
            event = torch.cuda.Event()
            event.record()
            event.synchronize()
        elif not by_event:
            value = value * (1.0 if value.item() < 1e9 else 0.5)
        return value

    return {"model": model, "train_data": TensorDataset(x, x.sum(dim=1, keepdim=True)), "loss": loss}


class Slow(Dataset[Tensor]):
    """Each item takes half a millisecond of the processor: a batch of 64 takes 32 ms."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> Tensor:
        begin = time.perf_counter()
        while time.perf_counter() - begin < 0.0005:
            pass
        return torch.full((64,), float(index % 7))


class Net(nn.Module):
    """Computes an item in so many rows."""

    def __init__(self, width: int, rows: int) -> None:
        super().__init__()
        self.rows = rows
        self.first, self.middle = nn.Linear(64, width), nn.Linear(width, width)
        self.last = nn.Linear(width, 1)

    def forward(self, batch: Tensor) -> Tensor:
        x = self.first(batch).repeat(self.rows, 1)
        for _ in range(12):
            x = torch.relu(self.middle(x))
        found: Tensor = self.last(x)
        return found


def slow(settings: Any) -> dict[str, Any]:
    """Slow items. Options: width and rows of the model."""
    model = Net(settings.option("width", 64), settings.option("rows", 1))
    return {"model": model, "train_data": Slow(), "loss": lambda out, batch: out.square().mean()}
