"""The training loop of one of several ranks: what all of them do together, and what only rank 0 does."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from ndd_engine.batches import map_tensors
from ndd_engine.errors import TrainingError
from ndd_engine.measure.clock import PhaseClock, no_phase
from ndd_engine.measure.losses import first_bad
from ndd_engine.record.events import MarkEvent
from ndd_engine.train.callbacks import Callbacks
from ndd_engine.train.data.loader import Batches, EvalBatches
from ndd_engine.train.evaluate import Result, evaluate
from ndd_engine.train.loop import Loop
from ndd_engine.train.probes.rehearsal import kept_training
from ndd_engine.train.random_state import kept_random
from ndd_engine.train.request import OpenRun
from ndd_engine.train.step.kept import kept_buffers
from ndd_engine.train.step.stepper import Stepper

from .effects import effects
from .hang import HangWatch
from .marks import PART, DdpMarks, StreamWaits, mark_collectives
from .profiles import AgreedProfiles
from .sharded import ShardedStore, placed_like
from .strategy import Ddp
from .team import Team
from .world import World


class RankLoop(Loop):
    """A loop that takes every step, evaluation and checkpoint together with the other ranks.

    Requests, the ends of windows and early ends are voted on; see Team.
    """

    callbacks: RankCallbacks
    functions: AgreedProfiles
    world: World

    def __init__(
        self,
        run: OpenRun,
        stepper: Stepper,
        batches: Batches,
        evaluation: EvalBatches,
        clock: PhaseClock,
        world: World,
    ) -> None:
        config = stepper.config
        self.team = team = Team(
            world, run.control, run.put, clock, config.parallel.strategy, config.log.window_s
        )
        if not world.place.first:
            # on_step and on_evaluate may change the model or the learning rate: every rank has to. Only all ranks
            # together can call a sharded model.
            strategy, parts = stepper.strategy, stepper.workload_parts
            samples = parts.samples if strategy is not None and strategy.gathers else None
            stepper.workload_parts = replace(parts, on_checkpoint=None, samples=samples)
        if stepper.strategy is not None:
            team.hidden_ns = stepper.strategy.hidden_ns
        super().__init__(
            replace(run, control=team.control, put=team.put), stepper, batches, evaluation, clock
        )
        self.world = world
        self.callbacks = RankCallbacks(
            stepper, run.request.probes, run.put, self.losses, self.better, self._callback_failed
        )
        self.callbacks.team = team
        team.wants_end = lambda: self.callbacks.wanted is not None
        self.store = ShardedStore(
            self.store.folder, config.checkpoint.keep, world.control, stepper.device, placed_like(stepper)
        )
        self.functions = AgreedProfiles(self.reporter, config.log.profile_every_s, stepper.settled)
        if not world.place.first and (trace := self.captures.trace) is not None:
            # One file for each rank; `ndd-console trace` reads them together.
            stem, dot, rest = trace.name.partition(".")
            self.captures.trace = trace.with_name(f"{stem}.rank-{world.rank}{dot}{rest}")
        self._waits: StreamWaits | None = None
        self._hang = HangWatch(
            world, lambda: self.step, clock, run.put, config.parallel.hang_s, run.directory
        )
        if (strategy := stepper.strategy) is not None:
            self.settings.of_ranks = lambda: effects(strategy, config.parallel, self._hang.limit_s)
        team.voted = self._hang.moved

    def settle(self, sample: Callable[[], Any]) -> None:
        """Before the first step: two passes for DDP's final buckets, which also show where the exchange begins.

        Without them, a resumed run would sum gradients in another order than the run before. Nothing else changes: a
        resumed run continues with the random numbers and the buffers that it loaded. sample: makes a micro-batch.
        """
        stepper, strategy = self.stepper, self.stepper.strategy
        if not isinstance(strategy, Ddp):
            if stepper.device.type == "cuda":
                self._waits = StreamWaits(self.clock, torch.cuda.current_stream(stepper.device))
            elif not mark_collectives(stepper.model.modules(), self.clock):
                text = "exchange and skew are not measured: this version of torch cannot time FSDP2 on a CPU"
                self.put(MarkEvent("note", self.step, text))
            return
        assert strategy.ddp is not None
        marks = DdpMarks(strategy.ddp)
        with kept_random(stepper.device), kept_training(stepper), kept_buffers(stepper.model):
            batch = stepper.moved(sample())
            for _ in range(2):
                stepper.forward_backward(map_tensors(batch, torch.clone), no_phase)
                stepper.drop_gradients()
        marks.learned(self.clock)

    def run(self) -> str | None:
        self.team.begin(self.step)
        self._hang.start()
        try:
            return super().run()
        finally:
            self._hang.stop()
            self.team.end()
            if self._waits is not None:
                self._waits.stop()

    def _after_step(self, action: int) -> None:
        team, functions = self.team, self.functions
        if not team.after_step(self.step, counts=functions.last_step != self.step):
            return
        if self._long_ago() and self.world.place.first:
            team.control.own.request("checkpoint")
            self._last_save = time.monotonic()
        profile = self.world.place.first and functions.wished(self.step)
        asked = team.turn(profile)
        if "window" in asked:
            super()._window()
            team.cut()
        if "profile" in asked:
            functions.agreed()
        self._end_if_bad()

    # While the caller keeps all ranks from their next step.

    def quiet(self) -> AbstractContextManager[None]:
        """A context in which no rank is expected to end a step."""
        return self._hang.quiet()

    def slept(self, seconds: float) -> None:
        super().slept(seconds)
        self.team.votes.paused()

    # Where all ranks are at the same place.

    def _window(self) -> None:
        super()._window()
        self.team.settle()

    def _finish(self) -> None:
        self._check(self.losses.drain(), agreed=True)
        super()._finish()

    def evaluate(self, again: bool = False, due: bool = False) -> None:
        super().evaluate(again, due)
        self.team.agree()
        self._end_if_bad()

    def _evaluated(self) -> Result:
        if self.stepper.strategy is not None:
            self.stepper.strategy.sync_buffers()
        found = evaluate(self.stepper, self.evaluation, self._between, _Shared(self.world, self.clock))
        # Each rank computes a metric that cannot be merged. Schedulers follow it, which must not differ between ranks.
        with self.clock.part(PART):
            return replace(found, metrics=self.world.exchange.from_first(lambda: found.metrics))

    def save(self, again: bool = False) -> bool:
        if self.stepper.strategy is not None:
            self.stepper.strategy.sync_buffers()
        return super().save(again)

    def _check(self, arrived: list[tuple[int, float]], saving: bool = False, agreed: bool = False) -> None:
        """What is not finite on one rank ends all of them after the same step, or now if all are here.

        saving, agreed: all ranks call this.
        """
        try:
            super()._check(arrived, saving)
        except TrainingError as error:
            bad = first_bad(arrived)
            self.team.note_bad(self.step if bad is None else bad[0], str(error))
        if saving or agreed:
            self.team.agree()
            self._end_if_bad()

    def _end_if_bad(self) -> None:
        if (text := self.team.agreed_bad) is not None:
            raise TrainingError(text)

    # What only one rank decides, or none.

    def _save_if_long_ago(self) -> None:
        """Rank 0 asks for such a checkpoint by a vote, see `_after_step`."""

    def _between(self) -> None:
        # Ranks have different shares of an evaluation: a window of all ranks ends after it.
        self.team.control.own.check_kill()
        self._hang.moved()

    def record_rest(self) -> None:
        """Record what was measured since the last window after an error; the other ranks may be gone."""
        try:
            self.reporter.window(self.step)
        finally:
            self.team.give_up()


class _Shared:
    """See evaluate.Shared."""

    def __init__(self, world: World, clock: PhaseClock) -> None:
        self._world, self._clock = world, clock

    def parts(self, mine: Any) -> list[Any]:
        with self._clock.part(PART):
            return self._world.exchange.everywhere(mine)


class RankCallbacks(Callbacks):
    """Callbacks whose early end takes effect on all ranks after the same step.

    wanted: why this rank wants training to end early.
    """

    team: Team | None = None
    wanted: str | None = None

    @property
    def early(self) -> str | None:
        if self.team is None or self.team.early is None:
            return None
        return self.wanted or f"asked for by rank {self.team.early}"

    @early.setter
    def early(self, reason: str | None) -> None:
        self.wanted = reason
