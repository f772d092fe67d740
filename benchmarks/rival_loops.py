"""The same training in other loops: code shared by all sides of the rivals benchmark, and the hand-written loop.

Every side has the same workload functions, weights, optimizer, data order and loader arguments. A `Witness` between
the loop and the workload records when the first and the last timed step start their forward pass. The time of a block
excludes one-time work of a loop (setup, first batch, teardown) and includes all work per step and per epoch.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import chain, islice, repeat
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ndd_engine.config import Config
from ndd_engine.train.data.item_sources import EpochBatches
from ndd_engine.train.data.loader import to_device
from ndd_engine.train.step.optimizers import make_optimizer
from ndd_engine.workloads.base import Workload

from .engine import Engine, now

# Untimed steps at the start of every block: the first batch of an iteration, and other one-time work.
WARM_UP = 2
# How often each loop reads its loss, as the engine's log.every_steps.
READ_EVERY = 10


class Witness:
    """Wraps `forward` and `loss` of a workload: times a block of steps, and records losses on demand.

    accumulation: calls of both per step.
    """

    def __init__(self, workload: Workload, accumulation: int, device: torch.device) -> None:
        self._forward, self._loss = workload.forward, workload.loss
        self._device, self._per_step = device, accumulation
        self._calls = 0
        self._first = self._last = -1
        self._begin = self._end = math.nan
        self._noted: list[Tensor] | None = None

    def expect(self, warm_up: int, steps: int, note: bool = False) -> int:
        """Prepare for a block; returns its number of steps, including the one whose start ends the timed ones."""
        self._calls = 0
        self._first, self._last = warm_up * self._per_step, (warm_up + steps) * self._per_step
        self._begin = self._end = math.nan
        self._noted = [] if note else None
        return warm_up + steps + 1

    def forward(self, model: nn.Module, batch: Any) -> Any:
        """Call the workload's function."""
        if self._calls == self._first:
            self._begin = now(self._device)
        elif self._calls == self._last:
            self._end = now(self._device)
        self._calls += 1
        return self._forward(model, batch)

    def loss(self, output: Any, batch: Any) -> Tensor:
        """Call the workload's function."""
        loss = self._loss(output, batch)
        if self._noted is not None:
            self._noted.append(loss.detach().clone())
        return loss

    @property
    def seconds(self) -> float:
        """Seconds of the timed steps. Raises RuntimeError if the loop ended before them."""
        if math.isnan(taken := self._end - self._begin):
            raise RuntimeError(f"the block ended after {self._calls} forward passes, before its last step")
        return taken

    @property
    def losses(self) -> list[float]:
        """The recorded ones, averaged per step."""
        noted, width = [float(loss) for loss in self._noted or ()], self._per_step
        return [sum(noted[at : at + width]) / width for at in range(0, len(noted), width)]


class Side(Protocol):
    """One of the compared loops."""

    name: str
    witness: Witness

    def train(self, epoch: int, steps: int) -> None:
        """Run that many optimizer steps from the start of this epoch."""


def seconds(side: Side, epoch: int, steps: int) -> float:
    """Seconds of `steps` timed steps of a block that starts with this epoch."""
    side.train(epoch, side.witness.expect(WARM_UP, steps))
    return side.witness.seconds


def first_losses(side: Side, steps: int) -> list[float]:
    """The loss of each of the first steps."""
    side.train(0, side.witness.expect(0, steps - 1, note=True))
    return side.witness.losses


class EngineSide:
    """A real run of the engine with clock, losses, windows and recorder, and with the sampler while it trains."""

    name = "engine"

    def __init__(self, subject: Engine) -> None:
        stepper = subject.loop.stepper
        self.subject = subject
        self.witness = Witness(stepper.workload, stepper.config.batch.accumulation, stepper.device)
        vars(stepper.workload).update(forward=self.witness.forward, loss=self.witness.loss)
        subject.prepared.sampler.stop()

    def train(self, epoch: int, steps: int) -> None:
        """See Side."""
        loop, sampler = self.subject.loop, self.subject.prepared.sampler
        loop.step = epoch * loop.steps_per_epoch
        sampler.start()
        try:
            self.subject.train(steps)
        finally:
            sampler.stop()


class InOrder(EpochBatches):
    """The engine's order; each iteration is the next epoch, with whole optimizer steps only."""

    def __init__(self, config: Config, workload: Workload) -> None:
        items = len(workload.train_data)  # type: ignore[arg-type]
        super().__init__(items, config.batch.micro, config.run.seed, workload.epochs_differ)
        self._accumulation = config.batch.accumulation

    def __len__(self) -> int:
        return super().__len__() // self._accumulation * self._accumulation

    def __iter__(self) -> Iterator[list[int]]:
        # The order is drawn with the first batch, so that creating an unused iterator does not skip an epoch.
        lists = islice(super().__iter__(), len(self))
        first = next(lists)
        self.epoch += 1
        yield first
        yield from lists


class Rival:
    """Base class of the other loops: a copy of the model, the same optimizer and the same loader.

    settings: how a library is used, for a note.
    """

    name: str
    settings = ""

    def __init__(self, config: Config, workload: Workload, device: torch.device) -> None:
        self.config, self.device = config, device
        self.model: nn.Module = copy.deepcopy(workload.model).to(device).train()
        self.optimizer = make_optimizer(config.optimizer, self.model, device)
        self.witness = Witness(workload, config.batch.accumulation, device)
        self.order = InOrder(config, workload)
        self.loader: DataLoader[Any] = DataLoader(
            workload.train_data,
            batch_sampler=self.order,
            collate_fn=workload.collate,
            # Its own, as in the engine: creating an iterator draws a number, which must not shift the dropout masks.
            generator=torch.Generator().manual_seed(config.run.seed),
        )
        self.last_loss = float("nan")

    def train(self, epoch: int, steps: int) -> None:
        """See Side."""
        raise NotImplementedError


class Bare(Rival):
    """A loop without a library: loader, zero_grad, forward, loss, backward, clip, step, loss.item()."""

    name = "bare loop"

    def __init__(
        self, config: Config, workload: Workload, device: torch.device, witnessed: bool = True
    ) -> None:
        """witnessed: whether the witness sees the steps of `train`."""
        super().__init__(config, workload, device)
        self._work = self.witness if witnessed else workload
        self._begin(0)
        self._done = 0

    def _begin(self, epoch: int) -> None:
        self.order.set(epoch)
        self._batches = chain.from_iterable(repeat(self.loader))

    def train(self, epoch: int, steps: int) -> None:
        """See Side."""
        self._begin(epoch)
        self.go_on(steps)

    def go_on(self, steps: int) -> None:
        """Train that many steps with the next batches."""
        config, model, optimizer, device = self.config, self.model, self.optimizer, self.device
        forward, loss_of, batches = self._work.forward, self._work.loss, self._batches
        accumulation, max_norm = config.batch.accumulation, config.clip.max_norm
        moves = device.type != "cpu"
        autocast = None
        if config.precision.amp == "bf16":
            autocast = torch.autocast(device.type, dtype=torch.bfloat16)
        for _ in range(steps):
            for _ in range(accumulation):
                batch = next(batches)
                if moves:
                    batch = to_device(batch, device)
                with autocast or nullcontext():
                    output = forward(model, batch)
                    loss = loss_of(output, batch)
                if accumulation > 1:
                    loss = loss / accumulation
                loss.backward()  # type: ignore[no-untyped-call]
            if max_norm > 0:
                torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()
            self._done += 1
            if self._done % READ_EVERY == 0:
                self.last_loss = loss.item()
