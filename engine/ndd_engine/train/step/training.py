"""What a factory's own `step` and its callbacks receive as `train`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ndd_engine.errors import TrainingError, shortened
from ndd_engine.measure import phase_clock as phase
from ndd_engine.measure.phase_clock import no_phase
from ndd_engine.workloads.own_module import kind

from .optimizers import clip_gradients

if TYPE_CHECKING:
    from .stepper import Stepper

PHASES = {
    "forward": phase.FORWARD,
    "loss": phase.LOSS,
    "backward": phase.BACKWARD,
    "clip": phase.CLIP,
    "optimizer": phase.OPTIMIZER,
    "to_device": phase.TO_DEVICE,
}
# Phases in which the configured mixed precision and attention backend apply.
_COMPUTING = (phase.FORWARD, phase.LOSS)
NAME_LENGTH = 60
MOST_NAMES = 100


class Training:
    """Passed to `step(batch, train)` and to the callbacks.

    step: optimizer steps done. loss: of the last step, a detached scalar tensor; None before the first one. stopping:
    why the run was asked to stop, or None. logged: (name, value) pairs that wait to be recorded. used: which of
    "backward" and "update" the user's code has called.
    """

    def __init__(self, stepper: Stepper) -> None:
        self.step = 0
        self.loss: Tensor | None = None
        self.stopping: str | None = None
        self.logged: list[tuple[str, Tensor | float]] = []
        self.names: set[str] = set()
        self.used: set[str] = set()
        self._stepper = stepper
        self._enter: Callable[[int], object] = no_phase
        self._phase = phase.OTHER
        self._back: list[int] = []
        self._updated = False
        stepper.workload_parts.watch(self._before_update, self._after_update)

    @property
    def model(self) -> Any:
        """The model on the device; an nn.ModuleDict if the factory returned a dict."""
        return self._stepper.model

    @property
    def optimizer(self) -> Any:
        """The optimizer; a dict by name if the factory returned a dict or a list."""
        return self._stepper.optimizer.returned

    @property
    def device(self) -> torch.device:
        return self._stepper.device

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self._stepper.total_steps

    @property
    def lr(self) -> float | None:
        """The learning rate of the first parameter group, or of the function lr without an optimizer."""
        return self._stepper.optimizer.lr

    @property
    def state(self) -> Any:
        """What is carried from batch to batch; begins with `state(batch)` in every epoch. It is kept without graph."""
        return self._stepper.carry.value

    @state.setter
    def state(self, value: Any) -> None:
        self._stepper.carry.value = value

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside as this phase: forward, loss, backward, clip, optimizer or to_device.

        The configured mixed precision applies in forward and loss.
        """
        if name not in PHASES:
            raise TrainingError(f"{name!r} is no phase; allowed: {', '.join(PHASES)}")
        outer, inner = self._phase, PHASES[name]
        self._switch(inner)
        computing: AbstractContextManager[Any] = nullcontext()
        if inner in _COMPUTING:
            computing = self._stepper.precision.autocast or nullcontext()
        try:
            with computing, self._stepper.attention() if inner in _COMPUTING else nullcontext():
                yield
        finally:
            self._switch(outer)

    def backward(self, loss: Tensor, **options: Any) -> None:
        """loss.backward(**options), with loss scaling if configured, as phase backward."""
        scaler = self._stepper.precision.scaler
        self.used.add("backward")
        with self.phase("backward"):
            (loss if scaler is None else scaler.scale(loss)).backward(**options)  # type: ignore[no-untyped-call]

    def update(self, optimizer: Any = None) -> None:
        """Clip the gradients as configured (clip.max_norm) and step an optimizer, by itself or by name; None: all.

        Gradients stay until `zero_grad` or the end of the step.
        """
        bundle, scaler = self._stepper.optimizer, self._stepper.precision.scaler
        self.used.add("update")
        chosen = bundle.chosen(optimizer)
        if (max_norm := self._stepper.config.clip.max_norm) > 0:
            with self.phase("clip"):
                if scaler is not None:
                    bundle.unscale(scaler, chosen)
                held = [item for _, one in chosen for group in one.param_groups for item in group["params"]]
                self._stepper.extras["grad_norm"] = clip_gradients(held, max_norm)
        with self.phase("optimizer"):
            bundle.step(scaler, chosen)
        self._updated = True

    def zero_grad(self, optimizer: Any = None) -> None:
        """Set the gradients of an optimizer to None, by itself or by name; None: all.

        The end of a step does so, too.
        """
        for _, one in self._stepper.optimizer.chosen(optimizer):
            one.zero_grad(set_to_none=True)

    def log(self, name: str, value: Tensor | float) -> None:
        """Record a scalar of your own, for the screen and the report: a number, or a tensor with one element.

        The record has the mean of what is logged under a name between two window events, about once a second. A tensor
        on the GPU is read back together with the losses, without waiting for it.
        """
        text = shortened(str(name), NAME_LENGTH)
        if text not in self.names and len(self.names) >= MOST_NAMES:
            raise ValueError(f"log({text!r}, …): more than {MOST_NAMES} names")
        self.names.add(text)
        if isinstance(value, Tensor):
            if value.numel() != 1 or value.is_complex():
                raise ValueError(
                    f"log({text!r}, …) received a tensor of shape {tuple(value.shape)}, not one number"
                )
            value = value.detach().reshape(())
            self.logged.append((text, value if value.device.type == "cuda" else float(value)))
        elif isinstance(value, (bool, str)) or not hasattr(value, "__float__"):
            raise TypeError(f"log({text!r}, …) received {kind(value)}, not a number")
        else:
            self.logged.append((text, float(value)))

    def stop(self, reason: str = "as the training code requested") -> None:
        """End the run after this step, with a last evaluation and checkpoint as configured; its status is done."""
        self.stopping = shortened(str(reason), 200)

    # Called by the stepper.

    def begin_step(self, step: int, enter: Callable[[int], object]) -> None:
        self.step, self._enter, self._updated = step, enter, False
        self._back.clear()
        self._switch(phase.FORWARD)

    def end_step(self) -> None:
        scaler = self._stepper.precision.scaler
        if self._updated and scaler is not None:
            self._stepper.updated(scaler)
        self._enter, self._phase = no_phase, phase.OTHER

    def checked(self, found: Any, where: str) -> Tensor:
        """The loss that a step returned, detached; the other scalars of a dict are logged. Raises TrainingError."""
        if isinstance(found, Mapping) and found:
            first, *rest = found.items()
            for name, value in rest:
                self.log(name, value)
            found = first[1]
        if isinstance(found, (int, float)) and not isinstance(found, bool):
            found = torch.tensor(float(found), device=self.device)
        if not isinstance(found, Tensor) or found.numel() != 1:
            shape = f" of shape {tuple(found.shape)}" if isinstance(found, Tensor) else ""
            allowed = "return the loss, a scalar tensor, or a dict of scalars with the loss first"
            raise TrainingError(f"{where}: step returned {kind(found)}{shape}; {allowed}")
        return found.detach().reshape(()).to(self.device)

    def _switch(self, inner: int) -> None:
        self._phase = inner
        self._enter(inner)

    def _before_update(self, *_: Any) -> None:
        self._back.append(self._phase)
        self._switch(phase.OPTIMIZER)

    def _after_update(self, *_: Any) -> None:
        if self._back:
            self._switch(self._back.pop())
