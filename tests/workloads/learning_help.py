"""Trains and evaluates workloads with a plain loop."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader

from ndd_engine.workloads.base import Workload


def train(workload: Workload, steps: int, lr: float, micro: int, clip: float = math.inf) -> None:
    """So many steps over the items, in an order of its own seed."""
    optimizer = torch.optim.AdamW(workload.model.parameters(), lr=lr)
    order = torch.Generator().manual_seed(0)
    loader: Any = DataLoader(
        workload.train_data, micro, shuffle=True, drop_last=True, generator=order, collate_fn=workload.collate
    )
    done = 0
    while done < steps:
        for batch in islice(loader, steps - done):
            loss = workload.loss(workload.forward(workload.model, batch), batch)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(workload.model.parameters(), clip)
            optimizer.step()
            done += 1


@torch.no_grad()
def evaluate(
    workload: Workload, predict: Callable[[Any], Any] | None = None, micro: int = 256
) -> dict[str, float]:
    """The metric of the model, or of `predict` in its place."""
    workload.model.eval()
    metric = workload.metric()
    for batch in DataLoader(workload.eval_data, micro, collate_fn=workload.collate):  # type: ignore[arg-type]
        output = predict(batch) if predict else workload.forward(workload.model, batch)
        metric.update(output, batch, workload.loss(output, batch))
    workload.model.train()
    return metric.result()
