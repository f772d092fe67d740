"""One pass over the evaluation data."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from ndd_engine.train.data.loader import EvalBatches, to_device
from ndd_engine.train.step.stepper import Stepper

from .random_state import kept_random


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

    @property
    def not_finite(self) -> str:
        """A warning if the headline metric or the loss is NaN or infinite; "" otherwise. Others may be undefined."""
        wanted = dict.fromkeys((self.headline[0], "loss"))
        bad = [
            f"{name} is {self.metrics[name]}"
            for name in wanted
            if not math.isfinite(self.metrics.get(name, 0.0))
        ]
        if not bad:
            return ""
        return f"evaluation: {', '.join(bad)}; check the evaluation data and the loss (it cannot be the best one)"


def evaluate(stepper: Stepper, loader: EvalBatches, between: Callable[[], None]) -> Result:
    """Evaluate without changing the training state: no gradients, no dropout, separate random numbers.

    between: called after every batch, to report progress and to stop (it may raise).
    """
    workload, device, config = stepper.workload, stepper.device, stepper.config
    model, batches = workload.model, config.evaluate.batches
    begin = time.perf_counter()
    metric = workload.metric()
    count = 0
    model.eval()
    try:
        # A loss may draw noise: use the same noise at each evaluation, without advancing the training's generators.
        quiet = torch.inference_mode() if config.evaluate.inference_mode else torch.no_grad()
        with kept_random(device), quiet:
            torch.manual_seed(config.run.seed)
            random.seed(config.run.seed)
            inference = torch.is_inference_mode_enabled()
            for count, batch in enumerate(loader, 1):
                batch = to_device(batch, device)
                with stepper.precision.autocast or nullcontext():
                    output = workload.forward(model, batch)
                    loss = workload.loss(output, batch)
                metric.update(output, batch, loss)
                between()
                if batches is not None and count >= batches:
                    break
            metrics = metric.result()
    finally:
        model.train()
    return Result(metrics, count, time.perf_counter() - begin, inference)
