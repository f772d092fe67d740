"""One optimizer step: micro-batches forward and backward, then clip, update, reset. Used by the loop and the probes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ndd_engine.config.schema import Config
from ndd_engine.workloads.base import Workload

from . import clock as phase
from .clock import PhaseClock
from .loader import to_device
from .optim import Precision, learning_rate, make_optimizer, make_precision


class Stepper:
    """Model, optimizer and precision of a run, and the step that ties them together.

    `step` leaves the clock in phase `log`; the caller ends the step.
    """

    def __init__(self, workload: Workload, config: Config, device: torch.device, total_steps: int) -> None:
        self.workload = workload
        self.config = config
        self.device = device
        self.total_steps = total_steps
        self.model: nn.Module = workload.model.to(device)
        self.model.train()
        self.precision: Precision = make_precision(config, device)
        self.optimizer = make_optimizer(config.optimizer, self.model, device)
        self.parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.lr = config.optimizer.lr
        # Scalars on the device worth knowing beside the loss; read back together with it.
        self.extras: dict[str, Tensor] = {}
        self._moves = device.type != "cpu"

    def step(self, batches: Iterator[Any], clock: PhaseClock, step: int) -> Tensor | None:
        """One optimizer step from the next `batch.accumulation` micro-batches.

        Returns the mean loss (scalar, on the device, without graph), or None when the epoch has no whole step left.
        """
        enter = clock.enter
        workload, model, precision = self.workload, self.model, self.precision
        accumulation = self.config.batch.accumulation
        scaler = precision.scaler
        total: Tensor | None = None
        for _ in range(accumulation):
            enter(phase.DATA_WAIT)
            batch = next(batches, None)
            if batch is None:
                return None
            if self._moves:
                enter(phase.TO_DEVICE)
                batch = to_device(batch, self.device)
            enter(phase.FORWARD)
            with precision.autocast or nullcontext():
                output = workload.forward(model, batch)
                enter(phase.LOSS)
                loss = workload.loss(output, batch)
            if accumulation > 1:
                loss = loss / accumulation
            enter(phase.BACKWARD)
            if scaler is None:
                loss.backward()  # type: ignore[no-untyped-call]
            else:
                scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            part = loss.detach()
            total = part if total is None else total + part
        self.update(clock, step)
        return total

    def update(self, clock: PhaseClock, step: int) -> None:
        """Clip, optimizer step and reset of the gradients at the learning rate of `step`."""
        enter = clock.enter
        scaler = self.precision.scaler
        max_norm = self.config.clip.max_norm
        if max_norm > 0:
            enter(phase.CLIP)
            if scaler is not None:
                scaler.unscale_(self.optimizer)
            self.extras["grad_norm"] = torch.nn.utils.clip_grad_norm_(self.parameters, max_norm)
        enter(phase.OPTIMIZER)
        lr = learning_rate(step, self.total_steps, self.config.optimizer.lr, self.config.schedule)
        if lr != self.lr or step == 0:
            self.lr = lr
            for group in self.optimizer.param_groups:
                group["lr"] = lr
        if scaler is None:
            self.optimizer.step()
        else:
            scaler.step(self.optimizer)
            scaler.update()
            # get_scale() would wait for the device.
            if (scale := scaler._scale) is not None:
                self.extras["loss_scale"] = scale
        enter(phase.ZERO_GRAD)
        self.optimizer.zero_grad(set_to_none=self.config.optimizer.set_to_none)
        enter(phase.LOG)

    def optimizer_bytes(self) -> int:
        """What the optimizer keeps beside the parameters; 0 before the first step."""
        return sum(
            value.nbytes
            for state in self.optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        )

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of this."""
        scaler = self.precision.scaler
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": scaler.state_dict() if scaler is not None else None,
        }

    def load(self, state: dict[str, Any]) -> None:
        """The reverse of state. Raises RuntimeError, ValueError or KeyError when it belongs to another model."""
        self.model.load_state_dict(state["model"])
        for saved, group in zip(state["optimizer"]["param_groups"], self.optimizer.param_groups, strict=True):
            if ("betas" in saved) != ("betas" in group):
                raise ValueError(f"its optimizer is not {self.config.optimizer.name}")
            # A resume may change the options in the configuration; the checkpoint would bring the old ones back.
            saved.update({key: value for key, value in group.items() if key != "params"})
        self.optimizer.load_state_dict(state["optimizer"])
        self.lr = float(self.optimizer.param_groups[0]["lr"])
        if self.precision.scaler is not None and state["scaler"]:
            self.precision.scaler.load_state_dict(state["scaler"])
