"""A prepared workload: model, data, loss, metric, and the names of its units, as a factory returned them.

The factory returns an object, a dict or a SimpleNamespace; docs/own-model.md describes its parts.
"""

from __future__ import annotations

import copy
import math
import pickle
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, ClassVar, Protocol, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import (
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from ndd_engine.batches import map_tensors, tensors
from ndd_engine.errors import DoesNotFitError, TrainingError, shortened
from ndd_engine.hardware.gpus import free_memory
from ndd_engine.text import printable, size

from .interface import kind
from .result import Parted, TrainingParts

RANDOM = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
# Samplers whose indices depend only on their generator and the number of the pass.
_EXACT = (SequentialSampler, DistributedSampler, *RANDOM)


@dataclass(frozen=True)
class Order:
    """The order and the batches of training or evaluation data, as torch's DataLoader names them.

    shuffle: a new order in every pass; without it, the order of the dataset. sampler: an iterable of indices.
    batch_sampler: an iterable of lists of indices. generator: the DataLoader's. batch_size: items of a batch; None:
    `batch.micro`. whole: the items of a stream are batches (batch_size=None). drop_last: leave out an incomplete last
    batch. worker_init_fn: called in each loader worker with its number. name: of the data in messages ("train_data").
    """

    shuffle: bool = True
    sampler: Any = None
    batch_sampler: Any = None
    generator: Any = None
    batch_size: int | None = None
    whole: bool = False
    drop_last: bool = True
    worker_init_fn: Callable[[int], Any] | None = None
    name: str = "train_data"

    @property
    def chosen(self) -> Any:
        """The sampler or batch sampler; None if there is neither."""
        return self.sampler if self.batch_sampler is None else self.batch_sampler

    @property
    def title(self) -> str:
        """The sampler in a message: "batch_sampler Buckets"."""
        kind = shortened(type(self.chosen).__name__, 80)
        return f"{'sampler' if self.batch_sampler is None else 'batch_sampler'} {kind}"


class Stream(IterableDataset[Any]):
    """A user's IterableDataset. Its first items may be looked at without losing them for the first pass.

    in_workers: loader workers read it, each from a copy of its own. again: every pass starts where the first one did
    (an evaluation), also after one that was ended early.
    """

    def __init__(self, data: Any, in_workers: bool = False, again: bool = False) -> None:
        self.data, self.in_workers = data, in_workers
        self._start = [copy.deepcopy(data.state_dict())] if again and has_state(data) else None
        self._first: list[Any] = []
        self._rest: Iterator[Any] | None = None
        # Of the items that were looked at: nanoseconds of wall and of CPU time, and their number.
        self.spent = (0, 0, 0)

    def peek(self, count: int) -> list[Any]:
        """Up to `count` first items. Raises what the stream raises. Call it before the first pass only."""
        missing = count - len(self._first)
        if missing > 0:
            if self._rest is None:
                # Reading a stream can change it, and the workers' copies have to start at its beginning.
                data = pickle.loads(pickle.dumps(self.data)) if self.in_workers else self.data
                self._rest = iter(data)
            begin, begin_cpu, before = time.perf_counter_ns(), time.thread_time_ns(), len(self._first)
            self._first += islice(self._rest, missing)
            wall, cpu, items = self.spent
            cpu += time.thread_time_ns() - begin_cpu
            self.spent = (wall + time.perf_counter_ns() - begin, cpu, items + len(self._first) - before)
        return self._first[:count]

    @property
    def first_iterator(self) -> Iterator[Any] | None:
        """The iterator that `peek` read from, None if nothing was looked at."""
        return self._rest

    def forget(self) -> None:
        """Drop the items that were looked at: the stream continues from a loaded state."""
        self._first, self._rest = [], None

    def begin(self) -> Iterator[Any]:
        """An iterator over a pass in this process: of the dataset itself, after the items that were looked at."""
        first, rest = self._first, self._rest
        self.forget()
        if rest is None or self.in_workers:
            if self._start is not None:
                self.data.load_state_dict(copy.deepcopy(self._start[0]))
            return iter(self.data)
        return chain(first, rest) if first else rest

    def __iter__(self) -> Iterator[Any]:
        return self.begin()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_first": [], "_rest": None}


def has_state(thing: object) -> bool:
    """Whether an object can save and restore its position: torch's convention of state_dict and load_state_dict."""
    return all(callable(getattr(thing, name, None)) for name in ("state_dict", "load_state_dict"))


def item_count(data: Any) -> int | None:
    """The number of items of a dataset; None for a stream, whose length is unknown."""
    return None if isinstance(data, Stream) else len(data)


def position(order: Order) -> str:
    """How a resumed run finds its place in the order.

    "replay": the pass is drawn again up to it. "state": the sampler restores it. "anew": the pass starts again.
    """
    chosen = order.chosen
    if chosen is None or isinstance(chosen, (list, tuple, range)):
        return "replay"
    if has_state(chosen):
        return "state"
    return "replay" if type(chosen) in _EXACT else "anew"


Model = TypeVar("Model", bound=nn.Module)
Batch = Any  # a Tensor, or a tuple, list or dict of them; whatever the workload's datasets collate to


Collate = Callable[[list[Any]], Batch]  # a list of items to a batch
# What a batch counts in the mean over several: its valid tokens or items, at least 0; a number or a scalar tensor.
Weight = Callable[[Batch], "Tensor | float"]


class GatherDataset(Protocol):
    """A dataset whose tensors are in memory, so that it makes a batch in one gather."""

    def __len__(self) -> int: ...

    def batch(self, indices: Tensor) -> Batch:
        """The items at `indices` (B,) int64, on the data's device, as the collated batch would be."""

    def to(self, device: torch.device) -> GatherDataset:
        """The same data on another device."""

    @property
    def nbytes(self) -> int:
        """Bytes that `to` allocates on the device."""


class GatherItems(Dataset[Any]):
    """Base class of datasets whose attributes are the tensors; see GatherDataset."""

    def __len__(self) -> int:
        raise NotImplementedError

    def check(self, index: int) -> None:
        """Raises IndexError for an index outside 0..len - 1, which also ends an iteration over the items."""
        if not 0 <= index < len(self):
            raise IndexError(f"item {index} of {len(self)}")

    def to(self, device: torch.device) -> Self:
        moved = copy.copy(self)
        vars(moved).update(map_tensors(vars(self), lambda tensor: tensor.to(device)))
        return moved

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in tensors(vars(self)))


class Metric(Protocol):
    """Accumulates over the batches of an evaluation; one object per evaluation."""

    def update(self, output: Any, batch: Batch, loss: Tensor) -> None:
        """Adds a batch on the device. Must not keep the graph or large tensors."""

    def result(self) -> dict[str, float]:
        """Values by name, "loss" among them; the first one is the headline metric."""

    # Three more are optional, so that several ranks can share an evaluation. `mergeable` is true if the order of the
    # batches does not matter. `parts()` returns what this metric has accumulated: tensors and numbers in lists or
    # dicts. `merge(parts)` replaces that by the parts of all ranks. Otherwise every rank evaluates everything.


@dataclass
class MeanLoss:
    """The default metric: mean loss over batches, weighted by `weight` or batch size, on the device until `result`."""

    total: Tensor | None = None
    count: Tensor | float = 0
    weight: Weight | None = field(default=None, kw_only=True)
    mergeable: ClassVar[bool] = True

    def update(self, output: Any, batch: Batch, loss: Tensor) -> None:
        weight = batch_size(batch) if self.weight is None else on_host(self.weight(batch))
        if not isinstance(weight, Tensor) and not weight:
            return  # the mean over nothing is NaN
        value = loss.detach().to(torch.float64 if loss.device.type == "cpu" else torch.float32) * weight
        self.total = value if self.total is None else self.total + value
        self.count = self.count + weight

    def result(self) -> dict[str, float]:
        return {"loss": float(self.total) / float(self.count) if self.total is not None else float("nan")}

    def parts(self) -> Any:
        """Sum and weight of the losses, see Metric."""
        return None if self.total is None else [float(self.total), float(self.count)]

    def merge(self, parts: Sequence[Any]) -> None:
        """Continue with the sums of all ranks."""
        sums = [part for part in parts if part is not None]
        self.total = (
            torch.tensor(math.fsum(total for total, _ in sums), dtype=torch.float64) if sums else None
        )
        self.count = math.fsum(count for _, count in sums)


class _Checked:
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


class CheckedWeight:
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


@dataclass(eq=False)
class Workload:
    """A model with its data, as the training loop uses it. `forward` and `loss` are separate, so that each is timed.

    where: file and line of the factory. item, token: names of an item and of what it is made of. tokens_per_item: the
    mean over the training items if lengths vary. collate: None for torch's default. parts: sub-phases of forward, by
    their modules. weight: what the loss of a batch is a mean over, if not its items; batches may be on the host or on
    the device. order, eval_order: None for the engine's. epochs_differ: item i of epoch e has the index e *
    len(train_data) + i, and cannot be cached. alternatives: see RunEvent of the record. functions: the factory's
    forward, loss and metric, as far as it has them. An item depends only on its index and the seed, so that a resumed
    run sees the same data.
    """

    name: str
    where: str
    model: nn.Module
    train_data: Any
    eval_data: Any
    functions: Mapping[str, Callable[..., Any] | None]
    weight: Weight | None
    better: str
    item: str
    token: str | None
    tokens_per_item: float
    collate: Collate | None
    parts: Mapping[str, Parted]
    epochs_differ: bool
    alternatives: Mapping[str, tuple[str, str]]
    model_text: str | None
    data_text: str | None
    remarks: list[str]
    order: Order | None
    eval_order: Order | None
    training: TrainingParts

    def with_model(self, model: nn.Module, known: dict[int, Any]) -> Workload:
        """The same workload with a copy of the model. known: id of a parameter -> its copy."""
        copied = copy.copy(self)
        copied.model, copied.training = model, self.training.copied(known)
        return copied

    def forward(self, model: nn.Module, batch: Batch, *state: Any) -> Any:
        """The factory's forward, or the model called with the batch, its first element or its items as keywords.

        state: what the model carries from batch to batch, if the factory returned `state`.
        """
        if (forward := self.functions["forward"]) is not None:
            return forward(model, batch, *state)
        if isinstance(batch, dict):
            return model(**batch, **({"state": state[0]} if state else {}))
        return model(batch[0] if isinstance(batch, (tuple, list)) else batch, *state)

    def loss(self, output: Any, batch: Batch) -> Tensor:
        """The factory's loss. Raises TrainingError if it is not a scalar with a gradient."""
        assert self.functions["loss"] is not None  # else the factory has its own step and eval_step
        value = self.functions["loss"](output, batch)
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
        if self.functions["metric"] is None:
            return loss
        found = self.functions["metric"]()
        lacks = [name for name in ("update", "result") if not callable(getattr(found, name, None))]
        if lacks:
            message = f"metric() returned {kind(found)}, which has no {' and no '.join(lacks)}"
            raise self._wrong(f"{message}; return an object with update(output, batch, loss) and result()")
        return _Checked(found, loss, self._wrong)

    def describe_model(self) -> str:
        """One line: that of the factory, or the class and its layers."""
        if self.model_text is not None:
            return self.model_text
        leaves = [module for module in self.model.modules() if not any(module.children())]
        kinds = Counter(type(module).__name__ for module in leaves if module is not self.model)
        layers = ", ".join(f"{count} {name}" for name, count in kinds.most_common(4))
        model = self.model
        name = ", ".join(model) if isinstance(model, nn.ModuleDict) else type(model).__name__
        return printable(name + (f": {layers}" if layers else ""))

    def describe_data(self) -> str:
        """One line: that of the factory, or the numbers of items."""
        if self.data_text is not None:
            return self.data_text
        train, evaluation = (
            "a stream of unknown length" if count is None else f"{count:,} items"
            for count in map(item_count, (self.train_data, self.eval_data))
        )
        return f"{train}{' per epoch' * (self.order is None)}, {evaluation.removesuffix(' items')} for evaluation"

    def notes(self) -> Sequence[str]:
        """What a user should know about this data or model: clipped outliers, dropped characters."""
        return self.remarks

    def _wrong(self, message: str) -> TrainingError:
        return TrainingError(f"{self.where}: {message}")


class _SkipInitialisation(TorchFunctionMode):
    """Skips in-place operations: tensors without contents need no initialisation, and it would make torch import
    much of itself."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, named = getattr(func, "__name__", ""), kwargs or {}
        if name.endswith("_") and not name.endswith("__"):
            return args[0] if args else named["tensor"]  # torch.nn.init passes it by name
        return func(*args, **named)


def build_checked(build: Callable[[], Model]) -> Model:
    """The model that `build` returns, after checking on the meta device that its parameters fit into memory.

    Raises DoesNotFitError before anything is allocated.
    """
    with torch.device("meta"), _SkipInitialisation():
        needed = sum(parameter.nbytes for parameter in build().parameters())
    if needed > (free := free_memory()):
        raise DoesNotFitError(
            f"the parameters of this model take {size(needed)}, but only {size(free)} of memory are free"
        )
    return build()


def items_at(data: Any, indices: Sequence[int]) -> list[Any]:
    """The items of a dataset at these indices, fetched together if it can. Raises ValueError for another number."""
    fetch = getattr(data, "__getitems__", None)
    if not callable(fetch):
        return [data[index] for index in indices]
    items = list(fetch(list(indices)))
    if len(items) != len(indices):
        kind = shortened(type(data).__name__, 80)
        raise ValueError(f"{kind}.__getitems__ returned {len(items):,} items for {len(indices):,} indices")
    return items


def batch_size(batch: Batch) -> int:
    """Items in a batch: the first dimension of the first tensor that has one."""
    return next(int(tensor.shape[0]) for tensor in tensors(batch) if tensor.ndim)


def on_host(weight: Tensor | float) -> Tensor | float:
    """A weight as a number, unless that would wait for a device (or the tensor has no value, as a fake one)."""
    plain = type(weight) is Tensor and weight.device.type == "cpu"
    return float(weight) if plain or not isinstance(weight, Tensor) else weight


def full_precision(output: Tensor) -> Tensor:
    """The output in fp32, or in fp64 if it is already."""
    return output if output.dtype == torch.float64 else output.float()


def seed_all(seed: int) -> None:
    """Seed torch's and Python's random generators, and NumPy's if it is imported."""
    torch.manual_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)


# These compute with statistics that stay in fp32, which their parameters have to match.
_WITH_STATISTICS = (
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.InstanceNorm1d, nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)  # fmt: skip


def narrowed_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Those that `keep_in_bf16` concerns: all that are floating, but for those of layers with running statistics."""
    return [
        parameter
        for module in model.modules()
        if not isinstance(module, _WITH_STATISTICS)
        for parameter in module.parameters(recurse=False)
        if parameter.is_floating_point()
    ]


def keep_in_bf16(model: nn.Module) -> None:
    """Keep the fp32 parameters of a model in bf16; buffers stay as they are. Optimizers may have the parameters."""
    for parameter in narrowed_parameters(model):
        if parameter.dtype == torch.float32:
            parameter.data = parameter.data.to(torch.bfloat16)


def parameter_count(model: nn.Module) -> int:
    """Trainable parameters; shared ones count once."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def overlapping_segments(series: Tensor, span: int) -> Tensor:
    """A view (N - span + 1, span, …) of all segments of a contiguous series (N, …), without copying.

    Each segment is contiguous, so index_select copies whole segments; indexing with a matrix of positions would copy
    row by row.
    """
    shape, strides = series.shape, series.stride()
    return series.as_strided((len(series) - span + 1, span, *shape[1:]), (strides[0], *strides))
