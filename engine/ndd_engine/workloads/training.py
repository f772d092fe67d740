"""What a factory may return to train in its own way: optimizers, schedulers, a step, carried state, callbacks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ndd_engine.batches import map_tensors
from ndd_engine.errors import TrainingError

from .own_module import kind

STEP, EPOCH, EVALUATION = "step", "epoch", "evaluation"


@runtime_checkable
class Stateful(Protocol):
    """An object whose state belongs into a checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Restores what `state_dict` returned."""


@dataclass(frozen=True)
class Scheduler:
    """A scheduler of torch.optim.lr_scheduler, and after what it steps: "step", "epoch" or "evaluation"."""

    scheduler: Any
    every: str

    @property
    def by_metric(self) -> bool:
        """Whether its `step` takes a metric, as that of ReduceLROnPlateau."""
        return takes_metric(self.scheduler)


def takes_metric(scheduler: Any) -> bool:
    """Whether a scheduler's `step` needs the value of a metric."""
    return isinstance(scheduler, ReduceLROnPlateau)


@dataclass
class TrainingParts:
    """The parts of a workload that replace or extend the training loop's own; the defaults of all other workloads.

    where: file and line of the factory. optimizers: None for the configured one; by name, "" for one that was returned
    by itself; empty if the step updates the parameters itself. lr: the learning rate of a step, called as
    lr(step, total_steps). step, eval_step, state, on_step, on_evaluate, on_checkpoint, samples: the factory's
    functions. stateful: objects to checkpoint.
    """

    where: str = ""
    optimizers: dict[str, Optimizer] | None = None
    schedulers: tuple[Scheduler, ...] = ()
    lr: Callable[[int, int], Any] | None = None
    step: Callable[..., Any] | None = None
    eval_step: Callable[..., Any] | None = None
    state: Callable[..., Any] | None = None
    stateful: Mapping[str, Stateful] = field(default_factory=dict)
    on_step: Callable[..., Any] | None = None
    on_evaluate: Callable[..., Any] | None = None
    on_checkpoint: Callable[..., Any] | None = None
    samples: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        self._first = {name: copy.deepcopy(thing.state_dict()) for name, thing in self._things()}
        self._handles: list[Any] = []

    def reset(self) -> None:
        """Put the optimizers, schedulers and stateful objects back to the state in which the factory returned them."""
        for name, thing in self._things():
            thing.load_state_dict(copy.deepcopy(self._first[name]))

    def watch(self, before: Callable[..., Any], after: Callable[..., Any]) -> None:
        """Call these around every `step` of the optimizers, instead of those of an earlier call."""
        for handle in self._handles:
            handle.remove()
        self._handles = [
            handle
            for optimizer in (self.optimizers or {}).values()
            for handle in (optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after))
        ]

    def copied(self, known: dict[int, Any]) -> TrainingParts:
        """The same parts for a copy of the model; without schedulers. known: id of a parameter -> its copy."""
        if self.optimizers is None:
            return self
        made = {name: copy.deepcopy(optimizer, known) for name, optimizer in self.optimizers.items()}
        return replace(self, optimizers=made, schedulers=(), stateful={})

    def _things(self) -> list[tuple[str, Any]]:
        return [
            *((f"optimizer {name}", optimizer) for name, optimizer in (self.optimizers or {}).items()),
            *((f"scheduler {index}", item.scheduler) for index, item in enumerate(self.schedulers)),
            *((f"stateful {name}", thing) for name, thing in self.stateful.items()),
        ]


_NONE = TrainingParts()


def training_of(workload: Any) -> TrainingParts:
    """The training parts of a workload; defaults if it has none."""
    found: TrainingParts = getattr(workload, "training", _NONE)
    return found


class Carry:
    """State that a model carries from batch to batch (truncated backpropagation through time).

    value: the state after the last batch, detached; None before the first one.
    """

    def __init__(self, workload: Any) -> None:
        self._workload, self._parts = workload, training_of(workload)
        self.value: Any = None

    def forward(self, model: Any, batch: Any) -> Any:
        """The workload's forward. With `state`, it also receives and returns the state."""
        return self.call("forward", self._workload.forward, model, batch)

    def call(self, name: str, function: Callable[..., Any], model: Any, batch: Any) -> Any:
        """Call `function` like forward. Raises TrainingError if it does not return (output, state)."""
        if self._parts.state is None:
            return function(model, batch)
        self.begin(batch)
        found = function(model, batch, self.value)
        if not isinstance(found, (tuple, list)) or len(found) != 2:
            message = f"with state, {name} has to return (output, state); it returned {kind(found)}"
            raise TrainingError(f"{self._parts.where}: {message}")
        output, self.value = found[0], detached(found[1])
        return output

    def begin(self, batch: Any) -> None:
        """Create the state before the first batch of an epoch or evaluation."""
        if self.value is None and self._parts.state is not None:
            self.value = self._parts.state(batch)


def detached(state: Any) -> Any:
    """The same state without its graph."""
    return map_tensors(state, Tensor.detach)
