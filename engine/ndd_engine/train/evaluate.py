"""One pass over the evaluation data."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ndd_engine.config.schema import Config, EvaluateSection
from ndd_engine.errors import TrainingError, said, shortened
from ndd_engine.measure.reporting import LossReader
from ndd_engine.processes import limit_of
from ndd_engine.record.events import Event, MarkEvent, TextsEvent
from ndd_engine.text import number, printable
from ndd_engine.workloads.base import Batch, MeanLoss, Weight, Workload
from ndd_engine.workloads.interface import kind, place
from ndd_engine.workloads.problems import Problems
from ndd_engine.workloads.result import EVALUATION, Carry, TrainingParts

from .checkpoint_state import kept_buffers, kept_random
from .data.loader import EvalBatches, to_device
from .rehearsal import kept_training
from .step.stepper import Stepper


@dataclass(frozen=True)
class EvaluationResult:
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
        text = shortened(", ".join(f"{name} {number(value, 4)}" for name, value in self.metrics.items()))
        data = {"metrics": self.metrics, "seconds": self.seconds, "batches": self.batches, "better": better}
        return MarkEvent("evaluation", step, f"evaluation at step {step:,}: {text}", data)


class MissingMetricError(TrainingError):
    """An evaluation has no metric with the name `evaluate.metric`."""


def evaluate(
    stepper: Stepper,
    loader: EvalBatches,
    between: Callable[[], None],
    parts_of_all: Callable[[Any], list[Any]] | None = None,
    most: int | None = None,
) -> EvaluationResult:
    """Evaluate without changing the training state: no gradients, no dropout, separate random numbers.

    between: called after every batch, to report progress and to stop (it may raise). parts_of_all: of several ranks,
    waits for the parts of all of them. Each evaluates a part of the batches if the metric can be merged and the order
    is the engine's, otherwise all of them. A rank that has fewer than another calls a sharded model as often as that
    one, without counting the result. most: a number of batches in place of `evaluate.batches`.
    """
    workload, device, config = stepper.workload, stepper.device, stepper.config
    model, carry = workload.model, Carry(workload)
    batches = config.evaluate.batches if most is None else most
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
    return EvaluationResult(metrics, count, time.perf_counter() - begin, inference)


def better_of(section: EvaluateSection, workload: Workload) -> str:
    """ "lower" or "higher": how the metric that decides improves."""
    return workload.better if section.mode is None else {"min": "lower", "max": "higher"}[section.mode]


def monitored_first(metrics: dict[str, float], name: str | None) -> dict[str, float]:
    """The metrics with `evaluate.metric` first, so that it is the headline. Raises MissingMetricError."""
    if name is None:
        return metrics
    if name not in metrics:
        there = shortened(", ".join(metrics))
        raise MissingMetricError(
            f"evaluate.metric = {name!r}: the evaluation has no such metric; allowed: {there}"
        )
    return {name: metrics[name], **metrics}


def check_metric(
    stepper: Stepper,
    loader: EvalBatches,
    between: Callable[[], None] = lambda: None,
    of_first: Callable[[str], str] = str,
) -> None:
    """Before training, raise TrainingError if evaluations have no `evaluate.metric`; changes no state of the training.

    One batch is evaluated. Names may depend on the data: where that batch has no such metric, a whole evaluation
    decides. Other errors are left to the evaluations. of_first: of several ranks, what the first one says.
    """
    section = stepper.config.evaluate
    used = section.every_steps or section.every_epochs or section.at_end
    if section.metric is None or section.batches == 0 or not used:
        return
    missing = ""
    with kept_training(stepper), kept_buffers(stepper.model):
        for most in (1, section.batches):
            try:
                missing = ""
                evaluate(stepper, loader, between, most=most)
            except MissingMetricError as error:
                missing = str(error)
            except Exception:  # noqa: BLE001  a metric may need more than one batch
                pass
            missing = of_first(missing)
            if not missing:
                return
    raise MissingMetricError(missing)


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


MOST_SAMPLES = 50
SAMPLE_LENGTH = 4000


@dataclass
class Monitor:
    """Early stopping on `evaluate.metric`. best: its best value so far; waited: evaluations since then."""

    section: EvaluateSection
    lower: bool
    best: float | None = None
    waited: int = 0

    def see(self, name: str, value: float) -> str | None:
        """Count an evaluation; returns why to stop, or None. NaN is no improvement."""
        if self.best is None:
            better = value == value
        else:
            gain = self.best - value if self.lower else value - self.best
            better = gain > self.section.min_delta
        if better:
            self.best, self.waited = value, 0
            return None
        self.waited += 1
        if not self.section.patience or self.waited < self.section.patience:
            return None
        times = f"{self.waited} evaluation{'s' if self.waited > 1 else ''}"
        since = "" if self.best is None else f" since its best value {number(self.best, 4)}"
        return f"{printable(name)} has not improved in {times}{since} (evaluate.patience)"

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"best": self.best, "waited": self.waited}

    def load(self, state: dict[str, Any]) -> None:
        """Restore `state`."""
        self.best, self.waited = state["best"], state["waited"]


def check_used(parts: TrainingParts, config: Config) -> None:
    """Raises ConfigError for callbacks and settings that no evaluation or checkpoint of this run would use."""
    problems, evaluate, checkpoint = Problems(parts.where or "run"), config.evaluate, config.checkpoint
    in_training = evaluate.every_steps or evaluate.every_epochs
    saves = checkpoint.every_steps or checkpoint.every_epochs or checkpoint.every_minutes or checkpoint.at_end
    off = {
        "evaluations": [] if in_training or evaluate.at_end else ["on_evaluate", "samples"],
        "checkpoints": [] if saves else ["on_checkpoint"],
    }
    for what, names in off.items():
        section = what.removesuffix("s").replace("evaluation", "evaluate")
        for name in names:
            if getattr(parts, name) is not None:
                advice = f"set {section}.every_epochs or {section}.at_end, or remove it"
                problems.add(name, f"is never called, since {what} are off", suggestion=advice)
    if evaluate.patience and not in_training:
        message = "is not used, since there are no evaluations during the training"
        advice = "set evaluate.every_epochs or evaluate.every_steps"
        Problems("workload", found=problems.found).add(
            "evaluate.patience", message, evaluate.patience, "0", advice
        )
    problems.check()


class Callbacks:
    """The callbacks of a factory, and what depends on evaluations.

    on: whether callbacks are called and training may end early; not in trials and predictions, which measure steps.
    early: why training ends before its last step. judged: the step of the last evaluation that the monitor, the
    schedulers and on_evaluate saw. fail: called with the name of a callback and its error; returns what to raise.
    """

    def __init__(
        self,
        stepper: Stepper,
        on: bool,
        put: Callable[[Event], None],
        losses: LossReader,
        better: str,
        fail: Callable[[str, BaseException], TrainingError],
    ) -> None:
        self.stepper, self.on = stepper, on
        self.early: str | None = None
        # Why this process wants training to end early; one of several ranks ends once all of them know it.
        self.wanted: str | None = None
        self.alone = True
        self.judged = 0
        self.monitor = Monitor(stepper.config.evaluate, better == "lower")
        self._put, self._losses, self._fail = put, losses, fail
        self._parts: TrainingParts = stepper.workload_parts
        self.each_step = on and self._parts.on_step is not None

    def step(self) -> None:
        """After each optimizer step."""
        with self._calling("on_step"):
            assert self._parts.on_step is not None
            self._parts.on_step(self.stepper.training)
        self.take_logged()

    def take_logged(self) -> None:
        """Take what the user's own code logged, and whether it asked to stop."""
        training = self.stepper.training
        if training.logged:
            self._losses.log(training.logged)
            training.logged = []
        if training.stopping is not None:
            if self.on:
                self._end(training.stopping)
            training.stopping = None

    def _end(self, reason: str) -> None:
        self.wanted = reason
        if self.alone:
            self.early = reason

    def judge(self, step: int, result: EvaluationResult) -> None:
        """Show an evaluation that the configuration asks for to what depends on it, once; others change nothing."""
        if self.judged >= step:
            return
        self.judged = step
        name, value = result.headline
        self.stepper.optimizer.ended(EVALUATION, value)
        if (reason := self.monitor.see(name, value)) is not None and self.on:
            self._end(reason)
        self.evaluated(result.metrics)

    def evaluated(self, metrics: dict[str, float]) -> None:
        """After an evaluation."""
        if self.on and self._parts.on_evaluate is not None:
            with self._calling("on_evaluate"):
                self._parts.on_evaluate(dict(metrics), self.stepper.training)
            self.take_logged()

    def saved(self, path: Path) -> None:
        """After a checkpoint was written."""
        if self.on and self._parts.on_checkpoint is not None:
            with self._calling("on_checkpoint"):
                self._parts.on_checkpoint(path, self.stepper.training)
            self.take_logged()

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"evaluated": self.judged, "monitor": self.monitor.state()}

    def load(self, state: dict[str, Any]) -> None:
        """Restore `state`."""
        self.judged = state["evaluated"]
        self.monitor.load(state["monitor"])

    def samples(self, step: int) -> None:
        """After an evaluation: record the texts that the factory's `samples` returns."""
        if not self.on or self._parts.samples is None:
            return
        model, seed = self.stepper.model, self.stepper.config.run.seed
        model.eval()
        try:
            # The same random numbers each time, and without a trace in the training's.
            with kept_random(self.stepper.device), torch.no_grad(), self._calling("samples"):
                torch.manual_seed(seed)
                texts = _checked(self._parts.samples(model))
        finally:
            model.train()
        self._put(TextsEvent(step, texts))

    @contextmanager
    def _calling(self, name: str) -> Iterator[None]:
        try:
            yield
        except (Exception, SystemExit) as error:
            raise self._fail(name, error) from error


def failure(name: str, step: int, parts: TrainingParts, error: BaseException) -> str:
    """The message for a callback that raised: its place, its name and its error."""
    text = limit_of(error) or (str(error) if isinstance(error, TrainingError) else said(error))
    return f"{place(error) or parts.where}: {name} failed at step {step:,}: {text}"


def _checked(found: Any) -> list[str]:
    """The samples as texts. Raises TypeError if they are not."""
    texts = [found] if isinstance(found, str) else found
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
        raise TypeError(f"samples(model) returned {kind(found)}, not a list of strings")
    return [_lines(text) for text in texts[:MOST_SAMPLES]]


def _lines(text: str) -> str:
    """A sample, printable apart from its line breaks, and at most SAMPLE_LENGTH characters."""
    shown = "\n".join(map(printable, text[:SAMPLE_LENGTH].replace("\r\n", "\n").split("\n")))
    return shown if len(text) <= SAMPLE_LENGTH else f"{shown}…"
