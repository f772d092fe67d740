"""One pass over the evaluation data."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from ndd_engine.train.data.loader import EvalBatches, to_device
from ndd_engine.train.step.precision import Precision
from ndd_engine.workloads.base import Workload


@dataclass(frozen=True)
class Result:
    """Metrics by name, headline first; number of batches; seconds; whether inference mode was used."""

    metrics: dict[str, float]
    batches: int
    seconds: float
    inference_mode: bool

    @property
    def headline(self) -> tuple[str, float]:
        return next(iter(self.metrics.items()))


def evaluate(
    workload: Workload,
    loader: EvalBatches,
    device: torch.device,
    precision: Precision,
    seed: int,
    batches: int | None,
    inference_mode: bool,
    between: Callable[[], None],
) -> Result:
    """Evaluate without changing the training state: no gradients, no dropout, separate random numbers.

    inference_mode: use torch.inference_mode instead of no_grad. between: called after every batch, to report progress
    and to stop (it may raise).
    """
    model = workload.model
    begin = time.perf_counter()
    metric = workload.metric()
    count = 0
    model.eval()
    cards = [device] if device.type == "cuda" else []
    try:
        # A loss may draw noise: use the same noise at each evaluation, without advancing the training's generator.
        quiet = torch.inference_mode() if inference_mode else torch.no_grad()
        with torch.random.fork_rng(devices=cards), quiet:
            torch.manual_seed(seed)
            inference = torch.is_inference_mode_enabled()
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
    return Result(metrics, count, time.perf_counter() - begin, inference)
