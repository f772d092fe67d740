"""What is recorded while the loop trains: windows, memory, settings, recompilations, collections and stacks."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ndd_engine.config.schema import Config
from ndd_engine.record.events import Event, MarkEvent, WindowEvent
from ndd_engine.text import printable
from ndd_engine.train.probes.rehearsal import compiled_graphs
from ndd_engine.train.settings import VerifiedSettings
from ndd_engine.train.step.stepper import Stepper

from . import clock as phase
from .clock import PhaseClock
from .collector import Collector
from .gpu_memory import memory_event
from .losses import LossReader
from .stacks import StackWatch


class Reporter:
    """Turns what was measured since the last reading into events. `put` records one.

    steps: optimizer steps in the window so far. arrived: (step, loss) that reached the host in it. epochs_begun: by
    this process.
    """

    def __init__(
        self,
        config: Config,
        stepper: Stepper,
        steps_per_epoch: int,
        clock: PhaseClock,
        losses: LossReader,
        put: Callable[[Event], None],
        settings: VerifiedSettings | None = None,
    ) -> None:
        self.config = config
        self.stepper = stepper
        self.clock = clock
        self.losses = losses
        self.put = put
        self.settings = settings
        self.steps = 0
        self.profiled = False  # a profiler burst is in the window
        self.arrived: list[tuple[int, float]] = []
        self._steps_per_epoch = steps_per_epoch
        self.epochs_begun = 0
        self.collector = Collector(config.run.gc_every_steps)
        self._stacks: StackWatch | None = None
        self._graphs: int | None = None  # compiled so far; None: nothing is compiled
        self._memory_seen = stepper.device.type == "cuda"

    def begin(self, step: Callable[[], int], resting: Callable[[], bool]) -> None:
        """Training begins, on this thread: what was measured and compiled before belongs to no window.

        step: optimizer steps done. resting: whether the run is paused.
        """
        self.collector.start()
        hz = self.config.log.stacks_hz
        self._stacks = StackWatch(threading.get_ident(), hz, self.clock, self.put, step, resting)
        self._stacks.start()
        if self.config.speed.compile != "off":
            self._graphs = compiled_graphs()
        self.skip()

    def end(self) -> None:
        """The loop was left, however that was."""
        self.collector.stop()
        if self._stacks is not None:
            self._stacks.stop()
            # It knows the loop: in a circle with it, the loader's workers would outlive the run.
            self._stacks = None

    def skip(self) -> None:
        """Time since the last mark belongs to nothing: the run was paused. Call with an empty window."""
        self.clock.skip()
        self.collector.take()

    def window(self, step: int) -> None:
        """Record the time since the last window; `step` optimizer steps are done."""
        config = self.config
        window = self.clock.take()
        if not window.wall_ns:
            return
        pauses = self.collector.take()
        steps, self.steps = self.steps, 0
        arrived, self.arrived = self.arrived, []
        items = steps * config.batch.items
        p50, p95, longest = window.steps()
        epoch, epoch_step = divmod(step, self._steps_per_epoch)
        extras = self.losses.extras
        self.put(
            WindowEvent(
                step=step,
                epoch=epoch,
                epoch_step=epoch_step,
                steps=steps,
                micro_steps=steps * config.batch.accumulation,
                items=items,
                tokens=round(items * self.stepper.workload.tokens_per_item),
                wall_ns=window.wall_ns,
                step_p50_ns=p50,
                step_p95_ns=p95,
                step_max_ns=longest,
                phases=window.phases(),
                loss=sum(value for _, value in arrived) / len(arrived) if arrived else None,
                last_loss=arrived[-1] if arrived else None,
                lr=self.stepper.lr,
                grad_norm=extras.get("grad_norm"),
                loss_scale=extras.get("loss_scale"),
                device_steps=len(window.device),
                gc_ns=pauses.ns,
                gc_count=pauses.count,
                gc_max_ns=pauses.longest_ns,
                profiled=self.profiled,
            )
        )
        self._tell_changes(step)
        if self._memory_seen:
            self._put_memory(step)

    def loader_settings(self) -> None:
        """After the first batch of an epoch; persistent workers only show in the second one."""
        self.epochs_begun += 1
        if self.settings is not None and self.epochs_begun <= 2:
            self.clock.enter(phase.LOG)
            for event in self.settings.of_loader(self.epochs_begun):
                self.put(event)

    def _tell_changes(self, step: int) -> None:
        """What the stepper has to report, and whether the compiler was at work again."""
        for event in self.stepper.reports:
            self.put(event)
        self.stepper.reports.clear()
        if self._graphs is not None and (graphs := compiled_graphs()) > self._graphs:
            more = graphs - self._graphs
            text = f"recompiled: {more} more graph{'' if more == 1 else 's'} by step {step}"
            self.put(MarkEvent("recompile", step, text, {"graphs": more}))
            self._graphs = graphs

    def _put_memory(self, step: int) -> None:
        try:
            self.put(memory_event(self.stepper.device))
        except (RuntimeError, KeyError) as error:
            self._memory_seen = False
            text = f"the memory counters cannot be read: {printable(str(error))}"
            self.put(MarkEvent("warning", step, text))
