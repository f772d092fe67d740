"""The training loop: steps, windows, requests, evaluations and checkpoints."""

from __future__ import annotations

import contextlib
import gc
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ndd_engine.config.schema import Config
from ndd_engine.diagnose.model_rules import LARGE, advice_text, cause_text
from ndd_engine.errors import TrainingError, said
from ndd_engine.measure import memory
from ndd_engine.measure.capture import CapturePlan, CaptureSchedule, FunctionProfiles
from ndd_engine.measure.memory import holders_event
from ndd_engine.measure.reporting import LossReader, Reporter, StepWork, first_bad
from ndd_engine.record.events import Json, MarkEvent, NotFiniteEvent
from ndd_engine.record.rundir import resume_text
from ndd_engine.run.control import pause_mark, resume_mark
from ndd_engine.text import printable, size
from ndd_engine.train.data.loader import OwnOrder, at_pass_end, end_pass
from ndd_engine.workloads.base import Batch
from ndd_engine.workloads.result import EPOCH
from ndd_watch import clock as phase
from ndd_watch.clock import CHECKPOINT, EVALUATE, PhaseClock
from ndd_watch.collecting import Collecting
from ndd_watch.holders import Holders
from ndd_watch.looks import Looks, own
from ndd_watch.mapped import FIRST_BATCH, in_use
from ndd_watch.profiler import Allowance

from .checkpoint import CheckpointStore, Saved, last_good, unwritten
from .checkpoint_state import changed, finite_buffers, layout, not_finite, random_state, unloadable
from .data.loader import Batches, EvalBatches
from .evaluate import Callbacks, EvaluationResult, better_of, evaluate, failure
from .failures import unstable
from .request import OpenRun
from .settings import Due, VerifiedSettings
from .step.optimizers import Precision
from .step.stepper import Stepper

if TYPE_CHECKING:
    from .parallel.world import World

# Epochs whose ends are all told, and seconds between those of later ones.
FIRST_EPOCHS, EPOCHS_EVERY_S = 10, 1.0


@dataclass(eq=False)
class Course:
    """Batches of a loop, and where it is in them while it trains on others.

    step: optimizer steps done with them. epochs: begun by this process. epoch: the rest of one that was interrupted.
    """

    batches: Batches
    step: int = 0
    epochs: int = 0
    epoch: Iterator[Batch] | None = None


class Loop:
    """Trains from `step` to the end, or until a stop is requested.

    step: optimizer steps done. saved: the newest checkpoint. boundary: true between two steps, when the state is
    complete and a checkpoint can be written. gate: asked before the first step and after each one, see
    `ndd_watch.trying`; it returns when the next step is to be trained. It may call `switch`, `rest`,
    `end_epoch` and `end_window`.
    """

    def __init__(
        self, run: OpenRun, stepper: Stepper, batches: Batches, evaluation: EvalBatches, clock: PhaseClock
    ) -> None:
        self.config = config = stepper.config
        self.stepper, self.batches, self.evaluation, self.clock = stepper, batches, evaluation, clock
        self.control, self.put = run.control, run.put
        self.gate: Callable[[], None] | None = None
        self.store = CheckpointStore(run.directory.checkpoints, config.checkpoint.keep)
        self.settings = VerifiedSettings(stepper, batches, evaluation)
        self.course = Course(batches)
        self.step = 0
        self.layout = layout(stepper.model.state_dict())
        # A resumed run creates the same model first, so that these do not depend on a checkpoint.
        self._finite_buffers = finite_buffers(stepper.model)
        self.total_steps = stepper.total_steps
        self.steps_per_epoch = batches.steps_per_epoch or 0  # 0: unknown
        # The passes after which a run ends whose steps are not known beforehand.
        self.passes = config.run.epochs if batches.steps_per_epoch is None else None
        self.due = Due(config, self.steps_per_epoch if batches.own_order is None else 0)
        self.losses = LossReader(stepper.device, config.log.every_steps)
        self.better = better_of(config.evaluate, stepper.workload)
        self.callbacks = Callbacks(
            stepper, run.request.probes, run.put, self.losses, self.better, self._callback_failed
        )
        self.saved: Saved | None = None
        self.save_error: str | None = None
        self.boundary = True
        # The other ranks, for a loop of several.
        self.world: World | None = None
        self._window_ns = int(config.log.window_s * 1e9)
        self._last_save = time.monotonic()
        self._next_epoch = 0.0
        self._last_result: tuple[int, EvaluationResult] | None = None
        batch, log, speed, tokens = config.batch, config.log, config.speed, stepper.workload.tokens_per_item
        work = StepWork(
            config.items_per_step, batch.accumulation, tokens, self.steps_per_epoch, *batches.counters
        )
        gc_steps, compiles = config.run.gc_every_steps, speed.compile != "off"
        self.reporter = Reporter(work, stepper, clock, self.losses, run.put, gc_steps)
        trace = Path(log.trace).expanduser() if log.trace else None
        graphs = speed.cuda_graph or speed.compile in ("reduce-overhead", "max-autotune")
        plan = CapturePlan(log.kernels_every, log.kernels_steps, trace, graphs)
        module = None if graphs or compiles else stepper.model
        allowance = Allowance(round(log.profile_every_s * 1e9)) if log.profile_every_s else None
        self.captures = CaptureSchedule(self.reporter, plan, stepper.settled, module, allowance)
        self.functions = FunctionProfiles(
            self.reporter, log.profile_every_s, stepper.settled, stepper.count, stepper.close_looks(), allowance,
            self.captures.paced,
        )  # fmt: skip
        self._holders = Holders(Looks(torch), own)
        self.functions.collect(
            Collecting(
                lambda: Holders(Looks(torch), own),
                lambda: in_use(stepper.device),
                self._put_look,
                self._apart,
            )
        )
        self._resting = "training"  # the status to restore after an evaluation or a checkpoint

    @property
    def finished(self) -> bool:
        """Whether no step is left."""
        own = self.batches.own_order
        passed = self.passes is not None and own is not None and own.passes >= self.passes
        return passed or self.step >= self.total_steps

    def run(self) -> str | None:
        """Return None at the end of training, or the status that a stop requested.

        Raises TrainingError (a loss that is not finite), StopNow, and whatever the model or the loader raises.
        """
        try:
            self.reporter.begin(
                lambda: self.step,
                lambda: self._resting == "paused" or self.control.stopping,
                self.batches.worker_folder,
            )
            self.captures.begin(self.step, self.total_steps)
            self.functions.start(self.step)
            return self._train()
        finally:
            self.functions.close()
            self.captures.close()
            self.reporter.end()

    def _train(self) -> str | None:
        clock, control, stepper = self.clock, self.control, self.stepper
        garbage, captures, functions = self.reporter.facts.garbage, self.captures, self.functions
        began, own, training = clock.now(), self.batches.own_order, stepper.training
        if self.step and self.due.at(self.config.evaluate, self.step) and self.callbacks.judged < self.step:
            self._act()  # the checkpoint was written before the evaluation of its step
        if self.gate is not None:
            self.gate()
        while not self.finished and self.callbacks.early is None:
            course = self.course
            epoch, epoch_step = self.batches.place(self.step)
            iterator = self._begin_epoch(epoch, epoch_step) if course.epoch is None else course.epoch
            end = self.total_steps
            if own is None:
                end = min(end, (epoch + 1) * self.steps_per_epoch)
            action = self.due.next(self.step, self.total_steps)
            while self.step < end:
                self.boundary = False
                if began >= functions.due_ns and self.step < captures.next:
                    functions.begin(self.step)
                if stepper.graph is not None and stepper.graph.records_next and self.step:
                    self.save()  # if the capture fails, this process cannot continue to train
                loss = stepper.step(iterator, clock, self.step)
                if loss is None and own is not None:
                    self._end_pass(own)
                    break
                if loss is None:
                    early = f"the loader ended early, at step {self.step:,}"
                    raise TrainingError(f"{early}; the epoch has steps up to {end:,}")
                self.step += 1
                self.reporter.steps += 1  # also if a callback or a check raises
                training.step, training.loss = self.step, loss
                if own is None and self.step == (epoch + 1) * self.steps_per_epoch:
                    stepper.optimizer.ended(EPOCH)
                    self._epoch_done(epoch + 1, -(-self.total_steps // self.steps_per_epoch))
                self.boundary = True
                arrived = self.losses.add(self.step, loss, stepper.extras, stepper.skip)
                stepper.skip = None
                if arrived:
                    self._check(arrived)
                if self.callbacks.each_step:
                    self.callbacks.step()
                elif training.logged or training.stopping:
                    self.callbacks.take_logged()
                garbage.after_step(self.step, clock.enter)
                began = clock.end_step()
                if functions.active:
                    functions.end(self.step)
                self._after_step(action)
                if self.step >= captures.next:
                    captures.look(self.step, action - self.step)
                # Act before stopping: after the last step there would be no other chance.
                if self.step >= action:
                    if not at_pass_end(own, self.batches.of_step):
                        self._act()
                    elif self.step >= self.total_steps or self.callbacks.early is not None:
                        self._end_pass(own)
                    # Otherwise the next read ends the pass: its end is reported before what is due at this step.
                    action = self.due.next(self.step, self.total_steps)
                    if self.step >= captures.next:
                        captures.look(self.step, action - self.step)
                if control.pending and self._obey():
                    return self._stop()
                if self.callbacks.early is not None:
                    break
                if self.gate is not None:
                    course.epoch = iterator if self.step < end else None
                    self.gate()
                    if self.course is not course or course.epoch is None:
                        break
            del iterator
            if control.pending and self._obey():
                return self._stop()
        self._finish()
        return None

    def _begin_epoch(self, epoch: int, epoch_step: int) -> Iterator[Batch]:
        """The batches of an epoch from one of its steps on."""
        clock = self.clock
        if not epoch_step:
            self.stepper.begin_epoch()
        clock.enter(phase.DATA_WAIT)
        # The first epoch includes one-time work, such as starting persistent workers.
        with clock.part("first_batch") if self.course.epochs else contextlib.nullcontext():
            iterator = self.batches.epoch(epoch, epoch_step * self.config.batch.accumulation)
        if FIRST_BATCH in clock.names:  # as in a script, it belongs to no step
            first = clock.names.index(FIRST_BATCH)
            clock.set_aside(first, clock.row[first])
        self.reporter.passes += self.course.epochs > 0
        self.course.epochs += 1
        clock.enter(phase.LOG)
        for event in self.settings.of_loader(self.course.epochs):
            self.put(event)
        return iterator

    def _end_pass(self, own: OwnOrder) -> None:
        """All of a pass was read: evaluate and save as at the end of an epoch. Raises TrainingError if it was empty."""
        self.boundary = True
        self.functions.drop(self.step)
        end_pass(own, self.batches.of_step)
        self.stepper.optimizer.ended(EPOCH)
        self._epoch_done(own.passes, self.config.run.epochs)
        self._act(own.passes)

    def _epoch_done(self, done: int, of: int | None) -> None:
        """Report the end of an epoch, before the evaluation and the checkpoint that are due at it.

        After the first epochs, one in EPOCHS_EVERY_S is enough: those of small data would displace all other marks.
        """
        now = time.monotonic()
        if done > FIRST_EPOCHS and done != of and now < self._next_epoch:
            return
        self._next_epoch = now + EPOCHS_EVERY_S
        self.put(MarkEvent("epoch", self.step, f"epoch {done}{f' of {of}' if of else ''} done"))

    def _after_step(self, action: int) -> None:
        """Record a window when it is long enough. action: the next step after which something is due."""
        if self.clock.window_ns >= self._window_ns:
            self._window()
            if self.step < action:
                self._save_if_long_ago()

    def _act(self, passes: int = 0) -> None:
        """passes: so many passes are done now; 0 after a step."""
        evaluation = self.config.evaluate
        due = self.due.at(evaluation, self.step, passes)
        # Evaluate before a checkpoint at the same step, so that the checkpoint carries the metric.
        if due or (self.step >= self.total_steps and evaluation.at_end):
            self.evaluate(due=due)
        if self.due.at(self.config.checkpoint, self.step, passes):
            self.save()
        # Evaluations end windows: if they are frequent, no window gets long enough to check this elsewhere.
        self._save_if_long_ago()

    def _obey(self) -> bool:
        """Handle the requests; returns True if the loop has to end."""
        control = self.control
        paused_at: float | None = None
        while True:
            control.check_kill()
            once = control.take_once()
            if not once or once - {"kernels", "holders"} or control.paused or control.stops:
                self.captures.finish(self.step)  # requested work does not belong to a step
            if "kernels" in once:
                self.captures.ask(self.step)
            if "holders" in once:
                self._look()
            if "evaluate" in once:
                self.evaluate(again=True)
            if "checkpoint" in once:
                self.save(again=True)
                if paused_at is not None:
                    self._window()  # the pause that follows belongs to no window, the checkpoint does
            if control.stops or not control.paused:
                break
            if paused_at is None:
                self._check(self.losses.drain())
                self._window()
                paused_at = time.monotonic()
                self._resting = "paused"
                self._status("paused")
                self.put(pause_mark(self.step, list(control.holders)))
            control.wait(0.5)
            self.reporter.skip()
        if paused_at is not None:
            self.reporter.skip()
            self._resting = "training"
            self._status("training")
            self.put(resume_mark(self.step, time.monotonic() - paused_at))
        return control.stops is not None

    def _look(self) -> None:
        """At what this process keeps, since its memory grows."""

        def look() -> None:
            if (found := self._holders.look(self.step, sys._getframe())) is not None:
                self._put_look(found)

        self._apart(look)

    def _apart(self, look: Callable[[], None]) -> None:
        """Do this such that it belongs to no window."""
        self._window()
        gc.unfreeze()  # frozen by `prepare_run`: frozen objects are in no look
        try:
            look()
        except Exception as error:  # noqa: BLE001  whatever this process keeps, it does not end the training
            text = f"what the process keeps is not known: {printable(said(error))}"
            self.put(MarkEvent("note", self.step, text))
        finally:
            gc.freeze()
        self.reporter.skip()

    def _put_look(self, found: Json) -> None:
        module = sys.modules.get(str(self.config.workload.name).partition(":")[0])
        self.put(holders_event({**found, "step": self.step}, [getattr(module, "__file__", None) or ""]))

    def _stop(self) -> str:
        self._resting = "stopping"
        self._status("stopping")
        self._check(self.losses.drain())
        saved = not self.step or self.save()
        self._window()
        if not saved:
            raise TrainingError(f"stopped at step {self.step:,}, but {self.save_error}")
        return self.control.stops or "stopped"

    def _finish(self) -> None:
        self._check(self.losses.drain())
        if self.config.evaluate.at_end:
            self.evaluate()
        saved = not self.config.checkpoint.at_end or self.save()
        last = self._last_result
        if last is not None and self.callbacks.judged < last[0] == self.step:
            # An evaluation at the end only: a run that continues from the checkpoint must not have seen it.
            self.callbacks.evaluated(last[1].metrics)
        self._window()
        if not saved:
            raise TrainingError(f"finished all {self.step:,} steps, but {self.save_error}")

    def evaluate(self, again: bool = False, due: bool = False) -> None:
        """Evaluate now. Does nothing if this step was already evaluated, unless `again`.

        due: the configuration asks for it at the end of a pass.
        """
        if self._last_result is not None and self._last_result[0] == self.step and not again:
            return
        self._status("evaluating")
        self._window()
        self.clock.evaluation(True)
        with self.functions.outside_steps(EVALUATE, self.step):
            result = self._evaluated()
        self.clock.evaluation(False)
        self._last_result = (self.step, result)
        for event in self.settings.of_evaluation(result.inference_mode):
            self.put(event)
        self.put(result.mark(self.step, self.better))
        if warning := result.not_finite:
            self.put(MarkEvent("warning", self.step, warning))
        self.callbacks.samples(self.step)
        if due or self.due.at(self.config.evaluate, self.step):
            self.callbacks.judge(self.step, result)
        self._status(self._resting)
        self._window()

    def _evaluated(self) -> EvaluationResult:
        return evaluate(self.stepper, self.evaluation, self._between)

    def _callback_failed(self, name: str, error: BaseException) -> TrainingError:
        """What to raise for a callback that raised, after saving a checkpoint: between steps, the state is complete."""
        self.callbacks.on = self.callbacks.each_step = False
        saved = not self.boundary or not self.step or self.world is not None or self.save()
        resume = f"; {resume_text(self.store.folder.parent.name)}" if self.saved else ""
        text = failure(name, self.step, self.stepper.workload_parts, error)
        return TrainingError(f"{text}; {last_good(self.saved) if saved else self.save_error}{resume}")

    def save(self, again: bool = False) -> bool:
        """Write a checkpoint of this step. Returns False on failure, with the reason in `save_error`."""
        step, metric = self.step, None
        if self._last_result is not None and self._last_result[0] == step:
            metric = self._last_result[1].headline[1]
        written = self.saved
        # A checkpoint written before this step's evaluation is written again with the metric.
        if written and written.step == step and not again and (metric is None or written.metric is not None):
            return True
        self._status("checkpointing")
        self.clock.enter(phase.CHECKPOINT)
        self._check(self.losses.drain(), saving=True)
        with self.functions.outside_steps(CHECKPOINT, step):
            self._save(step, metric)
        self.clock.enter(phase.OTHER)
        self._status(self._resting)
        return self.save_error is None

    def _save(self, step: int, metric: float | None) -> None:
        state = self.state()
        if why := unloadable(state) or changed(self.layout, layout(state["model"])):
            raise TrainingError(f"no checkpoint at step {step:,}: {why}; {last_good(self.saved)}")
        self._last_save = time.monotonic()
        try:
            saved = self.store.save(step, state, metric, self.better == "lower")
        except OSError as error:
            self.save_error = f"{unwritten(error, step, self.store.folder)}; {last_good(self.saved)}"
            self.put(MarkEvent("warning", step, self.save_error))
        else:
            self.saved, self.save_error = saved, None
            data = {"file": saved.path.name, "bytes": saved.bytes}
            self.put(
                MarkEvent("checkpoint", step, f"checkpoint at step {step:,} ({size(saved.bytes)})", data)
            )
            self.callbacks.saved(saved.path)

    def state(self) -> dict[str, Any]:
        """What a checkpoint contains. The learning rate follows from the step, as does the engine's order."""
        return {
            "step": self.step,
            "workload": self.config.workload.name,
            "effective_batch": self.config.items_per_step,
            "items": self.batches.items,
            "data_crc": self.batches.crc,
            "order": self.batches.order,
            "position": self.batches.state(),
            "seed": self.config.run.seed,
            "threads": torch.get_num_threads(),
            "torch": str(torch.__version__),
            "random": random_state(self.stepper.device),
            **self.callbacks.state(),
            **self.stepper.state(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Restore a checkpoint, except for the random generators. Raises what Stepper.load raises."""
        self.stepper.load(state)
        self.batches.load(state["position"])
        self.step = self.stepper.training.step = int(state["step"])
        self.callbacks.load(state)

    def _long_ago(self) -> bool:
        """Whether the last checkpoint is older than checkpoint.every_minutes."""
        every_s = self.config.checkpoint.every_minutes * 60
        return bool(every_s) and time.monotonic() - self._last_save >= every_s

    def _save_if_long_ago(self) -> None:
        if self._long_ago():
            self.save()

    # For the gate, between two steps.

    def switch(
        self, config: Config, precision: Precision, course: Course, settings: VerifiedSettings
    ) -> None:
        """Continue with another configuration and its batches; it must not need another model or optimizer."""
        self.config, self.settings = config, settings
        self.stepper.switch(config, precision)
        self.losses.every = config.log.every_steps
        self._window_ns = int(config.log.window_s * 1e9)
        self.reporter.switch(config.run.gc_every_steps)
        self.course.step, self.course = self.step, course
        self.batches, self.step = course.batches, course.step

    def end_epoch(self) -> None:
        """Leave out the rest of the epoch."""
        self.course.epoch = None  # before the next one begins: its workers end
        if self.batches.own_order is None:
            self.step += -self.step % self.steps_per_epoch

    @contextlib.contextmanager
    def rest(self) -> Iterator[None]:
        """Suspend the training inside: this belongs to no window, and does not count for checkpoint.every_minutes."""
        begin = time.perf_counter()
        yield
        self.reporter.skip()
        self._last_save += time.perf_counter() - begin

    def end_window(self) -> None:
        """End the window."""
        self._window()

    def compared(self) -> None:
        """Wait until the windows so far of all ranks are compared, if there are several; not long."""

    def record_rest(self) -> None:
        """Record the time since the last window after an error ended the loop."""
        with contextlib.suppress(Exception):
            self._window()

    def _between(self) -> None:
        """During a long evaluation: keep recording windows, and obey an immediate stop."""
        self.control.check_kill(alone=True)
        self.clock.enter(phase.EVALUATE)
        self.functions.evaluation_goes_on()
        if self.clock.window_ns >= max(self._window_ns, 200_000_000):
            self._window()

    def _status(self, status: str) -> None:
        self.put(MarkEvent("status", self.step, "", {"status": status}))

    def _check(self, arrived: list[tuple[int, float]], saving: bool = False) -> None:
        """Raise TrainingError for a loss that is not finite; saving: also for a parameter or buffer."""
        self.reporter.arrived += arrived
        if (bad := first_bad(arrived)) is not None:
            self.boundary = False  # the state in memory is not worth saving
            origin = NotFiniteEvent(step=bad[0], **(self.stepper.origin or self._looked_at(bad[0])))
            self.put(origin)
            cause = cause_text(origin)
            what = f"the loss is {bad[1]} at step {bad[0]:,}{f': {cause}' if cause else ''}"
            raise TrainingError(self._not_finite(what, origin))
        if saving and (name := not_finite(self.stepper.model, self._finite_buffers)) is not None:
            raise TrainingError(self._not_finite(f"{name} is not finite at step {self.step:,}"))

    def _looked_at(self, step: int) -> Json:
        """What was not finite first in the batch of a step whose loss has arrived later, as from a GPU."""
        if self.batches.own_order is not None:  # its batches cannot be read again
            return {}
        epoch, place = self.batches.place(step - 1)
        with contextlib.suppress(Exception):
            batch = next(self.batches.epoch(epoch, place * self.config.batch.accumulation))
            return self.stepper.first_not_finite(self.stepper.moved(batch))
        return {}

    def _not_finite(self, what: str, origin: NotFiniteEvent | None = None) -> str:
        damaged = origin is None or origin.what in ("", "gradient", "parameter") or origin.largest >= LARGE
        advice = unstable(self.stepper) if damaged else advice_text(origin)[0]
        return f"{what}, so training stopped; {last_good(self.saved)}; {advice}"

    def _window(self) -> None:
        self.reporter.window(self.step)
        memory.settle(self.step)
