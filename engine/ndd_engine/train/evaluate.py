"""One pass over the evaluation data."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ndd_engine.config.schema import EvaluateSection
from ndd_engine.errors import TrainingError, shortened
from ndd_engine.record.events import MarkEvent
from ndd_engine.workloads.base import Batch, MeanLoss, Weight, Workload
from ndd_engine.workloads.own_module import kind
from ndd_engine.workloads.training_parts import Carry

from .data.loader import EvalBatches, to_device
from .random_state import kept_random
from .step.stepper import Stepper


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

    def mark(self, step: int, better: str) -> MarkEvent:
        """For the record. better: "lower" or "higher"."""
        text = shortened(", ".join(f"{name} {value:.4g}" for name, value in self.metrics.items()))
        data = {"metrics": self.metrics, "seconds": self.seconds, "batches": self.batches, "better": better}
        return MarkEvent("evaluation", step, f"evaluation at step {step:,}: {text}", data)


def evaluate(
    stepper: Stepper,
    loader: EvalBatches,
    between: Callable[[], None],
    parts_of_all: Callable[[Any], list[Any]] | None = None,
) -> Result:
    """Evaluate without changing the training state: no gradients, no dropout, separate random numbers.

    between: called after every batch, to report progress and to stop (it may raise). parts_of_all: of several ranks,
    waits for the parts of all of them. Each evaluates a part of the batches if the metric can be merged and the order
    is the engine's, otherwise all of them. A rank that has fewer than another calls a sharded model as often as that
    one, without counting the result.
    """
    workload, device, config = stepper.workload, stepper.device, stepper.config
    model, batches, carry = workload.model, config.evaluate.batches, Carry(workload)
    begin = time.perf_counter()
    own_step = stepper.workload_parts.eval_step
    metric: Any = (
        workload.metric() if own_step is None else _Means(stepper.workload_parts.where, workload.weight)
    )
    strategy, own = stepper.strategy, None
    if parts_of_all is not None and loader.shares and getattr(metric, "mergeable", False):
        own = loader.divide(batches, strategy is not None and strategy.gathers)
    count = 0
    model.eval()
    try:
        # A loss may draw noise: use the same noise at each evaluation, without advancing the training's generators.
        quiet = torch.inference_mode() if config.evaluate.inference_mode else torch.no_grad()
        with kept_random(device), quiet:
            torch.manual_seed(config.run.seed)
            random.seed(config.run.seed)
            inference = torch.is_inference_mode_enabled()
            for count, batch in enumerate(loader if batches != 0 else (), 1):
                batch = to_device(batch, device)
                with stepper.precision.autocast or nullcontext():
                    if own_step is not None:
                        output, loss = carry.call("eval_step", own_step, model, batch), None
                    else:
                        output = carry.forward(model, batch)
                        loss = workload.loss(output, batch)
                if own is None or count <= own:
                    metric.update(output, batch, loss)
                between()
                if own is None and batches is not None and count >= batches:
                    break
            if parts_of_all is not None and own is not None:
                parts = parts_of_all([own, metric.parts()])
                count = sum(part[0] for part in parts)
                metric.merge([part[1] for part in parts])
            metrics = monitored_first(metric.result(), config.evaluate.metric)
    finally:
        model.train()
    return Result(metrics, count, time.perf_counter() - begin, inference)


def better_of(section: EvaluateSection, workload: Workload) -> str:
    """ "lower" or "higher": how the first metric improves."""
    return workload.better if section.mode is None else {"min": "lower", "max": "higher"}[section.mode]


def monitored_first(metrics: dict[str, float], name: str | None) -> dict[str, float]:
    """The metrics with `evaluate.metric` first, so that it is the headline. Raises TrainingError if it is missing."""
    if name is None:
        return metrics
    if name not in metrics:
        there = shortened(", ".join(metrics))
        raise TrainingError(
            f"evaluate.metric = {name!r}: the evaluation has no such metric; allowed: {there}"
        )
    return {name: metrics[name], **metrics}


class _Means:
    """Means of what a factory's `eval_step` returns, weighted by `weight` or the batch size."""

    def __init__(self, where: str, weight: Weight | None) -> None:
        self._where, self._weight = where, weight
        self._means: dict[str, MeanLoss] = {}

    def update(self, found: Any, batch: Batch, _loss: None) -> None:
        """found: a scalar, or scalars by name. Raises TrainingError if it is neither."""
        values = found if isinstance(found, Mapping) else {"loss": found}
        for name, value in values.items():
            scalar = isinstance(value, Tensor) and value.numel() == 1
            if not scalar and (isinstance(value, bool) or not isinstance(value, (int, float))):
                shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
                advice = "return a scalar, or a dict of scalars"
                raise TrainingError(f"{self._where}: eval_step returned {kind(value)}{shape}; {advice}")
            mean = self._means.setdefault(shortened(str(name), 80), MeanLoss(weight=self._weight))
            mean.update(None, batch, torch.as_tensor(value).reshape(()))

    mergeable = True

    def parts(self) -> Any:
        return {name: mean.parts() for name, mean in self._means.items()}

    def merge(self, parts: Sequence[Any]) -> None:
        names = dict.fromkeys(name for part in parts for name in part)
        self._means = {name: MeanLoss(weight=self._weight) for name in names}
        for name, mean in self._means.items():
            mean.merge([part[name] for part in parts if name in part])

    def result(self) -> dict[str, float]:
        if not self._means:
            raise TrainingError(f"{self._where}: eval_step returned no value")
        return {name: mean.result()["loss"] for name, mean in self._means.items()}
