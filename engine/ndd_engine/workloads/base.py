"""What the loop needs of a workload: a model, data, a loss, a metric, and the names of its units."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import Dataset

from ndd_engine.errors import DoesNotFitError
from ndd_engine.hardware.host import free_memory
from ndd_engine.text import size

Model = TypeVar("Model", bound=nn.Module)
Batch = Any  # a Tensor, or a tuple, list or dict of them; whatever the workload's datasets collate to


Collate = Callable[[list[Any]], Batch]  # items to one batch
Parted = nn.Module | Sequence[nn.Module]  # what a sub-phase is made of


class GatherDataset(Protocol):
    """A dataset whose tensors lie in memory, and which therefore makes a batch in one gather."""

    def __len__(self) -> int: ...

    def batch(self, indices: Tensor) -> Batch:
        """The items at `indices` (B,) int64, on the data's device, as the collated batch would be."""

    def to(self, device: torch.device) -> GatherDataset:
        """The same data on another device."""

    @property
    def nbytes(self) -> int:
        """Bytes that `to` takes on the device."""


class Metric(Protocol):
    """Accumulates over evaluation batches; one object per evaluation."""

    def update(self, output: Any, batch: Batch, loss: Tensor) -> None:
        """One batch on the device. Must not keep graph or large tensors."""

    def result(self) -> dict[str, float]:
        """Figures by name, "loss" among them; the first one is the headline."""


class Workload(Protocol):
    """A prepared workload; see `GatherDataset` for what its datasets may offer beyond torch's protocol.

    `forward` and `loss` are separate so that each phase is timed by itself.

    A dataset's item must depend on nothing but its index and the seed in the configuration (never on a global
    random state), so that a resumed run sees the same data.
    """

    name: str
    item: str  # what one item is called: "window"
    token: str | None  # what an item is made of: "character", "sample"
    tokens_per_item: float  # a mean over the training items where lengths vary
    model: nn.Module
    train_data: Dataset[Any]
    eval_data: Dataset[Any]
    better: str  # "lower" or "higher": which way the headline metric improves
    # Items to a batch, where torch's default_collate does not do: items of different lengths.
    collate: Collate | None
    # Sub-phases of forward, by the modules that make them up.
    parts: Mapping[str, Parted]
    # Augmented anew each epoch: item i of epoch e is asked for as e * len(train_data) + i, and cannot be cached.
    epochs_differ: bool

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        """The model's output for a batch on the device."""

    def loss(self, output: Any, batch: Batch) -> Tensor:
        """Mean loss, a scalar tensor on the device, with graph."""

    def metric(self) -> Metric:
        """A fresh metric."""

    def describe_model(self) -> str:
        """One line: "6 layers, 6 heads, width 384"."""

    def describe_data(self) -> str:
        """One line: "465,231 characters, 1,723 windows of 256 a pass"."""

    def notes(self) -> Sequence[str]:
        """Things a user should know of this data or model: clipped outliers, dropped characters."""


@dataclass
class MeanLoss:
    """The simplest metric: mean loss over batches, weighted by batch size, on the device until asked."""

    total: Tensor | None = None
    count: int = 0

    def update(self, output: Any, batch: Batch, loss: Tensor) -> None:
        weight = batch_size(batch)
        value = loss.detach().to(torch.float64 if loss.device.type == "cpu" else torch.float32) * weight
        self.total = value if self.total is None else self.total + value
        self.count += weight

    def result(self) -> dict[str, float]:
        return {"loss": float(self.total) / self.count if self.total is not None else float("nan")}


class _Unwritten(TorchFunctionMode):
    """What would only be written in place stays as it is: without contents there is nothing to draw, and torch would
    load much of itself to do nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, named = getattr(func, "__name__", ""), kwargs or {}
        if name.endswith("_") and not name.endswith("__"):
            return args[0] if args else named["tensor"]  # as `torch.nn.init` hands it over
        return func(*args, **named)


def built(build: Callable[[], Model]) -> Model:
    """The model, unless its parameters alone take more memory than there is: found out before any is taken.

    Raises DoesNotFitError.
    """
    with torch.device("meta"), _Unwritten():
        needed = sum(parameter.nbytes for parameter in build().parameters())
    if needed > (free := free_memory()):
        raise DoesNotFitError(
            f"the parameters of this model take {size(needed)}, and {size(free)} of memory are free"
        )
    return build()


def batch_size(batch: Batch) -> int:
    """Items in a batch: the first dimension of the first tensor that has one."""
    return next(int(tensor.shape[0]) for tensor in _tensors(batch) if tensor.ndim)


def _tensors(batch: Batch) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, (tuple, list, dict)):
        for part in batch.values() if isinstance(batch, dict) else batch:
            yield from _tensors(part)


def parameter_count(model: nn.Module) -> int:
    """Trainable parameters, shared ones counted once."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def overlapping(series: Tensor, span: int) -> Tensor:
    """A view (N - span + 1, span, …) of all windows of a contiguous series (N, …): nothing is copied.

    Each window is one stretch of memory, so index_select copies whole stretches, where indexing with a matrix of
    places would copy row by row.
    """
    shape, strides = series.shape, series.stride()
    return series.as_strided((len(series) - span + 1, span, *shape[1:]), (strides[0], *strides))
