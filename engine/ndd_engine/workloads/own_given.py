"""What a user's factory gave, checked: everything that is missing or of the wrong kind, told at once."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from ndd_engine.config.schema import Config
from ndd_engine.errors import ConfigError
from ndd_engine.text import printable

from .base import Collate, Parted
from .own_module import calling, kind
from .windows import Complaints

NEEDED = ("model", "train_data", "loss")
OPTIONAL = (
    "eval_data", "forward", "metric", "better", "item", "token", "tokens_per_item", "collate", "parts",
    "epochs_differ", "describe_model", "describe_data", "notes",
)  # fmt: skip
MAP_STYLE = "a map-style dataset: an object with __len__ and __getitem__(index)"
FIRST = "an object with model, train_data and loss"


@dataclass
class Given:
    """The parts of a workload as the factory gave them; None where an optional one is left out."""

    model: nn.Module
    train_data: Any
    loss: Callable[..., Any]
    eval_data: Any = None
    forward: Callable[..., Any] | None = None
    metric: Callable[..., Any] | None = None
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


def take(value: object, where: str, config: Config) -> Given:
    """The parts of what a factory returned. where: the place of the factory.

    Raises ConfigError with everything that is missing or wrong.
    """
    complaints = Complaints(where)
    if (wrong := _not_an_object(value)) is not None:
        complaints.add("", f"the factory gave {wrong}", allowed=FIRST)
        raise ConfigError(complaints.problems)
    reader = _Reader(value, complaints)
    model = reader.model()
    train = reader.data("train_data", config, needed=True)
    evaluation = reader.data("eval_data", config)
    loss = reader.function("loss", ("output", "batch"), needed=True)
    if isinstance(loss, nn.modules.loss._Loss):
        name = type(loss).__name__
        advice = f"write it as: lambda output, batch: nn.{name}()(output, batch[1])"
        complaints.add(
            "loss", f"nn.{name} takes (output, target)", None, "a function of (output, batch)", advice
        )
    better = reader.text("better") or "lower"
    if better not in ("lower", "higher"):
        message = "says which way the first figure of the metric improves"
        complaints.add("better", message, better, '"lower" or "higher"')
    others: dict[str, Any] = {
        "better": better,
        "forward": reader.function("forward", ("model", "batch")),
        "metric": reader.function("metric", ()),
        "item": reader.text("item") or "item",
        "token": reader.text("token"),
        "tokens_per_item": reader.tokens_per_item(),
        "collate": reader.collate(train, evaluation),
        "parts": reader.parts(model),
        "epochs_differ": reader.flag("epochs_differ"),
        "describe_model": reader.line("describe_model"),
        "describe_data": reader.line("describe_data"),
        "notes": [*reader.lines("notes"), *train.notes, *evaluation.notes, *reader.unknown()],
    }
    if complaints.problems:
        raise ConfigError(complaints.problems)
    assert model is not None and loss is not None
    return Given(model, train.data, loss, evaluation.data, **others)


@dataclass(frozen=True)
class _Data:
    """A dataset, what its loader collates it with (None: torch's default), and what to tell of that loader."""

    data: Any = None
    collate: Collate | None = None
    notes: tuple[str, ...] = ()


class _Reader:
    """Reads the attributes of what the factory gave, and complains."""

    def __init__(self, value: object, complaints: Complaints) -> None:
        self.value = SimpleNamespace(**value) if isinstance(value, Mapping) else value
        self.complaints = complaints

    def get(self, name: str, needed: bool = False) -> Any:
        """An attribute; None when it is left out, after complaining when it is needed."""
        with calling(f"reading {name}", where=self.complaints.where):
            found = getattr(self.value, name, None)
        if found is None and needed:
            close = difflib.get_close_matches(
                name, [known for known in self._names() if known not in NEEDED], n=1
            )
            advice = f"did you mean it by {printable(close[0])}?" if close else None
            self.complaints.add(
                name, f"is missing from the {kind(self.value)} that the factory gave", suggestion=advice
            )
        return found

    def unknown(self) -> list[str]:
        """What was given by a name that nothing reads; only where every name must be meant for us."""
        if type(self.value) is not SimpleNamespace:
            return []
        notes = []
        for name in self._names():
            if name not in (*NEEDED, *OPTIONAL):
                close = difflib.get_close_matches(name, OPTIONAL, n=1)
                meant = f" (did you mean {close[0]}?)" if close else ""
                notes.append(f"The factory also gave {printable(name)}, which is not used{meant}.")
        return notes

    def model(self) -> nn.Module | None:
        found = self.get("model", needed=True)
        if found is None:
            return None
        if not isinstance(found, nn.Module):
            self._wrong("model", found, "a torch.nn.Module")
            return None
        lazy = [name for name, parameter in found.named_parameters() if is_lazy(parameter)]
        if lazy:
            advice = "run one batch through the model in the factory"
            self.complaints.add("model", f"{lazy[0]} has no shape yet (a lazy layer)", suggestion=advice)
        elif not any(parameter.requires_grad for parameter in found.parameters()):
            self.complaints.add("model", f"{type(found).__name__} has no parameter that can be trained")
        return found

    def data(self, name: str, config: Config, needed: bool = False) -> _Data:
        """A map-style dataset; a DataLoader is taken apart."""
        found = self.get(name, needed)
        if found is None:
            return _Data()
        taken = self._apart(name, found, config) if isinstance(found, DataLoader) else _Data(found)
        data = taken.data
        if isinstance(data, IterableDataset):
            message = (
                f"{type(data).__name__} is an IterableDataset: a resumed run cannot find its place in it"
            )
            self.complaints.add(name, message, allowed=MAP_STYLE)
        elif isinstance(data, (Mapping, str, bytes)):
            self._wrong(name, data, MAP_STYLE)
        else:
            lacks = [method for method in ("__len__", "__getitem__") if not hasattr(type(data), method)]
            if lacks:
                self.complaints.add(name, f"{kind(data)} has no {' and no '.join(lacks)}", allowed=MAP_STYLE)
            else:
                self._length(name, data)
        return taken

    def collate(self, train: _Data, evaluation: _Data) -> Collate | None:
        """What was given by that name, else the loaders' own."""
        given = self.function("collate", ("items",))
        if given is not None:
            return given
        if train.data is not None and evaluation.data is not None and train.collate != evaluation.collate:
            message = "train_data and eval_data are collated in different ways"
            self.complaints.add(
                "collate", message, allowed="one function, from a list of items to a batch, for both"
            )
        return train.collate

    def function(
        self, name: str, arguments: tuple[str, ...], needed: bool = False
    ) -> Callable[..., Any] | None:
        """Something that can be called with that many arguments."""
        found = self.get(name, needed)
        if found is None:
            return None
        call = f"{name}({', '.join(arguments)})"
        if not callable(found):
            self._wrong(name, found, f"a function that is called as {call}")
            return None
        try:
            inspect.signature(found).bind(*arguments)
        except TypeError as error:
            self.complaints.add(name, f"cannot be called as {call}: {error}")
        except ValueError:
            pass  # written in C: it does not say what it takes
        return found  # type: ignore[no-any-return]

    def parts(self, model: nn.Module | None) -> Mapping[str, Parted]:
        """Names of sub-phases, each with modules of the model."""
        found = self.get("parts")
        if found is None:
            return {}
        if not isinstance(found, Mapping):
            self._wrong("parts", found, 'a dict such as {"encoder": model.encoder}')
            return {}
        inside = set(model.modules()) if model is not None else None
        for name, part in found.items():
            modules = list(part) if isinstance(part, (Sequence, nn.ModuleList)) else [part]
            if not isinstance(name, str) or not all(isinstance(module, nn.Module) for module in modules):
                self.complaints.add(
                    f"parts[{printable(str(name))}]",
                    "is no module",
                    allowed="a module of the model, or a list of them",
                )
            elif inside is not None and not inside.issuperset(modules):
                self.complaints.add(f"parts[{printable(name)}]", "is not a part of the model")
        return found

    def tokens_per_item(self) -> float:
        found, token = self.get("tokens_per_item"), self.get("token")
        if found is None:
            if token is not None:
                self.complaints.add(
                    "tokens_per_item", f"is missing: how many of {token!r} an item holds, on average"
                )
            return 1.0
        if (
            isinstance(found, bool)
            or not isinstance(found, (int, float))
            or not math.isfinite(found)
            or found <= 0
        ):
            self._wrong("tokens_per_item", found, "a number above 0")
            return 1.0
        return float(found)

    def text(self, name: str) -> str | None:
        found = self.get(name)
        if found is not None and not isinstance(found, str):
            self._wrong(name, found, "text")
            return None
        return None if found is None else printable(found)

    def flag(self, name: str) -> bool:
        found = self.get(name)
        if found is not None and not isinstance(found, bool):
            self._wrong(name, found, "True or False")
        return found is True

    def line(self, name: str) -> str | None:
        """Text, or a function without arguments that returns it."""
        found = self._called(name)
        if found is not None and not isinstance(found, str):
            self._wrong(name, found, "text, or a function without arguments that returns it")
            return None
        return None if found is None else printable(" ".join(found.split()))

    def lines(self, name: str) -> list[str]:
        """Texts, or a function without arguments that returns them."""
        found = self._called(name)
        texts = [found] if isinstance(found, str) else found
        if texts is not None and not (
            isinstance(texts, Sequence) and all(isinstance(text, str) for text in texts)
        ):
            self._wrong(name, texts, "a list of texts, or a function without arguments that returns it")
            return []
        return [printable(" ".join(text.split())) for text in texts or ()]

    def _called(self, name: str) -> Any:
        found = self.get(name)
        if not callable(found):
            return found
        with calling(f"{name}()", where=self.complaints.where):
            return found()

    def _names(self) -> list[str]:
        return [name for name in getattr(self.value, "__dict__", ()) if not name.startswith("_")]

    def _wrong(self, name: str, found: object, allowed: str) -> None:
        self.complaints.add(name, f"is {kind(found)}", allowed=allowed)

    def _length(self, name: str, data: Sized) -> None:
        with calling(f"len({name})", where=self.complaints.where):
            count = len(data)
        if not count:
            self.complaints.add(name, "is empty")

    def _apart(self, name: str, loader: DataLoader[Any], config: Config) -> _Data:
        """The dataset and the collate function of a loader; the engine's own settings take the place of the rest."""
        data: Any = loader.dataset
        if isinstance(data, IterableDataset):
            return _Data(data)
        if (own := _own_order(loader)) is not None:
            message = (
                f"the DataLoader has {own}; items are drawn in an order that a resumed run can find again"
            )
            self.complaints.add(name, message, allowed=f"{MAP_STYLE}, or a DataLoader without it")
        collate: Any = None if loader.collate_fn is default_collate else loader.collate_fn
        train = name == "train_data"
        workers = config.loader.workers if train else config.loader.eval_workers
        other = []
        if loader.batch_size not in (None, config.batch.micro):
            other.append(f"batch_size {loader.batch_size} (batch.micro is {config.batch.micro})")
        if loader.num_workers != workers:
            key = "loader.workers" if train else "loader.eval_workers"
            other.append(f"num_workers {loader.num_workers} ({key} is {workers})")
        if loader.worker_init_fn is not None:
            other.append("worker_init_fn")
        if train and isinstance(loader.sampler, SequentialSampler):
            other.append("shuffle=False (training items are shuffled)")
        notes = (f"Of the DataLoader {name}, these do not count: {', '.join(other)}.",) if other else ()
        return _Data(data, collate, notes)


def _own_order(loader: DataLoader[Any]) -> str | None:
    """What makes a loader's order its own, in words; None when it is torch's usual one."""
    sampler: Any = loader.sampler
    if loader.batch_sampler is None:
        return "batch_size=None (its dataset makes whole batches)"
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        return f"a batch_sampler of its own ({type(loader.batch_sampler).__name__})"
    if type(sampler) is RandomSampler:
        if sampler.replacement or sampler.num_samples != len(sampler.data_source):
            return "a RandomSampler that repeats or leaves out items"
    elif type(sampler) is not SequentialSampler:
        return f"a sampler of its own ({type(sampler).__name__})"
    return None


def _not_an_object(value: object) -> str | None:
    """What the factory gave, in words, when it cannot have the parts of a workload at all."""
    if value is None:
        return "nothing (is a return missing?)"
    if isinstance(value, type):
        return f"the class {value.__name__}, not an object of it"
    if isinstance(value, nn.Module) and getattr(value, "model", None) is None:
        return "the model alone"
    if inspect.iscoroutine(value):
        value.close()
        return "a coroutine (it is an async function)"
    if isinstance(value, (list, str, bytes, int, float)) or type(value) is tuple:
        return kind(value)
    return None
