"""The interface of a workload to the training loop: model, data, loss, metric, and the names of its units."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import Dataset

from ndd_engine.batches import map_tensors, tensors
from ndd_engine.errors import DoesNotFitError, shortened
from ndd_engine.hardware.host import free_memory
from ndd_engine.text import size

from .order import Order
from .problems import Progress
from .training import TrainingParts

Model = TypeVar("Model", bound=nn.Module)
Batch = Any  # a Tensor, or a tuple, list or dict of them; whatever the workload's datasets collate to


Collate = Callable[[list[Any]], Batch]  # a list of items to a batch
# What a batch counts in the mean over several: its valid tokens or items, at least 0; a number or a scalar tensor.
Weight = Callable[[Batch], "Tensor | float"]
Parted = nn.Module | Sequence[nn.Module]  # the modules of a sub-phase


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

    # Optional, so that several ranks can share an evaluation: `mergeable`, true if the order of the batches does not
    # matter; `parts()`, what this metric has accumulated (tensors and numbers in lists or dicts); and `merge(parts)`,
    # which replaces that by the parts of all ranks. Otherwise every rank evaluates everything.


class Workload(Protocol):
    """A prepared workload; see `GatherDataset` for what its datasets may add to torch's protocol.

    `forward` and `loss` are separate so that each phase is timed by itself.

    An item must depend only on its index and the seed in the configuration (never on a global random state), so that
    a resumed run sees the same data.
    """

    name: str
    item: str  # what one item is called: "window"
    token: str | None  # what an item is made of: "character", "sample"
    tokens_per_item: float  # the mean over the training items if lengths vary
    model: nn.Module
    train_data: Dataset[Any]
    eval_data: Dataset[Any]
    better: str  # "lower" or "higher": which way the headline metric improves
    # Items to a batch, for items that torch's default_collate cannot collate (different lengths).
    collate: Collate | None
    # Sub-phases of forward, by the modules that make them up.
    parts: Mapping[str, Parted]
    # What the loss of a batch is a mean over, if not its items. Batches may be on the host or on the device. Steps with
    # several micro-batches use it, so that their gradient is that of one batch with all of the items.
    weight: Weight | None
    # The order and the batches of the data, if they are not the engine's.
    order: Order | None
    eval_order: Order | None
    # Items change every epoch: item i of epoch e has the index e * len(train_data) + i, and cannot be cached.
    epochs_differ: bool
    # Its own optimizers, step, carried state and callbacks; see training_of for workloads without.
    training: TrainingParts

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        """The model's output for a batch on the device."""

    def loss(self, output: Any, batch: Batch) -> Tensor:
        """Mean loss, a scalar tensor on the device, with graph."""

    def metric(self) -> Metric:
        """A new metric."""

    def describe_model(self) -> str:
        """One line: "6 layers, 6 heads, width 384"."""

    def describe_data(self) -> str:
        """One line: "465,231 characters, 1,723 windows of 256 per epoch"."""

    def notes(self) -> Sequence[str]:
        """What a user should know about this data or model: clipped outliers, dropped characters."""


class BuiltinWorkload:
    """Base class of the built-in workloads; see Workload."""

    token: str | None
    tokens_per_item: float
    train_data: Dataset[Any]
    eval_data: Dataset[Any]
    model: nn.Module
    parts: Mapping[str, Parted]
    better: str = "lower"
    collate: Collate | None = None
    weight: Weight | None = None
    order: Order | None = None
    eval_order: Order | None = None
    epochs_differ: bool = False
    training: TrainingParts = TrainingParts()

    def __init__(self, data: str, notes: Sequence[str]) -> None:
        """data: the one-line description of the data."""
        self._data_line, self._notes = data, notes

    def _build(self, build: Callable[[], Model], progress: Progress) -> Model:
        """Builds and returns the model, which names its sub-phases with a method `parts`."""
        progress("building the model")
        model: Any = build_checked(build)
        self.model, self.parts = model, model.parts()
        return model  # type: ignore[no-any-return]

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        return model(batch[0])

    def describe_data(self) -> str:
        return self._data_line

    def notes(self) -> Sequence[str]:
        """What the reader of the data did to it, and what the metrics cannot show."""
        return self._notes


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


def parameter_count(model: nn.Module) -> int:
    """Trainable parameters; shared ones count once."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def sliding_windows(series: Tensor, span: int) -> Tensor:
    """A view (N - span + 1, span, …) of all windows of a contiguous series (N, …), without copying.

    Each window is contiguous, so index_select copies whole windows; indexing with a matrix of positions would copy
    row by row.
    """
    shape, strides = series.shape, series.stride()
    return series.as_strided((len(series) - span + 1, span, *shape[1:]), (strides[0], *strides))
