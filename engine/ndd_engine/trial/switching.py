"""Both sides of a trial in one process: the model and the optimizer stay, what differs is switched between runs."""

from __future__ import annotations

import copy
import signal
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from ndd_engine.batches import map_tensors
from ndd_engine.child import ChildError, draft_of
from ndd_engine.config import Config, anywhere
from ndd_engine.errors import TrainingError
from ndd_engine.hardware.host import resident_peak
from ndd_engine.measure.clock import PhaseClock
from ndd_engine.record.events import Json
from ndd_engine.run.run import Run
from ndd_engine.train.data.loader import Batches
from ndd_engine.train.prepare import Prepared, training_batches
from ndd_engine.train.probes.rehearsal import rehearse
from ndd_engine.train.random_state import kept_random
from ndd_engine.train.settings import VerifiedSettings
from ndd_engine.train.step.precision import make_precision
from ndd_engine.workloads.base import Batch
from ndd_watch.changes import LOADER, MODEL, switched_by

from .outcome import differences
from .peaks import peak_memory, worker_bytes
from .side import ENDLESS, LOSSES, Blocks, Side, SideFacts, signal_to


class Passes:
    """Batches of one epoch after another. left: micro-batches of the current epoch."""

    def __init__(self, batches: Batches) -> None:
        self.batches = batches
        self.left = 0
        self._epoch = -1
        self._iterator: Iterator[Batch] | None = None

    def __iter__(self) -> Passes:
        return self

    def __next__(self) -> Batch:
        batch = None if self._iterator is None else next(self._iterator, None)
        if batch is None:
            self.renew()
            assert self._iterator is not None
            batch = next(self._iterator)
        self.left -= 1
        return batch

    @property
    def workers(self) -> tuple[int, ...]:
        """The loader workers of the current epoch."""
        seen = self.batches.seen
        return seen.workers if seen is not None else ()

    def renew(self, first: bool = False) -> None:
        """Start the next epoch, or the first one again."""
        self._iterator = None  # before the next one: its workers end
        self._epoch = 0 if first else self._epoch + 1
        self._iterator = self.batches.epoch(self._epoch)
        self.left = self.batches.per_epoch or 0


class Switched:
    """One of the two configurations. facts: what was measured of it; steps: optimizer steps."""

    def __init__(self, prepared: Prepared, config: Config, passes: Passes, facts: SideFacts) -> None:
        self.config, self.passes, self.facts = config, passes, facts
        self.precision = make_precision(config, prepared.device)
        self.threads = config.run.threads or torch.get_num_threads()
        self.steps = 0


class _NoBatches:
    """In the place of the loop's own batches: the sides have theirs."""

    own = None

    def place(self, step: int) -> tuple[int, int]:
        """One endless epoch."""
        return 0, step

    def epoch(self, _epoch: int, _start: int = 0) -> Iterator[Batch]:
        """No batches."""
        return iter(())


class SwitchingBlocks(Blocks):
    """Trains the runs of both sides. A "train" command names its side."""

    def __init__(self, side: Side, run: Run, prepared: Prepared, begin: float, command: Json) -> None:
        super().__init__(side, run, prepared, begin)
        self._clock, self._warmup_s = prepared.clock, float(command["warmup_s"])
        loop = self._loop
        base, change = prepared.config, anywhere(draft_of({**command, **command["change"]}).resolve())
        changed = set(differences(base, change))
        if loop.batches.own is not None:
            # Both sides would draw from the same sampler or stream.
            raise ChildError("failed", "the order of the data is the workload's own")
        workload = loop.stepper.workload
        batches, other = loop.batches, loop.batches
        if changed & switched_by(LOADER):
            other = training_batches(workload, change, prepared.device, side.pipe.tell)
        passes = Passes(batches)
        self._model_differs = bool(changed & switched_by(MODEL))
        run.recorder.flush()  # the facts of the preparation, which both share
        self._sides = (
            Switched(prepared, base, passes, side.facts),
            Switched(
                prepared, change, passes if other is batches else Passes(other), copy.deepcopy(side.facts)
            ),
        )
        self._current = 0
        loop.batches = _NoBatches()  # type: ignore[assignment]
        loop.steps_per_epoch = ENDLESS

    def _train(self, _batches: Iterator[Batch], clock: PhaseClock, _step: int) -> Tensor | None:
        side = self._sides[self._current]
        loss = self._step(side.passes, clock, side.steps)
        side.steps += 1
        return loss

    def _begin_run(self, command: Json) -> None:
        self._switch(int(command["side"]))
        signal_to(self._workers(), signal.SIGCONT)  # a new epoch waits for them
        super()._begin_run(command)

    def _stay_within_epoch(self, steps: int) -> int:
        passes = self._sides[self._current].passes
        if passes.left <= steps * self._loop.config.batch.accumulation:
            passes.renew()
        return 0

    def _switch(self, index: int) -> None:
        """Continue with this configuration, also if it is the current one: preparing the other side sets its TF32."""
        self._current = index
        side = self._sides[index]
        if torch.get_num_threads() != side.threads:
            torch.set_num_threads(side.threads)
        self._loop.switch(side.config, side.precision)
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def _workers(self) -> tuple[int, ...]:
        return self._sides[self._current].passes.workers

    def _all_workers(self) -> tuple[int, ...]:
        return tuple({worker for side in self._sides for worker in side.passes.workers})

    # Before the first run.

    def _before(self, prepare_s: float) -> None:
        """Warm up both sides on the same first batches from the same state; compare losses, verify settings."""
        saved = _copied(self._loop.stepper.state())
        for index, side in enumerate(self._sides):
            self._side.pipe.tell("warming up")
            self._switch(index)
            with kept_random(self._device):
                self._warm_up(side, prepare_s)
            self._end_side()
            self._loop.stepper.load(_copied(saved))
            self._side.workers = self._all_workers()
            signal_to(self._workers(), signal.SIGSTOP)

    def _warm_up(self, side: Switched, prepare_s: float) -> None:
        facts, begin, stepper = side.facts, self._now(), self._loop.stepper
        settings = VerifiedSettings(stepper, side.passes.batches, self._loop.evaluation)
        if self._current and self._model_differs:  # the preparation included the baseline's test step
            for event in settings.of_model(rehearse(stepper, side.passes.batches.sample())):
                self._side.hear(facts, event)
        facts.threads = torch.get_num_threads()
        side.passes.renew(first=True)
        for event in settings.of_loader(1):
            self._side.hear(facts, event)
        ready = self._now()
        facts.prepare_s = prepare_s + ready - begin
        losses: list[Tensor] = []
        while len(losses) < LOSSES and (len(losses) < 2 or self._now() - ready < self._warmup_s):
            loss = self._train(iter(()), self._clock, side.steps)
            if loss is None:
                raise TrainingError(f"the loader ended early, at step {side.steps}")
            losses.append(loss.detach().clone())
        facts.losses = [float(loss) for loss in losses]
        facts.warmup_s, facts.warmup_steps = self._now() - ready, len(losses)
        side.steps = 0

    # Facts.

    def _end_run(self) -> None:
        self._end_side()
        super()._end_run()

    def _end_window(self) -> None:
        """Runs are short, and a window has those of both sides."""

    def _end_side(self) -> None:
        """Note the peak GPU memory of the current side."""
        if self._device.type == "cuda":
            facts = self._sides[self._current].facts
            facts.peak_bytes = max(peak_memory(self._device)[0] or 0, facts.peak_bytes or 0)

    def _facts(self) -> Json:
        self._run.recorder.flush()
        if self._device.type == "cpu" and not self._model_differs and (own := resident_peak()) is not None:
            # Otherwise, what one side needs cannot be told from what the other one did.
            for side in self._sides:
                side.facts.peak_bytes = own + worker_bytes(side.passes.workers)
        return {"sides": [asdict(side.facts) for side in self._sides]}


def _copied(state: Any) -> Any:
    """A state with its tensors copied to the host."""
    return map_tensors(state, lambda tensor: tensor.detach().to("cpu", copy=True))
