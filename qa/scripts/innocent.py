"""Ordinary training scripts without a fault: `python innocent.py KIND`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

KIND, SECONDS = sys.argv[1], float(os.environ.get("SCRIPT_S", "1e9"))
# Of the loss; where it is large, a gradient scaler begins with a scale that is too large.
WEIGHT = 1e4 if KIND == "scales" else 1.0


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True)
        self.body, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(128, 1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.body(x)).mean(1)
        return found


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.LSTM(64, 128, batch_first=True), nn.Linear(128, 1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.body(x)[0][:, -1])
        return found


class Tokens(nn.Module):
    """A batch reads most rows of its table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2000, 128)
        self.body = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 1))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.body(self.table((x * 1000).long() % 2000)).mean(1)
        return found


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 1536), nn.ReLU(), nn.Linear(1536, 1536), nn.ReLU(), nn.Linear(1536, 1))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 1),
    )  # fmt: skip


# Kind -> (model, shape of an item, batch).
KINDS = {
    "dense": (dense, (64,), 64),
    "convolutions": (convolutions, (3, 32, 32), 16),
    "transformer": (Transformer, (32, 128), 8),
    "recurrent": (Recurrent, (20, 64), 16),
    "accumulates": (dense, (64,), 64),
    "worker": (convolutions, (3, 32, 32), 16),
    "generator": (convolutions, (3, 32, 32), 16),
    "evaluates": (convolutions, (3, 32, 32), 16),
    "scales": (dense, (64,), 64),
    "stream": (convolutions, (3, 32, 32), 16),
    "one-batch": (convolutions, (3, 32, 32), 16),
    "logs": (dense, (64,), 64),
    "tokens": (Tokens, (64,), 64),
}


class Stream(IterableDataset):  # type: ignore[type-arg]
    """Divided among its workers."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        info = get_worker_info()
        first, every = (0, 1) if info is None else (info.id, info.num_workers)
        for index in range(first, len(self.x), every):
            yield self.x[index], torch.zeros(1)


def endless(x: Tensor, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches by slices, without a DataLoader."""
    while True:
        for place in range(0, len(x), batch):
            yield x[place : place + batch], torch.zeros(len(x[place : place + batch]), 1)


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    make, shape, batch = KINDS[KIND]
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2 / WEIGHT, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, enabled=KIND == "scales")
    x = torch.randn(batch if KIND == "one-batch" else 2048, *shape)
    data = TensorDataset(x, torch.zeros(len(x), 1))
    begin, step, micro = time.perf_counter(), 0, 4 if KIND == "accumulates" else 1
    while True:
        workers = 1 if KIND == "worker" else 0
        batches = endless(x, batch) if KIND == "generator" else DataLoader(
            data, batch, shuffle=True, num_workers=workers, persistent_workers=bool(workers)
        )  # fmt: skip
        if KIND == "stream":
            batches = DataLoader(Stream(x), batch, num_workers=2)
        for items, target in batches:
            loss = nn.functional.mse_loss(model(items), target)
            scaler.scale(WEIGHT * loss / micro).backward()
            step += 1
            if KIND == "logs" and step % 100 == 0:
                print(f"step {step}: loss {loss.item():.4g}", flush=True)
            if step % micro == 0:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            if time.perf_counter() - begin > SECONDS:
                return
        if KIND == "evaluates":
            model.eval()
            with torch.no_grad():
                model(x[:64])
            model.train()


if __name__ == "__main__":
    main()
