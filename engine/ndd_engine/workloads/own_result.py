"""Checks the result of a user's factory and reports everything that is missing or wrong, all at once."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import SimpleNamespace
from typing import Any

from torch import nn

from ndd_engine.config.schema import Config
from ndd_engine.errors import LONGEST, shortened
from ndd_engine.text import printable

from .base import Collate, Parted, Weight
from .order import Order
from .own_model import read_model
from .own_module import calling, kind
from .own_order import Data, check_order, read_data, with_parts
from .own_training import Values, check_conflicts, read_training
from .problems import Problems
from .training import TrainingParts

NAME_LENGTH = 40  # characters of the name of an item, a token or a part
MOST_NOTES = 100
RESULT = "an object, dict or SimpleNamespace with model, train_data and loss"


@dataclass
class FactoryResult:
    """The parts of a workload that a factory returned, or their defaults."""

    model: nn.Module
    train_data: Any
    loss: Callable[..., Any] | None
    eval_data: Any = None
    forward: Callable[..., Any] | None = None
    metric: Callable[..., Any] | None = None
    weight: Weight | None = None
    better: str = "lower"
    item: str = "item"
    token: str | None = None
    tokens_per_item: float = 1.0
    collate: Collate | None = None
    parts: Mapping[str, Parted] = field(default_factory=dict)
    epochs_differ: bool = False
    describe_model: str | None = None
    describe_data: str | None = None
    notes: list[str] = field(default_factory=list)
    shuffle: bool | None = None  # these three are read into the order
    sampler: Any = None
    batch_sampler: Any = None
    order: Order | None = None
    eval_order: Order | None = None
    training: TrainingParts = field(default_factory=TrainingParts)


NEEDED = ("model", "train_data", "loss")
_DERIVED = ("order", "eval_order", "training")
_OF_TRAINING = [
    part.name for part in fields(TrainingParts) if part.name not in ("where", "optimizers", "schedulers")
]
OPTIONAL = [
    *(part.name for part in fields(FactoryResult) if part.name not in (*NEEDED, *_DERIVED)),
    "optimizer", "scheduler", "scheduler_every", *_OF_TRAINING,
]  # fmt: skip


def read_result(
    value: object, where: str, config: Config, optimizer: Values | None = None, schedule: Values | None = None
) -> FactoryResult:
    """The parts of the value that a factory returned. where: file and line of the factory.

    optimizer, schedule: what the factory read of these sections of the configuration.

    Raises ConfigError with everything that is missing or wrong.
    """
    problems = Problems(where)
    if (wrong := _wrong_result(value)) is not None:
        problems.add("", f"the factory returned {wrong}", allowed=RESULT)
        problems.check()
    reader = Reader(value, problems)
    model = read_model(reader)
    train = reader.data("train_data", config, needed=True)
    evaluation = reader.data("eval_data", config)
    train = reader.ordered(train, evaluation.data is not None, config)
    loss = reader.function("loss", ("output", "batch"), needed=not reader.given("step", "eval_step"))
    if isinstance(loss, nn.modules.loss._Loss):
        name = type(loss).__name__
        advice = f"write it as: lambda output, batch: nn.{name}()(output, batch[1])"
        reader.add("loss", f"nn.{name} takes (output, target)", "a function loss(output, batch)", advice)
    better = reader.text("better") or "lower"
    if better not in ("lower", "higher"):
        message = "this is not a direction in which a metric improves"
        problems.add("better", message, better, '"lower" or "higher"')
    training = read_training(reader, model, config, better)
    check_conflicts(
        reader,
        training,
        config,
        optimizer or Values.of_optimizer(config),
        schedule or Values.of_schedule(config),
    )
    reader.check_unknown()
    carried = ("state",) if training.state is not None else ()
    others: dict[str, Any] = {
        "better": better,
        "training": training,
        "forward": reader.function("forward", ("model", "batch", *carried)),
        "metric": reader.function("metric", ()),
        "weight": reader.function("weight", ("batch",)),
        "item": reader.text("item", longest=NAME_LENGTH) or "item",
        "token": reader.text("token", longest=NAME_LENGTH),
        "tokens_per_item": reader.tokens_per_item(),
        "collate": reader.collate(train, evaluation),
        "parts": reader.parts(model),
        "epochs_differ": reader.typed("epochs_differ", bool, "True or False") is True,
        "describe_model": reader.text("describe_model", called=True),
        "describe_data": reader.text("describe_data", called=True),
        "notes": reader.lines("notes"),
        "order": train.order,
        "eval_order": evaluation.order,
    }
    problems.check()
    assert model is not None
    return FactoryResult(model, train.data, loss, evaluation.data, **others)


class Reader:
    """Reads the attributes of the factory's result and adds a problem for each wrong one."""

    def __init__(self, value: object, problems: Problems) -> None:
        self.value: Any = SimpleNamespace(**value) if isinstance(value, Mapping) else value
        self.problems, self._type = problems, shortened(type(value).__name__, 80)

    def add(self, name: str, message: str, allowed: str | None = None, suggestion: str | None = None) -> None:
        self.problems.add(name, message, None, allowed, suggestion)

    def get(self, name: str, needed: bool = False, called: bool = False) -> Any:
        """An attribute, or None; adds a problem if it is missing and needed.

        called: a function without arguments may return it.
        """
        with calling(f"reading {name}", where=self.problems.where):
            found = getattr(self.value, name, None)
        if found is None and needed:
            others = [known for known in self._names() if known not in NEEDED]
            close = difflib.get_close_matches(name, others, n=1)
            advice = f"rename {printable(close[0])} to {name}" if close else f"add it: {name}=…"
            message = f"is missing from the {self._type} that the factory returned"
            self.add(name, message, suggestion=advice)
        if called and callable(found):
            with calling(f"{name}()", where=self.problems.where):
                return found()
        return found

    def typed(self, name: str, kinds: type, allowed: str, needed: bool = False, called: bool = False) -> Any:
        """An attribute of this type, or None; adds a problem if it has another."""
        found = self.get(name, needed, called)
        if found is None or isinstance(found, kinds):
            return found
        self.add(name, f"is {kind(found)}", allowed)
        return None

    def given(self, *names: str) -> list[str]:
        """Those of these parts that the factory returned."""
        return [name for name in names if self.get(name) is not None]

    def check_unknown(self) -> None:
        """Adds a problem for each unknown name in a dict or SimpleNamespace; other objects may have attributes of
        their own."""
        if type(self.value) is not SimpleNamespace:
            return
        known = [*NEEDED, *OPTIONAL]
        for name in self._names():
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                advice = (
                    f"did you mean {close[0]}?" if close else f"remove it; the parts are {', '.join(known)}"
                )
                self.add(
                    printable(name), "is no part of a workload, so it would not be used", suggestion=advice
                )

    def data(self, name: str, config: Config, needed: bool = False) -> Data:
        """A dataset, which may be that of a DataLoader, with its order."""
        found = self.get(name, needed)
        return Data() if found is None else read_data(name, found, config, self.problems)

    def ordered(self, train: Data, has_eval: bool, config: Config) -> Data:
        """The training data with the parts that concern its order."""
        shuffle = self.typed("shuffle", bool, "True or False")
        parts = shuffle, self.get("sampler"), self.get("batch_sampler")
        found = train if train.data is None else with_parts(train, *parts, config, self.problems)
        check_order(found, has_eval, config, self.problems)
        return found

    def collate(self, train: Data, evaluation: Data) -> Collate | None:
        """The factory's collate function, else that of the DataLoaders."""
        own = self.function("collate", ("items",))
        if own is not None:
            return own
        if train.data is not None and evaluation.data is not None and train.collate != evaluation.collate:
            message = "the DataLoaders train_data and eval_data have different collate functions"
            allowed = "one function for both, from a list of items to a batch"
            self.add("collate", message, allowed=allowed, suggestion="return it as collate")
        return train.collate

    def function(
        self, name: str, arguments: tuple[str, ...], needed: bool = False
    ) -> Callable[..., Any] | None:
        """A callable that takes these arguments."""
        found = self.get(name, needed)
        if found is None:
            return None
        call = f"{name}({', '.join(arguments)})"
        if not callable(found):
            self.add(name, f"is {kind(found)}", f"a function {call}")
            return None
        try:
            inspect.signature(found).bind(*arguments)
        except TypeError as error:
            self.add(name, f"cannot be called as {call}: {error}")
        except ValueError:
            pass  # written in C, without a signature
        return found  # type: ignore[no-any-return]

    def parts(self, model: nn.Module | None) -> Mapping[str, Parted]:
        """Names of sub-phases, each with one or more modules of the model."""
        found: Mapping[str, Parted] = (
            self.typed("parts", Mapping, 'a dict such as {"encoder": model.encoder}') or {}
        )
        inside = set(model.modules()) if model is not None else None
        for name, part in found.items():
            modules = list(part) if isinstance(part, (Sequence, nn.ModuleList)) else [part]
            if not isinstance(name, str) or not all(isinstance(module, nn.Module) for module in modules):
                allowed = "a module of the model, or a list of them"
                self.add(f"parts[{shortened(str(name), 80)}]", "is not a module", allowed=allowed)
            elif not 0 < len(name) <= NAME_LENGTH or not name.isprintable():
                allowed = f"1 to {NAME_LENGTH} printable characters"
                self.add(f"parts[{shortened(name, 80)}]", "this is no name for a phase", allowed=allowed)
            elif inside is not None and not inside.issuperset(modules):
                advice = "use submodules of model, as in model.encoder"
                self.add(f"parts[{printable(name)}]", "is not a part of the model", suggestion=advice)
        return found

    def tokens_per_item(self) -> float:
        found, token = self.get("tokens_per_item"), self.get("token")
        if found is None:
            if token is not None:
                message = f"is missing, but token is set ({token!r})"
                advice = "add the mean number of tokens per item"
                self.add("tokens_per_item", message, suggestion=advice)
            return 1.0
        number = isinstance(found, (int, float)) and not isinstance(found, bool)
        if not number or not math.isfinite(found) or found <= 0:
            self.add("tokens_per_item", f"is {kind(found)}", "a number above 0")
            return 1.0
        return float(found)

    def text(self, name: str, called: bool = False, longest: int = LONGEST) -> str | None:
        """A string, on one line; if `called`, a function without arguments may return it."""
        allowed = f"a string{', or a function without arguments that returns one' * called}"
        found = self.typed(name, str, allowed, called=called)
        if found is None:
            return None
        if len(found) > longest and not called:
            self.add(name, f"has {len(found):,} characters", f"at most {longest}")
        return shortened(found, longest)

    def lines(self, name: str) -> list[str]:
        """A string or strings, or a function without arguments that returns them."""
        allowed = "a list of strings, or a function without arguments that returns one"
        found = self.typed(name, Sequence, allowed, called=True) or ()
        texts = [found] if isinstance(found, str) else found
        if not all(isinstance(text, str) for text in texts):
            self.add(name, "has other items than strings", allowed)
            return []
        return [shortened(text, 1000) for text in texts[:MOST_NOTES]]

    def _names(self) -> list[str]:
        return [name for name in getattr(self.value, "__dict__", ()) if not name.startswith("_")]


def _wrong_result(value: object) -> str | None:
    """The type of a factory's result, as text, if it cannot have the parts of a workload; else None."""
    if value is None:
        return "None (is a return statement missing?)"
    if isinstance(value, type):
        return f"the class {value.__name__}, not an instance of it"
    if isinstance(value, nn.Module) and getattr(value, "model", None) is None:
        return "only the model"
    if inspect.iscoroutine(value):
        value.close()
        return "a coroutine (it is defined with async def)"
    if isinstance(value, (list, str, bytes, int, float)) or type(value) is tuple:
        return kind(value)
    return None
