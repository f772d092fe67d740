"""Trains from a planted pipeline with given settings of its loader, and prints the batches a second of each.

    python loader_grid.py NAME SECONDS SETTINGS...

SETTINGS is a JSON object with workers, prefetch, in_order, persistent and cache. Each trains for so many seconds.
"""

from __future__ import annotations

import json
import sys
import time
import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

BATCH = 8
# The part of the seconds that passes before batches count.
WARM = 0.25
BLOB = zlib.compress(bytes(number * number % 9 for number in range(120_000)))


@dataclass(frozen=True)
class Pipeline:
    """decodes, wait_s: what an item decompresses and waits. every, slow_s: one item in so many waits so much longer.

    numbers: of an item. items: of a pass. products: of matrices in a step.
    """

    decodes: int = 0
    wait_s: float = 0.0
    every: int = 0
    slow_s: float = 0.0
    numbers: int = 64
    items: int = 100_000
    products: int = 2


PIPELINES = {
    "decode": Pipeline(decodes=6),
    "latency": Pipeline(wait_s=0.002),
    "enough": Pipeline(wait_s=0.0002, products=12),
    "bursts": Pipeline(wait_s=0.0002, every=400, slow_s=0.08),
    "uneven": Pipeline(every=8, slow_s=0.015),
    "passes": Pipeline(wait_s=0.001, items=64),
    "light": Pipeline(),
    "large": Pipeline(numbers=400_000),
    "repeats": Pipeline(decodes=6, items=256),
    "training": Pipeline(wait_s=0.0002, products=30),
}


class Items(Dataset[Tensor]):
    """The items of a pipeline, which do not change."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline

    def __len__(self) -> int:
        return self.pipeline.items

    def __getitem__(self, index: int) -> Tensor:
        pipeline = self.pipeline
        for _ in range(pipeline.decodes):
            zlib.decompress(BLOB)
        slow = pipeline.every and index * 7919 % pipeline.every == 0
        if wait_s := pipeline.wait_s + (pipeline.slow_s if slow else 0.0):
            time.sleep(wait_s)
        return torch.full((pipeline.numbers,), index / pipeline.items)


def rate(pipeline: Pipeline, settings: dict[str, Any], seconds: float) -> float:
    """Batches a second of a training with these settings, without its beginning."""
    data: Any = Items(pipeline)
    if settings.get("cache"):
        data = [data[index] for index in range(len(data))]
    workers = settings["workers"]
    prefetch, persistent = settings.get("prefetch", 2), settings.get("persistent", False)
    loader = DataLoader(
        data, BATCH, shuffle=True, num_workers=workers, prefetch_factor=prefetch if workers else None,
        in_order=settings.get("in_order", True), persistent_workers=persistent and workers > 0,
    )  # fmt: skip
    model, heavy = nn.Linear(64, 1), torch.rand(400, 400)
    optimizer = torch.optim.SGD(model.parameters(), 1e-9)
    begin = time.perf_counter()
    counted, since = 0, 0.0
    while True:
        for x in loader:
            for _ in range(pipeline.products):
                heavy @ heavy
            optimizer.zero_grad()
            model(x[:, :64]).mean().backward()
            optimizer.step()
            t = time.perf_counter()
            if since:
                counted += 1
            elif t - begin > WARM * seconds:
                since = t
            if t - begin > seconds and counted:
                return counted / (t - since)


def main() -> None:
    """Print a line for each of the settings."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    name, seconds, *each = sys.argv[1:]
    for settings in each:
        print(rate(PIPELINES[name], json.loads(settings), float(seconds)), flush=True)


if __name__ == "__main__":
    main()
