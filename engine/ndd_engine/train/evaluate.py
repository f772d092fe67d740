"""One pass over the evaluation data."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from ndd_engine.workloads.base import Workload

from .loader import to_device
from .optim import Precision


@dataclass(frozen=True)
class Result:
    """Metrics by name, the headline first; batches that were looked at; seconds."""

    metrics: dict[str, float]
    batches: int
    seconds: float

    @property
    def headline(self) -> tuple[str, float]:
        return next(iter(self.metrics.items()))


def evaluate(
    workload: Workload,
    loader: DataLoader[Any],
    device: torch.device,
    precision: Precision,
    seed: int,
    batches: int | None,
    between: Callable[[], None],
) -> Result:
    """Evaluate without touching the training's state: no graph, no dropout, its own random numbers.

    between: called after every batch, so that a long evaluation is seen and can be left (it may raise).
    """
    model = workload.model
    begin = time.perf_counter()
    metric = workload.metric()
    count = 0
    model.eval()
    cards = [device] if device.type == "cuda" else []
    try:
        # An objective may draw noise: the same noise at each evaluation, and none of the training's.
        with torch.random.fork_rng(devices=cards), torch.inference_mode():
            torch.manual_seed(seed)
            for batch in loader:
                batch = to_device(batch, device)
                with precision.autocast or nullcontext():
                    output = workload.forward(model, batch)
                    loss = workload.loss(output, batch)
                metric.update(output, batch, loss)
                count += 1
                between()
                if batches is not None and count >= batches:
                    break
            metrics = metric.result()
    finally:
        model.train()
    return Result(metrics, count, time.perf_counter() - begin)
