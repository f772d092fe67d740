"""Your own workload: a factory receives `Settings` and returns a model and its data, which become a `Workload`.

The factory returns an object, a dict or a SimpleNamespace. Required:

    model            a torch.nn.Module, on the CPU
    train_data       a map-style dataset (__len__ and __getitem__), an IterableDataset, or a DataLoader
    loss             a function (output, batch) -> mean loss, a scalar tensor

Optional:

    eval_data        like train_data; default: the last 10 % of train_data are kept for evaluation
    shuffle, sampler, batch_sampler
                     the order of train_data, as in torch's DataLoader; default: shuffled in every epoch
    forward          a function (model, batch) -> output; default: model(batch) for a tensor, model(batch[0]) for a
                     tuple or list, model(**batch) for a dict
    metric           a function () -> an object with update(output, batch, loss) and result() -> {name: number}; the
                     first value is the headline metric; default: the mean loss
    better           "lower" or "higher": which way the headline metric improves; default: "lower"
    collate          a function from a list of items to a batch; default: that of the DataLoader, or default_collate
    weight           a function (batch) -> what the loss of a batch is a mean over, such as its number of tokens without
                     padding; default: its items. Steps with several micro-batches and the mean loss use it
    item, token      names of an item and of its tokens ("sentence", "word")
    tokens_per_item  mean number of tokens per item; required with token
    parts            {"encoder": model.encoder}: modules that are timed separately within forward
    epochs_differ    True if items change every epoch: item i of epoch e has the index e * len(train_data) + i
    describe_model, describe_data, notes
                     strings to show (notes: a list), or functions without arguments that return them
"""

from __future__ import annotations

import difflib
import math
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from ndd_engine.config.schema import Config
from ndd_engine.config.workload_sections import OwnSection
from ndd_engine.errors import TrainingError, shortened
from ndd_engine.text import printable

from . import own_items, own_module
from .base import Batch, Collate, MeanLoss, Metric, Parted, Weight, on_host
from .order import item_count
from .own_module import calling, kind
from .own_result import FactoryResult, read_result
from .own_training import Values
from .problems import Problems, Progress, check_step
from .training import TrainingParts

T = TypeVar("T")
_KINDS: dict[type, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "a whole number"),
    float: ((float, int), "a number"),
    str: ((str,), "a string"),
    list: ((list,), "a list"),
    tuple: ((list,), "a list"),
    dict: ((dict,), "a table"),
}


class Options(Mapping[str, Any]):
    """The table `[workload.options]`: a read-only mapping that records which options are read.

    read: names of the options read so far. wrong: options of a wrong type, with what is allowed.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)
        self.read: set[str] = set()
        self.wrong: dict[str, str] = {}

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        self.read.update(self._values)
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def option(self, name: str, default: Any) -> Any:
        """The value, or the default if the option is not set or has another type, which is recorded in `wrong`."""
        value: Any = self.get(name)
        if value is None:
            return default
        kinds, allowed = _KINDS.get(type(default), ((type(value),), ""))
        if type(value) not in kinds:  # not isinstance: true is no number for a user
            self.wrong[name] = allowed
            return default
        return type(default)(value) if isinstance(default, (float, tuple)) else value

    def unused(self, problems: Problems) -> None:
        """Adds a problem for each option that is set but was not read."""
        read = ", ".join(sorted(self.read))
        tail = f", which reads {printable(read)}" if read else ", which reads no options"
        for name, value in self._values.items():
            if name not in self.read:
                close = difflib.get_close_matches(name, self.read, n=1)
                advice = (
                    f"did you mean {printable(close[0])}?"
                    if close
                    else "remove it, or read it in the factory"
                )
                message = f"is not used by the factory{tail}"
                problems.add(f"workload.options.{name}", message, value, suggestion=advice)


@dataclass(frozen=True)
class Settings:
    """The settings of a run: the only argument of your factory.

    Attributes:
        sequence: `batch.sequence`, the length of an item in tokens (samples, characters, words, …).
        micro: `batch.micro`, the number of items in a micro-batch.
        seed: `run.seed`. The generators of torch, random and NumPy are seeded with it before the factory is called; use
            it to seed generators of your own.
        data: `workload.data`, a string with a meaning of your choice, such as a path; "builtin" if it is not set.
        size: `workload.size`, a string with a meaning of your choice, such as "small"; None if it is not set.
        options: `[workload.options]`, a read-only mapping of your own options; `option` reads one with a default.
        max_steps, epochs: `run.max_steps` and `run.epochs`; None if not set.
        optimizer, schedule: the sections `[optimizer]` and `[schedule]`, as in `settings.optimizer.lr`, for a factory
            that returns its own optimizer. Values that are set and neither used nor read are an error.

    Example::

        def factory(settings: Settings) -> SimpleNamespace:
            width = settings.option("width", 64)  # --set workload.options.width=128
            return SimpleNamespace(
                model=Net(width),
                train_data=Lines(settings.data, settings.sequence),
                loss=lambda output, batch: nn.functional.cross_entropy(output, batch[1]),
            )
    """

    sequence: int
    micro: int
    seed: int
    data: str
    size: str | None
    options: Options
    max_steps: int | None = None
    epochs: int | None = None
    optimizer: Any = None
    schedule: Any = None

    @overload
    def option(self, name: str) -> Any: ...
    @overload
    def option(self, name: str, default: T) -> T: ...
    def option(self, name: str, default: Any = None) -> Any:
        """The option `workload.options.<name>`, or `default` if it is not set.

        A value whose type differs from the default's is an error (an int is allowed for a float, a list for a tuple).
        """
        return self.options.option(name, default)


class OwnMetric:
    """A user's metric and the mean loss; implements Metric."""

    def __init__(self, metric: Metric, loss: MeanLoss, error: Callable[[str], TrainingError]) -> None:
        self._metric, self._loss, self._error = metric, loss, error

    def update(self, output: Any, batch: Batch, loss: Tensor) -> None:
        self._loss.update(output, batch, loss)
        self._metric.update(output, batch, loss)

    @property
    def mergeable(self) -> bool:
        """Whether the user's metric can be merged, see Metric."""
        found = self._metric
        return bool(getattr(found, "mergeable", True)) and hasattr(found, "parts") and hasattr(found, "merge")

    def parts(self) -> Any:
        """Of the user's metric and of the loss, see Metric."""
        found: Any = self._metric
        return [found.parts(), self._loss.parts()]

    def merge(self, parts: Sequence[Any]) -> None:
        """Continue with the parts of all ranks."""
        found: Any = self._metric
        found.merge([part[0] for part in parts])
        self._loss.merge([part[1] for part in parts])

    def result(self) -> dict[str, float]:
        """The user's values, with the mean loss unless they have a "loss". Raises TrainingError if one is no number."""
        found = self._metric.result()
        try:
            values = {shortened(str(name), 80): float(value) for name, value in found.items()}
        except (AttributeError, TypeError, ValueError, RuntimeError):
            message = (
                f"metric().result() returned {kind(found)}, not numbers by name such as {{'accuracy': 0.9}}"
            )
            raise self._error(message) from None
        return values if "loss" in values else {**values, **self._loss.result()}


class OwnWeight:
    """A user's weight(batch), checked."""

    def __init__(self, weight: Weight, where: str) -> None:
        self._weight, self._where = weight, where

    def __call__(self, batch: Batch) -> Tensor | float:
        """Raises TrainingError if it is not one number of at least 0; does not wait for a device to see its value."""
        with torch.no_grad():
            found = self._weight(batch)
        number = isinstance(found, (int, float)) and not isinstance(found, bool)
        scalar = isinstance(found, Tensor) and found.numel() == 1 and not found.is_complex()
        if not number and not scalar:
            shape = f" of shape {tuple(found.shape)}" if isinstance(found, Tensor) else ""
            raise TrainingError(f"{self._where}: weight returned {kind(found)}{shape}, not one number")
        value = on_host(found.detach().reshape(()) if isinstance(found, Tensor) else found)
        if not isinstance(value, Tensor) and not 0 <= value < math.inf:
            raise TrainingError(f"{self._where}: weight returned {value:g}, not a number of at least 0")
        return value


class Own:
    """A user's workload; implements Workload."""

    def __init__(
        self, section: OwnSection, settings: Settings, result: FactoryResult, where: str, config: Config
    ) -> None:
        self.name = section.name
        self.item, self.token, self.tokens_per_item = result.item, result.token, result.tokens_per_item
        self.model: nn.Module = result.model
        self.better = result.better
        self.collate: Collate | None = result.collate
        self.parts: Mapping[str, Parted] = result.parts
        self.epochs_differ = result.epochs_differ
        self.weight: Weight | None = None if result.weight is None else OwnWeight(result.weight, where)
        self.training: TrainingParts = result.training
        self._result, self._settings, self._where = result, settings, where
        self.order, self.eval_order = result.order, result.eval_order
        train, evaluation, notes = own_items.train_and_eval(result, where, config)
        self.train_data: Dataset[Any] = train
        self.eval_data: Dataset[Any] = evaluation
        self._notes = [*result.notes, *notes, *own_items.try_items(train, evaluation, result, where, config)]

    @property
    def own_forward(self) -> bool:
        """Whether `forward` is the factory's, which may call parts of the model, or a closure of its own."""
        return self._result.forward is not None

    def forward(self, model: nn.Module, batch: Batch, *state: Any) -> Any:
        """The factory's forward, or the model called with the batch, its first element or its items as keywords.

        state: what the model carries from batch to batch, if the factory returned `state`.
        """
        if self._result.forward is not None:
            return self._result.forward(model, batch, *state)
        if isinstance(batch, dict):
            return model(**batch, **({"state": state[0]} if state else {}))
        return model(batch[0] if isinstance(batch, (tuple, list)) else batch, *state)

    def loss(self, output: Any, batch: Batch) -> Tensor:
        """The factory's loss. Raises TrainingError if it is not a scalar with a gradient."""
        assert self._result.loss is not None  # else the factory has its own step and eval_step
        value = self._result.loss(output, batch)
        if not isinstance(value, Tensor):
            raise self._wrong(f"loss returned {kind(value)}, not a scalar tensor")
        if value.ndim:
            raise self._wrong(f"loss returned a tensor of shape {tuple(value.shape)}: take its mean()")
        if torch.is_grad_enabled() and not value.requires_grad:
            raise self._wrong(
                "loss does not depend on the model's parameters: is it detached, or computed from plain numbers?"
            )
        return value

    def metric(self) -> Metric:
        """The factory's metric with the mean loss, or only the mean loss."""
        loss = MeanLoss(weight=self.weight)
        if self._result.metric is None:
            return loss
        found = self._result.metric()
        lacks = [name for name in ("update", "result") if not callable(getattr(found, name, None))]
        if lacks:
            message = f"metric() returned {kind(found)}, which has no {' and no '.join(lacks)}"
            raise self._wrong(f"{message}; return an object with update(output, batch, loss) and result()")
        return OwnMetric(found, loss, self._wrong)

    def describe_model(self) -> str:
        """One line: that of the factory, or the class and its layers."""
        if self._result.describe_model is not None:
            return self._result.describe_model
        leaves = [module for module in self.model.modules() if not any(module.children())]
        kinds = Counter(type(module).__name__ for module in leaves if module is not self.model)
        layers = ", ".join(f"{count} {name}" for name, count in kinds.most_common(4))
        model = self.model
        name = ", ".join(model) if isinstance(model, nn.ModuleDict) else type(model).__name__
        return printable(name + (f": {layers}" if layers else ""))

    def describe_data(self) -> str:
        """One line: that of the factory, or the numbers of items."""
        if self._result.describe_data is not None:
            return self._result.describe_data
        train, evaluation = (
            "a stream of unknown length" if count is None else f"{count:,} items"
            for count in map(item_count, (self.train_data, self.eval_data))
        )
        return f"{train}{' per epoch' * (self.order is None)}, {evaluation.removesuffix(' items')} for evaluation"

    def notes(self) -> Sequence[str]:
        """The place of the factory, its notes, and notes about its data."""
        return [f"{self.name} is defined at {self._where}", *self._notes]

    def _wrong(self, message: str) -> TrainingError:
        return TrainingError(f"{self._where}: {message}")


def prepare(config: Config, section: OwnSection, progress: Progress) -> Own:
    """The workload that the factory returns.

    Raises ConfigError with everything that is wrong in the factory's result, or with the line at which the user's code
    failed, caused by its exception.
    """
    problems = Problems("workload")
    progress(f"importing {section.name.partition(':')[0]}")
    factory = own_module.load(section)
    where = own_module.definition(factory)
    batch = config.batch
    optimizer, schedule = Values.of_optimizer(config), Values.of_schedule(config)
    settings = Settings(
        batch.sequence, batch.micro, config.run.seed, section.data, section.size, Options(section.options),
        config.run.max_steps, config.run.epochs, optimizer, schedule,
    )  # fmt: skip
    # Random numbers drawn by the import must not matter: the module is imported once, but prepared several times.
    _seed(config.run.seed)
    progress(f"calling {section.name}")
    with calling("the factory", where=where):
        value = factory(settings)
    for name, allowed in settings.options.wrong.items():
        problems.add(
            f"workload.options.{name}", "the factory needs another type", settings.options[name], allowed
        )
    problems.check()
    progress(f"checking the data of {section.name}")
    result = read_result(value, where, config, optimizer, schedule)
    own = Own(section, settings, result, where, config)
    settings.options.unused(problems)
    if (items := item_count(own.train_data)) is not None and own.order is None:
        check_step(config, items, "items", problems)
    orders = own.order, own.eval_order
    own_items.check_workers(own.train_data, own.eval_data, own.collate, config, problems, orders)
    problems.check()
    return own


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)
