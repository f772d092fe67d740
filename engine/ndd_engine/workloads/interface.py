"""What a factory receives, `Settings`, and the size of the configured data with the mistakes in it.

Imports no torch, so that data can be read and refused before torch is imported.
"""

from __future__ import annotations

import difflib
import importlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, overload

from ndd_engine.config.schema import Config
from ndd_engine.config.workload_sections import Section
from ndd_engine.errors import ConfigError, Problem
from ndd_engine.text import printable

from . import own_module
from .problems import KEY, Problems, Progress

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
# Keys of [workload] that have an attribute of their own.
_NAMED = frozenset({"name", "data", "size", "path", "options"})


class Options(Mapping[str, Any]):
    """The options of a workload: a read-only mapping that records which of them are read.

    They are the table `[workload.options]`; a built-in workload has its other keys of `[workload]` instead. read: names
    of the options read so far. wrong: options of a wrong type, with what is allowed.
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


class Values:
    """A section of the configuration, read-only; remembers in `read` which keys were read."""

    def __init__(self, section: Section) -> None:
        self._section = section
        self.read: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in type(self._section).model_fields:
            table = type(self._section).__name__.removesuffix("Section").lower()
            raise AttributeError(f"{name} is not a key of [{table}]")
        self.read.add(name)
        return getattr(self._section, name)

    def unread(self, but: frozenset[str] = frozenset()) -> list[str]:
        """Keys that differ from their default and were not read."""
        fields = type(self._section).model_fields
        return [
            name
            for name, entry in fields.items()
            if name not in self.read | but and getattr(self._section, name) != entry.default
        ]


@dataclass(frozen=True)
class Settings:
    """The settings of a run: the only argument of a factory.

    Attributes:
        sequence: `batch.sequence`, the length of an item in tokens (samples, characters, words, …).
        micro, accumulation: `batch.micro` and `batch.accumulation`, items of a micro-batch and micro-batches of a step.
        ranks: `parallel.ranks`, the number of processes that train together.
        seed: `run.seed`. The generators of torch, random and NumPy are seeded with it before the factory is called; use
            it to seed generators of your own.
        data: `workload.data`, a string with a meaning of your choice, such as a path; "builtin" if it is not set.
        size: `workload.size`, a string with a meaning of your choice, such as "small"; None if it is not set.
        options: `[workload.options]`, a read-only mapping of your own options; `option` reads one with a default.
        problems: collects the mistakes that you find in the settings or in the data; see Problems.
        progress: `progress("reading the data")` shows what a long preparation does.
        max_steps, epochs, eval_batches: `run.max_steps`, `run.epochs` and `evaluate.batches`; None if not set.
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
    problems: Problems
    optimizer: Values
    schedule: Values
    accumulation: int = 1
    ranks: int = 1
    max_steps: int | None = None
    epochs: int | None = None
    eval_batches: int | None = None
    progress: Progress = field(default=lambda _: None)

    @classmethod
    def of(cls, config: Config, progress: Progress = lambda _: None, where: str = "workload") -> Settings:
        """where: the file or option that the configuration came from, for problems."""
        batch, run, section = config.batch, config.run, config.workload
        written = getattr(section, "options", None)
        if written is None:
            written = {name: value for name, value in section if name not in _NAMED}
        return cls(
            batch.sequence, batch.micro, run.seed, section.data, section.size, Options(written),
            Problems(where, section.data), Values(config.optimizer), Values(config.schedule), batch.accumulation,
            config.parallel.ranks, run.max_steps, run.epochs, config.evaluate.batches, progress,
        )  # fmt: skip

    @overload
    def option(self, name: str) -> Any: ...
    @overload
    def option(self, name: str, default: T) -> T: ...
    def option(self, name: str, default: Any = None) -> Any:
        """The option `workload.options.<name>`, or `default` if it is not set.

        A value whose type differs from the default's is an error (an int is allowed for a float, a list for a tuple).
        """
        return self.options.option(name, default)

    def check_items(self, items: int, unit: str, suggestion: str | None = None) -> None:
        """Adds a problem if `items` training items are fewer than a step of all ranks takes. unit: "windows"."""
        needed = self.micro * self.accumulation * self.ranks
        if items >= needed:
            return
        product, limited = f"micro {self.micro} x accumulation {self.accumulation}", "micro x accumulation"
        if self.ranks > 1:
            product, limited = f"{product} x {self.ranks} ranks", f"{limited} x ranks"
        key, found = "parallel.ranks", self.ranks
        if self.micro > items:
            key, found = "batch.micro", self.micro
        elif self.micro * self.accumulation > items:
            key, found = "batch.accumulation", self.accumulation
        message = f"one optimizer step takes {needed:,} {unit} ({product}), but the training data has only {items:,}"
        self.problems.add(key, message, found, f"{limited} of at most {items:,}", suggestion)


@dataclass(frozen=True)
class Facts:
    """What is known of data before torch is imported. tokens_per_item: the mean if lengths vary. text: one line."""

    train_items: int
    eval_items: int
    tokens_per_item: float
    item: str
    token: str
    text: str


def facts(config: Config, where: str = "workload") -> Facts | None:
    """The facts of the configured data; None if only the factory knows them. Raises ConfigError with every error."""
    section = config.workload
    if ":" in section.name:
        own_module.check(section, where)
        return None
    found: Facts = (
        importlib.import_module(f"{__package__}.{section.name}_data")
        .read(Settings.of(config, where=where))
        .facts
    )
    return found


def problems(config: Config, where: str) -> list[Problem]:
    """Every error in the configured data, each with `where` as its origin; [] if it can be trained on."""
    try:
        facts(config, where)
    except ConfigError as error:
        return list(error.problems)
    return []


def split(total: int, eval_fraction: float) -> tuple[int, int]:
    """Elements to train on and, after them, to evaluate on: neighbours in time or text are alike, so a random choice
    would leak."""
    train = math.floor(total * (1 - eval_fraction))
    return train, total - train


def window_count(length: int, span: int, stride: int = 1) -> int:
    """Number of windows of `span` elements, `stride` apart, in `length` elements."""
    return max(0, (length - span) // stride + 1)


@dataclass(frozen=True)
class SeriesLayout:
    """How a series is cut into windows: `sequence` elements of input and one more to predict.

    train, evaluation: elements. unit: what an element is called ("character"). whole: what the series is called.
    """

    train: int
    evaluation: int
    sequence: int
    stride: int
    eval_stride: int
    unit: str
    whole: str

    @property
    def train_items(self) -> int:
        return window_count(self.train, self.sequence + 1, self.stride)

    @property
    def eval_items(self) -> int:
        return window_count(self.evaluation, self.sequence + 1, self.eval_stride)

    def facts(self, what: str) -> Facts:
        """what: the size of the whole series, as text."""
        windows = f"{self.train_items:,} windows of {self.sequence:,} per epoch"
        text = f"{what}, {windows}, {self.eval_items:,} for evaluation"
        return Facts(self.train_items, self.eval_items, self.sequence, "window", self.unit, text)

    def check(self, settings: Settings) -> None:
        """Adds a problem unless there is a window for evaluation and one optimizer step for training."""
        problems, units = settings.problems, f"{self.unit}s"
        longest, total = min(self.train, self.evaluation) - 1, self.train + self.evaluation
        allowed, longer = f"at most {longest:,}", f"use a longer {self.whole}"
        needed = f"but a window needs {self.sequence + 1:,}"
        if longest < 2:
            message = f"the {self.whole} is too short for a single window: {total:,} {units}"
            problems.add(KEY, message, suggestion=longer)
        elif self.sequence >= total:
            message = f"longer than the {self.whole} of {total:,} {units}"
            problems.add("batch.sequence", message, self.sequence, allowed)
        elif not self.train_items:
            message = f"the training part has {self.train:,} {units}, {needed}"
            problems.add("batch.sequence", message, self.sequence, allowed)
        else:
            if not self.eval_items:
                message = f"the evaluation part has {self.evaluation:,} {units}, {needed}"
                fraction = (self.sequence + 1) / total
                if fraction < 0.499:
                    longer = f"or set workload.eval_fraction to {math.ceil(fraction * 1000) / 1000:g}"
                problems.add("batch.sequence", message, self.sequence, allowed, longer)
            settings.check_items(self.train_items, "windows")
