"""A user's own workload: a factory is called with `Settings`, and what it gives becomes a `Workload`.

The factory returns an object, a dict or a SimpleNamespace. It must have

    model            a torch.nn.Module, on the processor
    train_data       a map-style dataset (__len__ and __getitem__), or a DataLoader: its dataset and collate_fn count
    loss             a function (output, batch) -> mean loss, a scalar tensor

and may have

    eval_data        as train_data; else the last 10 % of train_data are kept for evaluation
    forward          a function (model, batch) -> output; else model(batch) for a tensor, model(batch[0]) for a tuple or
                     list, model(**batch) for a dict
    metric           a function () -> an object with update(output, batch, loss) and result() -> {name: number}; the
                     first one is the headline; else the mean loss
    better           "lower" or "higher": which way the headline improves; else "lower"
    collate          a function from a list of items to a batch; else the DataLoader's, else torch's default_collate
    item, token      what an item is called, and what it is made of ("sentence", "word")
    tokens_per_item  how many tokens an item has, on average; needed with token
    parts            {"encoder": model.encoder}: modules whose time is shown by itself within forward
    epochs_differ    True when items change each epoch: item i of epoch e is asked for as e * len(train_data) + i
    describe_model, describe_data, notes
                     text for people, or functions without arguments that return it
"""

from __future__ import annotations

import difflib
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
from ndd_engine.errors import TrainingError
from ndd_engine.text import printable

from . import own_items, own_module
from .base import Batch, Collate, MeanLoss, Metric, Parted
from .own_given import Given, take
from .own_module import calling
from .windows import Complaints

T = TypeVar("T")
_KINDS: dict[type, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "a whole number"),
    float: ((float, int), "a number"),
    str: ((str,), "text"),
    list: ((list,), "a list"),
    tuple: ((list,), "a list"),
    dict: ((dict,), "a table"),
}


class Options(Mapping[str, Any]):
    """The table `[workload.options]`; remembers what was asked for."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)
        self.asked: set[str] = set()
        self.wrong: dict[str, str] = {}  # name -> what is allowed

    def __getitem__(self, name: str) -> Any:
        self.asked.add(name)
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        self.asked.update(self._values)
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def option(self, name: str, default: Any) -> Any:
        """The value, or the default: when it is not set, and when it is of another kind, which is remembered."""
        value: Any = self.get(name)
        if value is None:
            return default
        kinds, allowed = _KINDS.get(type(default), ((object,), ""))
        # To Python true is a whole number, to a user it is not.
        fits = (
            type(value) in kinds
            if isinstance(value, bool) and object not in kinds
            else isinstance(value, kinds)
        )
        if not fits:
            self.wrong[name] = allowed
            return default
        return type(default)(value) if isinstance(default, (float, tuple)) else value

    def unused(self) -> list[str]:
        """What was set and nobody asked for, as sentences."""
        asked = ", ".join(sorted(self.asked))
        notes = []
        for name in self._values:
            if name not in self.asked:
                close = difflib.get_close_matches(name, self.asked, n=1)
                tail = f"; it asked for {printable(asked)}" if asked else ", which asked for none"
                meant = f" (did you mean {printable(close[0])}?)" if close else ""
                notes.append(f"Option {printable(name)} was not used by the factory{tail}{meant}.")
        return notes


@dataclass(frozen=True)
class Settings:
    """What the configuration says, for a factory.

    sequence: `batch.sequence`, tokens of one item. micro: `batch.micro`, items of one batch. seed: `run.seed`; the
    generators of torch, Python and numpy are seeded with it before the factory is called. data, size: as in
    `[workload]`. options: `[workload.options]`.
    """

    sequence: int
    micro: int
    seed: int
    data: str
    size: str | None
    options: Options

    @overload
    def option(self, name: str) -> Any: ...
    @overload
    def option(self, name: str, default: T) -> T: ...
    def option(self, name: str, default: Any = None) -> Any:
        """`workload.options.<name>`, or the default. A value of another kind than the default is refused."""
        return self.options.option(name, default)


class OwnMetric:
    """A user's metric beside the mean loss. Implements Metric."""

    def __init__(self, metric: Metric, complain: Callable[[str], TrainingError]) -> None:
        self._metric, self._loss, self._complain = metric, MeanLoss(), complain

    def update(self, output: Any, batch: Batch, loss: Tensor) -> None:
        """One batch on the device."""
        self._loss.update(output, batch, loss)
        self._metric.update(output, batch, loss)

    def result(self) -> dict[str, float]:
        """The user's figures, and the loss where it is not among them. Raises TrainingError when they are none."""
        found = self._metric.result()
        try:
            figures = {printable(str(name)): float(value) for name, value in found.items()}
        except (AttributeError, TypeError, ValueError, RuntimeError):
            raise self._complain(
                "metric().result() must give numbers by name, as in {'accuracy': 0.9}"
            ) from None
        return figures if "loss" in figures else {**figures, **self._loss.result()}


class Own:
    """A user's workload; implements Workload."""

    def __init__(self, section: OwnSection, settings: Settings, given: Given, where: str) -> None:
        self.name = section.name
        self.item, self.token, self.tokens_per_item = given.item, given.token, given.tokens_per_item
        self.model: nn.Module = given.model
        self.better = given.better
        self.collate: Collate | None = given.collate
        self.parts: Mapping[str, Parted] = given.parts
        self.epochs_differ = given.epochs_differ
        self._given, self._settings, self._where = given, settings, where
        train, evaluation, notes = own_items.train_and_eval(given, where)
        self.train_data: Dataset[Any] = train
        self.eval_data: Dataset[Any] = evaluation
        self._notes = [*given.notes, *notes, *own_items.try_items(train, evaluation, given, where)]

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        """The factory's forward, or the model called with the batch, its first part or its named parts."""
        if self._given.forward is not None:
            return self._given.forward(model, batch)
        if isinstance(batch, dict):
            return model(**batch)
        return model(batch[0] if isinstance(batch, (tuple, list)) else batch)

    def loss(self, output: Any, batch: Batch) -> Tensor:
        """The factory's loss. Raises TrainingError when it is no scalar that can be trained on."""
        value = self._given.loss(output, batch)
        if not isinstance(value, Tensor):
            raise self._wrong(f"loss must give a tensor, and gave a {type(value).__name__}")
        if value.ndim:
            raise self._wrong(
                f"loss must give a scalar, and gave a tensor of shape {tuple(value.shape)}: take its mean()"
            )
        if torch.is_grad_enabled() and not value.requires_grad:
            raise self._wrong(
                "loss does not depend on the model's parameters (detached, or made of plain numbers?)"
            )
        return value

    def metric(self) -> Metric:
        """The factory's metric beside the mean loss, or the mean loss alone."""
        if self._given.metric is None:
            return MeanLoss()
        found = self._given.metric()
        lacks = [name for name in ("update", "result") if not callable(getattr(found, name, None))]
        if lacks:
            raise self._wrong(
                f"metric() must give an object with update and result; it has no {' and no '.join(lacks)}"
            )
        return OwnMetric(found, self._wrong)

    def describe_model(self) -> str:
        """One line: the factory's, or the class and its layers."""
        if self._given.describe_model is not None:
            return self._given.describe_model
        leaves = [module for module in self.model.modules() if not any(module.children())]
        kinds = Counter(type(module).__name__ for module in leaves if module is not self.model)
        layers = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(4))
        return printable(type(self.model).__name__ + (f": {layers}" if layers else ""))

    def describe_data(self) -> str:
        """One line: the factory's, or the numbers of items."""
        if self._given.describe_data is not None:
            return self._given.describe_data
        train, evaluation = (len(data) for data in (self.train_data, self.eval_data))  # type: ignore[arg-type]
        return f"{train:,} items a pass, {evaluation:,} to evaluate"

    def notes(self) -> Sequence[str]:
        """Where the factory is, what it said, what was decided for it, and options that it did not use."""
        return [f"{self.name} is {self._where}", *self._notes, *self._settings.options.unused()]

    def _wrong(self, message: str) -> TrainingError:
        return TrainingError(f"{self._where}: {message}")


def prepare(
    config: Config, section: OwnSection, complaints: Complaints, tell: Callable[[str], None]
) -> Own | None:
    """The workload that the factory gives; None after complaining of the configuration.

    Raises ConfigError with everything that the factory's object lacks, or with the line at which the user's code
    failed and its error as the cause.
    """
    own_module.check(section, complaints)
    if complaints.problems:
        return None
    tell(f"importing {section.name.partition(':')[0]}")
    factory = own_module.load(section)
    where = own_module.definition(factory)
    batch = config.batch
    settings = Settings(
        batch.sequence, batch.micro, config.run.seed, section.data, section.size, Options(section.options)
    )
    # What the module drew when it was imported must not count: it is imported once, and prepared again and again.
    _seed(config.run.seed)
    tell(f"calling {section.name}")
    with calling("the factory", where=where):
        value = factory(settings)
    for name, allowed in settings.options.wrong.items():
        complaints.add(f"workload.options.{name}", "has the wrong type", settings.options[name], allowed)
    if complaints.problems:
        return None
    tell(f"looking at the data of {section.name}")
    own = Own(section, settings, take(value, where, config), where)
    own_items.check_count(own.train_data, config, complaints)
    own_items.check_workers(own.train_data, own.eval_data, own.collate, config, complaints)
    return None if complaints.problems else own


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)
