"""The training loop of one of several ranks: what all do together, what they agree on, what only rank 0 does."""

from __future__ import annotations

import json
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ndd_engine.batches import map_tensors
from ndd_engine.errors import TrainingError, UsageError, shortened
from ndd_engine.measure.capture import FunctionProfiles
from ndd_engine.measure.reporting import first_bad
from ndd_engine.measure.stragglers import RankComparison, compared_steps
from ndd_engine.measure.window import Window
from ndd_engine.record.event import RankEvent
from ndd_engine.record.events import Event, FunctionsEvent, MarkEvent, WindowEvent
from ndd_engine.record.file import EventLog
from ndd_engine.record.rundir import RunDir
from ndd_engine.run.control import ONCE, STOPS
from ndd_engine.train.checkpoint import CheckpointStore
from ndd_engine.train.checkpoint_state import Like, Path, is_sharded, kept_buffers, kept_random
from ndd_engine.train.data.loader import Batches, EvalBatches
from ndd_engine.train.evaluate import EvaluationResult, evaluate
from ndd_engine.train.loop import Loop
from ndd_engine.train.rehearsal import kept_training
from ndd_engine.train.request import OpenRun
from ndd_engine.train.step.stepper import Stepper
from ndd_watch.clock import NEVER, OTHER, DeviceClock, PhaseClock, no_phase

from .hang import HangWatch
from .strategy import GATHER, PART, Ddp, StreamWaits, effects, mark_collectives
from .world import World

# "early": training ends before its last step. "not_finite": a loss or a parameter is not. "window": a window ends.
# "profile": Python's profiler sees the next step. "capture": torch's profiler sees the next steps.
ASKS = (*STOPS, "kill", "pause", *ONCE, "early", "not_finite", "window", "profile", "capture")
# Seconds from one agreement to the next: those of a window, within these bounds.
MOST_OFTEN_S, LEAST_OFTEN_S = 0.25, 1.0
MOST_STEPS = 4096
# After this multiple of these seconds it is late, and rank 0 brings it forward.
LATE = 1.2


@dataclass(frozen=True)
class Losses:
    """Losses since the last agreement: their sum and number, and the last one if there is any."""

    total: float = 0.0
    count: float = 0.0
    last: float | None = None


class Agreement:
    """Which steps the ranks agree after, and what all of them want.

    Every rank takes part in every step: none can end a step before the others have begun to exchange its gradients.
    """

    def __init__(self, world: World, window_s: float) -> None:
        self._world = world
        self.every_s = min(max(window_s, MOST_OFTEN_S), LEAST_OFTEN_S)
        self._count = 0  # agreements so far
        self.begin(0)

    def begin(self, step: int) -> None:
        """Training begins after so many steps."""
        self._gap = 1
        self._goes_on(step, 1)

    def _goes_on(self, step: int, steps: int) -> None:
        self._since, self._next, self._reported = step, step + steps, False
        self.rested()

    def rested(self) -> None:
        """The time so far says nothing about the speed of steps."""
        self._t = time.perf_counter()

    @property
    def since_s(self) -> float:
        """Seconds since the last agreement."""
        return time.perf_counter() - self._t

    def due(self, step: int) -> bool:
        """After each step: whether the ranks agree now."""
        if step < self._next and self.since_s > LATE * self.every_s:
            self._bring_forward(step)
        return step >= self._next

    def _bring_forward(self, step: int) -> None:
        """Agree after a step that no rank has ended, as soon as all of them look here for its number.

        None of them misses it: rank 0 chooses it before it takes part in the next step, which none can end without it.
        """
        world, name = self._world, f"agreement/{self._count}"
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)  # the host must not be ahead of the exchange
        ranks = [f"{name}/{rank}" for rank in range(world.size)]
        if not self._reported:
            self._reported = True
            world.store.set(ranks[world.rank], str(step))
        if world.place.first and world.store.check(ranks):
            world.store.set(name, str(max(step, *(int(world.store.get(key)) for key in ranks)) + 1))
        if world.store.check([name]):
            self._next = min(self._next, int(world.store.get(name)))

    def now(self, step: int, asks: Set[str], losses: Losses) -> tuple[Mapping[str, int], Losses]:
        """After the same step of all ranks: wait for all of them.

        Returns what they ask for, each with one of the ranks that do, and the losses of all.
        """
        regular, steps = step >= self._next, self._next - step
        if regular:
            fitting = round((step - self._since) * self.every_s / max(self.since_s, 1e-9))
            steps = min(max(fitting, 1), MOST_STEPS, 2 * self._gap)
        last = (0.0, 0.0) if losses.last is None else (losses.last, 1.0)
        mine = [*(float(name in asks) for name in ASKS), float(steps), losses.total, losses.count, *last]
        every = torch.empty(self._world.size, len(mine), dtype=torch.float64)
        getattr(dist, GATHER)(
            every.view(-1), torch.tensor(mine, dtype=every.dtype), group=self._world.control
        )
        columns = every.T.tolist()
        asked = {name: column.index(1.0) for name, column in zip(ASKS, columns, strict=False) if any(column)}
        counts, totals, numbers, lasts, known = columns[len(ASKS) :]
        steps = int(min(counts))
        if regular:
            self._gap = steps
        self._count += 1
        self._goes_on(step, steps)
        return asked, Losses(sum(totals), sum(numbers), sum(lasts) / sum(known) if any(known) else None)


class RankLoop(Loop):
    """A loop that takes every step, evaluation and checkpoint together with the other ranks.

    Requests, the ends of windows and early ends are agreed on, see Agreement.
    """

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
        config, strategy = stepper.config, stepper.strategy
        if not world.place.first:
            # on_step and on_evaluate may change the model or the learning rate: every rank has to. Only all ranks
            # together can call a sharded model.
            parts = stepper.workload_parts
            samples = parts.samples if strategy is not None and strategy.gathers else None
            stepper.workload_parts = replace(parts, on_checkpoint=None, samples=samples)
        super().__init__(run, stepper, batches, evaluation, clock)
        self.world = world
        run.control.share(self._meet)
        self.callbacks.alone = False
        self.store = CheckpointStore(
            self.store.folder, config.checkpoint.keep, world.exchange, stepper.device, placed_like(stepper)
        )
        # As with a profiled step, a rank that is captured alone would be taken for a straggler.
        self.captures.alone = False
        self.functions = AgreedProfiles(
            self.reporter, config.log.profile_every_s, stepper.settled, captures=self.captures.paced
        )
        if not world.place.first and (trace := self.captures.trace) is not None:
            # One file for each rank; `ndd-console trace` reads them together.
            stem, dot, rest = trace.name.partition(".")
            self.captures.trace = trace.with_name(f"{stem}.rank-{world.rank}{dot}{rest}")
        self.agreement = Agreement(world, config.log.window_s)
        # Losses since the last agreement, and those of all ranks that no window has yet.
        self._arrived: list[float] = []
        self._of_all = Losses()
        # What is not finite on this rank, and one of the ranks where something is, once all know it.
        self._bad: str | None = None
        self._bad_rank: int | None = None
        self.reporter.put, self.reporter.windowed = self._put, self._windowed
        self._comparing = None
        if world.place.first:
            self._comparing = Comparing(run.directory, world.hosts, config.parallel.strategy, run.put)
        self._device_steps = DeviceSteps(clock.gpu) if stepper.device.type == "cuda" else None
        self._process, self._cpu_ns = psutil.Process(), time.process_time_ns()
        self._waits: StreamWaits | None = None
        self._hang = HangWatch(
            world, lambda: self.step, clock, run.put, config.parallel.hang_s, run.directory
        )
        if strategy is not None:
            self.settings.of_ranks = lambda: effects(strategy, config.parallel, self._hang.limit_s)

    def settle(self, sample: Callable[[], Any]) -> None:
        """Before the first step: mark where ranks exchange data, and two passes for DDP's final buckets.

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
        with kept_random(stepper.device), kept_training(stepper), kept_buffers(stepper.model):
            batch = stepper.moved(sample())
            for _ in range(2):
                stepper.forward_backward(map_tensors(batch, torch.clone), no_phase)
                stepper.drop_gradients()
        strategy.mark_exchange(self.clock)

    def run(self) -> str | None:
        self.agreement.begin(self.step)
        self._cpu_ns = time.process_time_ns()
        self._hang.start()
        try:
            status = super().run()
            self.compared()
            return status
        finally:
            self._hang.stop()
            if self._comparing is not None:
                self._comparing.stop()
            if self._waits is not None:
                self._waits.stop()

    def _after_step(self, action: int) -> None:
        if self._device_steps is not None:
            self._device_steps.after(self.step)
        if not self.agreement.due(self.step):
            return
        first, functions, clock = self.world.place.first, self.functions, self.clock
        if first and self._long_ago():
            self.control.request("checkpoint")
            self._last_save = time.monotonic()
        more = set()
        # A window ends at the agreement that is nearest to its length.
        if clock.window_ns + 0.5e9 * self.agreement.since_s >= self._window_ns:
            more.add("window")
        if first and functions.wished(self.step):
            more.add("profile")
        elif first and self.captures.wished:
            more.add("capture")
        asked = self._agree(more)
        if self._device_steps is not None:
            self._device_steps.wanted = True
        if "window" in asked:
            self._window()
        if "profile" in asked:
            functions.agreed()
        if "capture" in asked:
            self.captures.agreed()
        self._end_if_bad()

    # Where all ranks are at the same place.

    def _agree(self, more: Set[str] = frozenset(), timed: bool = True) -> Mapping[str, int]:
        """Wait for all ranks, and take over what they ask for.

        more: what this rank asks for beside requests. timed: whether the time counts.
        """
        asks = self.control.asks() | more
        if self.callbacks.wanted is not None:
            asks.add("early")
        if self._bad is not None:
            asks.add("not_finite")
        arrived, self._arrived = self._arrived, []
        mine = Losses(sum(arrived), len(arrived), arrived[-1] if arrived else None)
        with self.clock.part(PART) if timed else nullcontext():
            asked, found = self.agreement.now(self.step, asks, mine)
        of_all = self._of_all
        last = of_all.last if found.last is None else found.last
        self._of_all = Losses(of_all.total + found.total, of_all.count + found.count, last)
        self.control.obey(asked)
        if (rank := asked.get("early")) is not None:
            self.callbacks.early = self.callbacks.wanted or f"asked for by rank {rank}"
        self._bad_rank = asked.get("not_finite", self._bad_rank)
        return asked

    def _meet(self) -> None:
        """While all ranks pause."""
        self._agree(timed=False)
        self._hang.moved()

    def _finish(self) -> None:
        self._check(self.losses.drain(), agreed=True)
        super()._finish()

    def evaluate(self, again: bool = False, due: bool = False) -> None:
        super().evaluate(again, due)
        self._agree()
        self._end_if_bad()

    def _evaluated(self) -> EvaluationResult:
        if self.stepper.strategy is not None:
            self.stepper.strategy.sync_buffers()
        found = evaluate(self.stepper, self.evaluation, self._between, self._everywhere)
        # Each rank computes a metric that cannot be merged. Schedulers follow it, which must not differ between ranks.
        with self.clock.part(PART):
            return replace(found, metrics=self.world.exchange.from_first(lambda: found.metrics))

    def _everywhere(self, mine: Any) -> list[Any]:
        with self.clock.part(PART):
            return self.world.exchange.everywhere(mine)

    def save(self, again: bool = False) -> bool:
        if self.stepper.strategy is not None:
            self.stepper.strategy.sync_buffers()
        saved = super().save(again)
        self.agreement.rested()
        return saved

    def _check(self, arrived: list[tuple[int, float]], saving: bool = False, agreed: bool = False) -> None:
        """What is not finite on one rank ends all of them after the same step, or now if all are here.

        saving, agreed: all ranks call this.
        """
        self._arrived += [value for _, value in arrived]
        try:
            super()._check(arrived, saving)
        except TrainingError as error:
            if self._bad is None:
                self._bad, bad = str(error), first_bad(arrived)
                body = json.dumps([self.step if bad is None else bad[0], self._bad])
                self.world.notes.put(f"bad/{self.world.rank}", body)
        if saving or agreed:
            self._agree()
            self._end_if_bad()

    def _end_if_bad(self) -> None:
        """Raise TrainingError if something is not finite on a rank: on rank 0 with what was found first."""
        if self._bad_rank is None:
            return
        ranks = range(self.world.size) if self.world.place.first else (self._bad_rank,)
        found = [(*json.loads(text), rank) for rank in ranks if (text := self.world.notes.get(f"bad/{rank}"))]
        if not found:
            raise TrainingError(
                self._bad or f"rank {self._bad_rank} has a loss or a parameter that is not finite"
            )
        _step, text, rank = min(found)
        raise TrainingError(text if rank == self.world.rank else f"rank {rank}: {text}")

    # What is recorded.

    def _put(self, event: Event) -> None:
        self.put(event)
        if isinstance(event, FunctionsEvent) and not event.inside and self._comparing is not None:
            self._comparing.add(event)

    def _windowed(self, window: Window, event: WindowEvent) -> WindowEvent:
        """Tell what this rank did in the steps of a window; returns its event with the losses of all ranks."""
        if self._device_steps is not None:
            self._device_steps.add(window)
        cpu_ns, self._cpu_ns = self._cpu_ns, time.process_time_ns()
        if window.rows and not event.profiled:
            self._tell(window, event.step, self._cpu_ns - cpu_ns)
        of_all = self._of_all
        if not of_all.count:
            return replace(event, loss=None, last_loss=None)
        self._of_all = Losses()
        step = event.step if event.last_loss is None else event.last_loss[0]
        last = None if of_all.last is None else (step, of_all.last)
        return replace(event, loss=of_all.total / of_all.count, last_loss=last)

    def _tell(self, window: Window, step: int, cpu_ns: int) -> None:
        begin, last = step - len(window.rows), window.rows[-1]
        rows: dict[int, Sequence[float | None]]
        if self._device_steps is not None:
            rows = {**self._device_steps.known()}
        else:
            rows = {**dict(enumerate(window.rows, begin))}
            # What follows the last step, such as the agreement.
            rows[step - 1] = [spent + after for spent, after in zip_longest(last, window.rest, fillvalue=0)]
        strategy, device = self.stepper.strategy, self.world.device
        hidden = None if strategy is None else strategy.hidden_ns()
        rss = None
        with suppress(psutil.Error):
            rss = self._process.memory_info().rss
        told = compared_steps(step, begin, window.names, rows)
        told = replace(
            told,
            cpu_ns=round(cpu_ns * told.wall_ns / window.wall_ns),
            hidden_ns=None if hidden is None else round(hidden),
            rss_bytes=rss,
            allocated_bytes=torch.cuda.memory_allocated(device) if device.type == "cuda" else None,
        )
        if self._comparing is not None:
            self._comparing.add(told)
        else:
            self.put(told)

    def compared(self) -> None:
        if self._comparing is not None:
            self._comparing.wait()

    # While the caller keeps all ranks from their next step.

    @contextmanager
    def rest(self) -> Iterator[None]:
        with self._hang.quiet(), super().rest():
            yield
        self.agreement.rested()

    # What only one rank decides, or none.

    def _save_if_long_ago(self) -> None:
        """Rank 0 asks for such a checkpoint, see `_after_step`."""

    def _between(self) -> None:
        super()._between()
        self._hang.moved()


class DeviceSteps:
    """The steps of which a GPU's clock knows the phases: one after each agreement, on all ranks the same.

    It is not the step right after the agreement, which includes the recording of a window. wanted: whether one is due.
    """

    def __init__(self, gpu: DeviceClock) -> None:
        self.wanted = False
        self._gpu, gpu.due = gpu, NEVER
        self._keys: deque[int] = deque()
        self._rows: dict[int, list[float | None]] = {}

    def after(self, step: int) -> None:
        """After each step."""
        if self.wanted:
            self.wanted = False
            self._keys.append(step)
            self._gpu.begin(OTHER, step)

    def add(self, window: Window) -> None:
        """The steps that have become known until the end of a window."""
        for key, row in window.device:
            self._rows[key] = [row.get(index) for index in range(len(window.names))]

    def known(self) -> dict[int, list[float | None]]:
        """Steps since the last call but the newest two, which the device may still work at."""
        keys = [self._keys.popleft() for _ in range(len(self._keys) - 2)]
        found = {key: self._rows[key] for key in keys if key in self._rows}
        for key in [key for key in self._rows if key not in self._keys]:
            del self._rows[key]
        return found


class Comparing:
    """Compares all ranks, on a thread of rank 0: its own windows, and those in the records of the others.

    hosts: of each rank. put: records what is found.
    """

    # Between two looks at the records, and for each rank; how long `wait` waits.
    LOOK_S, RANK_S, REST_S = 0.1, 0.005, 2.0

    def __init__(
        self, run: RunDir, hosts: Sequence[str], strategy: str, put: Callable[[Event], None]
    ) -> None:
        self._comparison = RankComparison(missing="no new windows in the record")
        self._comparison.strategy, self._comparison.launched = strategy, len(hosts)
        for rank, host in enumerate(hosts):
            self._comparison.join(rank, host)
        self._comparison.expect(range(len(hosts)))
        self._look_s = max(self.LOOK_S, self.RANK_S * len(hosts))
        # What earlier processes recorded does not count.
        paths = {rank: run.ranks / str(rank) / "events.jsonl" for rank in range(1, len(hosts))}
        self._logs = {
            rank: EventLog(path, path.stat().st_size if path.exists() else 0) for rank, path in paths.items()
        }
        self._put = put
        self._mine: queue.SimpleQueue[RankEvent | FunctionsEvent | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        threading.Thread(target=self._work, name="ndd-compare", daemon=True).start()

    def add(self, event: RankEvent | FunctionsEvent) -> None:
        """What this rank tells."""
        self._idle.clear()
        self._mine.put(event)

    def wait(self) -> None:
        """Wait until all windows so far are compared, for a moment at most."""
        self._idle.wait(self.REST_S)

    def stop(self) -> None:
        """Compare no more."""
        self._mine.put(None)

    def _work(self) -> None:
        comparison = self._comparison
        while True:
            with suppress(queue.Empty):
                if (mine := self._mine.get(timeout=self._look_s if comparison.waits else None)) is None:
                    return
                comparison.take(0, mine)
                if comparison.waits:
                    continue  # the others are writing
            for rank, log in self._logs.items():
                with suppress(OSError):  # it is not there yet, or a network disk does not answer
                    for _t, event in log.new():
                        if isinstance(event, (RankEvent, FunctionsEvent)):
                            comparison.take(rank, event)
            for event in comparison.new():
                self._put(event)
            if not comparison.waits and self._mine.empty():
                self._idle.set()


class AgreedProfiles(FunctionProfiles):
    """Profiles the step after an agreement on it. Rank 0 asks for one when it is due.

    A rank alone that profiles a step would hold up the others, and would be taken for a straggler.
    """

    _wished_ns = NEVER

    def wished(self, step: int) -> bool:
        """Whether a step should be profiled now that so many are done."""
        return self._clock.now() >= self._wished_ns and step >= self._next_step

    def agreed(self) -> None:
        """All ranks profile the next step."""
        self.due_ns = 0

    def start(self, step: int) -> None:
        super().start(step)
        self._postpone()

    def begin(self, step: int) -> None:
        super().begin(step)
        if not self.active and not self.due_ns:
            self._wait()

    def _paced(self, step_ns: int) -> None:
        super()._paced(step_ns)
        if self.due_ns != NEVER:  # the steps have become slower: a look is due earlier
            self._postpone()

    def _wait(self) -> None:
        super()._wait()
        self._postpone()

    def _postpone(self) -> None:
        self._wished_ns, self.due_ns = self.due_ns, NEVER


def placed_like(stepper: Stepper) -> Like:
    """Where the tensors of a checkpoint belong in the model and the optimizers of a stepper, see Like.

    The state of an optimizer that made no step yet is sharded as its parameters are.
    """
    state: dict[str, Any] = {}
    parameters: dict[str, list[nn.Parameter]] = {}

    def like(path: Path, size: torch.Size) -> Tensor | None:
        if not state:
            state.update(stepper.state())
            for name, optimizer in stepper.optimizer.by_name.items():
                parameters[name] = [item for group in optimizer.param_groups for item in group["params"]]
        if (parameter := _parameter(path, parameters)) is not None and is_sharded(parameter):
            if parameter.shape == size:
                return parameter
            if math.prod(size) > 1 and not is_sharded(_found(state, path)):
                name = shortened(".".join(map(str, path)), 120)
                text = "has another shape than its parameter, so it cannot be sharded"
                raise UsageError(f'{name} {text}; resume with parallel.strategy = "ddp"')
        found = _found(state, path)
        return found if is_sharded(found) and found.shape == size else None

    return like


def _found(state: Any, path: Path) -> Any:
    for key in path:
        try:
            state = state[key]
        except (KeyError, IndexError, TypeError):
            return None
    return state


def _parameter(path: Path, parameters: Mapping[str, Sequence[nn.Parameter]]) -> nn.Parameter | None:
    """The parameter that a value of an optimizer's state belongs to: optimizer.state.3.exp_avg belongs to the fourth.

    parameters: those of each optimizer, in the order of its groups.
    """
    if path[0] != "optimizer":
        return None
    name, rest = ("", path[1:]) if "" in parameters else (path[1], path[2:])
    chosen = parameters.get(name, ())
    if len(rest) < 3 or rest[0] != "state" or not isinstance(rest[1], int):
        return None
    return chosen[rest[1]] if 0 <= rest[1] < len(chosen) else None
