"""One optimizer step: forward and backward of all micro-batches, then clip, update and zero_grad.

A factory's own `step` and its callbacks receive the parts of the step as `train`.
"""

from __future__ import annotations

import difflib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel.distributed import _find_tensors

from ndd_engine.batches import map_tensors
from ndd_engine.config.schema import Config, why_no_graph
from ndd_engine.errors import TrainingError, UsageError, shortened
from ndd_engine.measure.close_looks import CloseLooks
from ndd_engine.record.events import Event, Json
from ndd_engine.text import printable
from ndd_engine.train.checkpoint_state import kept_buffers, kept_random
from ndd_engine.train.data.loader import to_device
from ndd_engine.workloads.base import Batch, Workload, on_host
from ndd_engine.workloads.interface import kind
from ndd_engine.workloads.result import STEP, Carry, TrainingParts, detached
from ndd_watch import clock as phase
from ndd_watch import recompute
from ndd_watch.clock import PhaseClock, no_phase
from ndd_watch.finite import Origin
from ndd_watch.looks import Looks
from ndd_watch.slowing import KeptGraphs, Sizes

from .optimizers import Optimizers, Precision, clip_gradients, make_precision, set_tf32
from .part_timer import PartTimer

if TYPE_CHECKING:
    from ndd_engine.train.parallel.strategy import Strategy

ATTENTION = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
# From one look at the graph of a loss to the next.
LOOK_S = 0.1
# Modes of torch.compile that run compiled code as CUDA graphs.
POOLING = ("reduce-overhead", "max-autotune")


def recompute_blocks(model: nn.Module, levels: Mapping[str, str]) -> None:
    """Give blocks of the model the levels of `memory.recompute`. Raises UsageError for a module that it has not."""
    names = [name for name, _ in model.named_modules() if name]
    for name in levels:
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            meant = f"; did you mean {close[0]}?" if close else f"; it has {', '.join(names[:8])} …"
            raise UsageError(f"memory.recompute: the model has no module {printable(name)}{meant}")
    recompute.set_levels(model, levels)


def attention_of(config: Config) -> Callable[[], AbstractContextManager[Any]]:
    """Makes the context of a forward pass that chooses the attention backend."""
    chosen = ATTENTION.get(config.speed.attention)
    return nullcontext if chosen is None else lambda: sdpa_kernel(chosen)


class Replays(Protocol):
    """Runs steps by replaying one. settled: captured or given up. records_next: whether the next step is captured."""

    @property
    def settled(self) -> bool: ...
    @property
    def records_next(self) -> bool: ...
    def step(self, batches: Iterator[Batch], clock: PhaseClock, step: int) -> Tensor | None: ...


class Stepper:
    """Model, optimizer and precision of a run, and the optimizer step.

    `step` leaves the clock in phase `log`; the caller ends the step. `model` is the plain module, which is saved and
    evaluated; `compute` is the module that training calls, compiled if configured; `shared` is the same before it is
    compiled: the model, or what several ranks wrap around it.
    """

    def __init__(
        self,
        workload: Workload,
        config: Config,
        device: torch.device,
        total_steps: int,
        strategy: Strategy | None = None,
    ) -> None:
        """strategy: how several ranks share the model; None for a single rank."""
        self.workload = workload
        self.config = config
        self.device = device
        self.total_steps = total_steps
        self.strategy = strategy
        if strategy is not None:
            strategy.place(workload.model)
        self.model: nn.Module = workload.model.to(device)
        if config.speed.channels_last:
            self.model = self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.model.train()
        recompute_blocks(self.model, config.memory.levels)
        self.precision: Precision = make_precision(config, device)
        self.workload_parts: TrainingParts = workload.training
        self.no_graph = _why_no_graph(
            config, device.type == "cuda", self.precision.scaler is not None, self.workload_parts
        )
        graphed = config.speed.cuda_graph and self.no_graph is None
        compiles = config.speed.compile != "off"
        self.optimizer = Optimizers(self.workload_parts, config, self.model, device, total_steps, graphed)
        self.shared = self.model
        if strategy is not None:
            self.shared = strategy.computing(workload.forward if workload.functions["forward"] else None)
        self.compute = self.shared
        # State that the model carries from batch to batch.
        self.carry = Carry(workload)
        self.parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        # Set where steps are replayed, if they can be; see StepGraph.
        self.graph: Replays | None = None
        self.graphed = graphed
        # Compiled code and CUDA graphs call no modules that could be timed.
        whole = graphed or compiles
        self.parts = PartTimer({} if whole else workload.parts)
        # Scalars on the device that are read back together with the loss.
        self.extras: dict[str, Tensor] = {}
        # Above 0 if the gradient scaler skipped the update of the last step; None without one.
        self.skip: Tensor | None = None
        # What was not finite first, once a loss is not; see NotFiniteEvent.
        self.origin: Json = {}
        # Setting events that wait to be recorded.
        self.reports: list[Event] = []
        # The graphs of losses are looked at now and then. Backward passes so far, and when the next look is due.
        self._graphs, self._passes, self._look_s = KeptGraphs(), 0, 0.0
        self.attention = attention_of(config)
        self._moves = device.type != "cpu"
        # Whether compiled code runs as CUDA graphs, whose outputs share memory that each run overwrites.
        self._pools = device.type == "cuda" and config.speed.compile in POOLING
        # Gradients in memory of their own.
        self._gradients: dict[nn.Parameter, Tensor] = {}
        for thing in self.workload_parts.stateful.values():
            if isinstance(thing, nn.Module):
                thing.to(device)
        self.training = Training(self)

    @property
    def lr(self) -> float | None:
        """The current learning rate, see Optimizers.lr."""
        return self.optimizer.lr

    def settled(self) -> bool:
        """Whether the way the steps run changes no more: a CUDA graph is captured, or there is none."""
        return self.graph is None or self.graph.settled

    def count(self, sizes: Sizes) -> None:
        """Count what may grow in the model and its optimizers."""
        sizes.model(self.model)
        sizes.optimizers(self.optimizer.by_name.values())

    def close_looks(self) -> CloseLooks:
        """Looks at what steps do without need."""
        own = self.workload_parts.step is not None
        return CloseLooks(
            self.model, lambda: self.optimizer.by_name.values(), lambda: self.training.step, own
        )

    def begin_epoch(self) -> None:
        """Before the first step of an epoch: drop the state that the model carries."""
        self.carry.value = None

    def switch(self, config: Config, precision: Precision) -> None:
        """Continue with another configuration that needs no other model, optimizer, compiled code or CUDA graph."""
        self.config, self.precision, self.attention = config, precision, attention_of(config)
        if self.device.type == "cuda":
            set_tf32(config.precision.tf32)

    def step(self, batches: Iterator[Batch], clock: PhaseClock, step: int) -> Tensor | None:
        """One optimizer step from the next `batch.accumulation` micro-batches.

        Returns the mean loss (a detached scalar on the device), or None if the epoch has no complete step left.
        """
        if self.graph is not None:
            return self.graph.step(batches, clock, step)
        return self.eager_step(batches, clock, step)

    def eager_step(self, batches: Iterator[Batch], clock: PhaseClock, step: int) -> Tensor | None:
        """The step without a CUDA graph."""
        enter = clock.enter
        total: Tensor | None = None
        own = self.workload_parts.step is not None
        if own:
            self.optimizer.set_rate(step)
        self.training.step = step
        accumulation = 1 if own else self.config.batch.accumulation
        shares: Sequence[Tensor | float | None] = [None] * accumulation
        last = accumulation - 1
        strategy = self.strategy
        if (accumulation > 1 or strategy is not None) and self.workload.weight is not None:
            # A micro-batch's share needs the weights of all of them, so all have to be loaded before the first one.
            enter(phase.DATA_WAIT)
            micro = list(islice(batches, accumulation))
            if len(micro) < accumulation:
                return None
            enter(phase.LOSS)
            shares = self.shares(micro, clock)
            if strategy is None or not strategy.gathers:
                last = max((place for place, share in enumerate(shares) if not _is_zero(share)), default=last)
            micro.reverse()
            batches = (micro.pop() for _ in range(accumulation))  # frees each batch after its use
        self.parts.clock = clock
        try:
            for place, share in enumerate(shares):
                enter(phase.DATA_WAIT)
                batch = next(batches, None)
                if batch is None:
                    return None
                if _is_zero(share) and (strategy is None or not (strategy.gathers or place == last)):
                    continue  # the mean over nothing is NaN
                if self._moves:
                    enter(phase.TO_DEVICE)
                    batch = self.moved(batch)
                part = self.forward_backward(batch, enter, share, place == last)
                total = part if total is None else total + part
        finally:
            self.parts.clock = None
        self.finish_step(enter, step)
        if self.config.optimizer.set_to_none:
            self._gradients.clear()
        enter(phase.LOG)
        return total

    def finish_step(self, enter: Callable[[int], object], step: int) -> None:
        """Update the parameters, unless the factory's own step did, and the schedulers; drop the gradients."""
        if self.workload_parts.step is None:
            self.optimizer.set_rate(step)
            self.update(enter)
        self.optimizer.ended(STEP)
        enter(phase.ZERO_GRAD)
        self._zero_grad(everything=self.workload_parts.step is not None)

    def drop_gradients(self) -> None:
        """Set the gradients of all parameters to None."""
        for parameter in self.parameters:
            parameter.grad = None

    def moved(self, batch: Batch) -> Batch:
        """The batch on the device; tensors already there are not copied."""
        return to_device(batch, self.device, self.config.loader.non_blocking)

    def shares(self, micro: Sequence[Batch], clock: PhaseClock | None = None) -> list[Tensor | float]:
        """What each micro-batch of a step counts in the step's loss and gradient; they add up to 1.

        Numbers for batches on the host, scalar tensors for batches on the device. All equal if the weights add up to 0.
        Those of several ranks add up to 1 on average, since gradients are averaged; all ranks must call this.
        """
        assert self.workload.weight is not None
        weights = [on_host(self.workload.weight(batch)) for batch in micro]
        weights = [weight.double() if isinstance(weight, Tensor) else weight for weight in weights]
        total: Tensor | float = sum(weights)
        if self.strategy is not None:
            total = self.strategy.mean(total, clock)
        if not isinstance(total, Tensor) and not total:
            return [1 / len(micro)] * len(micro)
        return [weight / total for weight in weights]

    def forward_backward(
        self,
        batch: Batch,
        enter: Callable[[int], object],
        share: Tensor | float | None = None,
        last: bool = True,
    ) -> Tensor:
        """Forward and backward of one micro-batch on the device; returns its share of the step's loss, detached.

        share: see `shares`; None for equal ones. One that counts nothing leaves gradients of 0 and no other trace: its
        rank takes part in what the others exchange. last: of the step; several ranks then exchange gradients. A
        factory's own step also updates the parameters.
        """
        if self.workload_parts.step is not None:
            return self._own_step(batch, enter)
        with nullcontext() if self.strategy is None else self.strategy.micro(last):
            if not _is_zero(share):
                return self._forward_backward(batch, enter, share)
            carried = self.carry.value
            with kept_random(self.device), kept_buffers(self.model), _without_gradient(self.parameters):
                loss = self._forward_backward(batch, enter, share)
            self.carry.value = carried
            return torch.zeros_like(loss)

    def _forward_backward(
        self, batch: Batch, enter: Callable[[int], object], share: Tensor | float | None
    ) -> Tensor:
        accumulation = self.config.batch.accumulation
        scaler = self.precision.scaler
        pooled = self._pools and self.compute is not self.shared
        if pooled:
            # The outputs of the last micro-batch, which its CUDA graphs overwrite now, are not needed any more.
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        enter(phase.FORWARD)
        with self.precision.autocast or nullcontext(), self.attention():
            if self.strategy is not None and self.strategy.takes_batch:
                output = self.compute(batch)
            else:
                output = self.carry.forward(self.compute, batch)
            enter(phase.LOSS)
            loss = _nothing(output) if _is_zero(share) else self.workload.loss(output, batch)
        if share is not None:
            loss = loss * share
        elif accumulation > 1:
            loss = loss / accumulation
        self._look(loss)
        self._look_closely(loss, batch)  # before the update, which makes the weights NaN as well
        enter(phase.BACKWARD)
        if self.strategy is not None:
            self.strategy.before_backward(loss)
        (loss if scaler is None else scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]
        if pooled:
            self._keep_gradients()
            return loss.detach().clone()
        return loss.detach()

    def _look(self, loss: Tensor) -> None:
        self._passes += 1
        if (now := time.monotonic()) >= self._look_s:
            self._look_s = now + LOOK_S
            self._graphs.mark(loss, self._passes)

    def _look_closely(self, loss: Tensor, batch: Batch) -> None:
        """If a loss is not finite, and can be read without waiting: find out why. Fake tensors have no values."""
        # What cannot have a gradient is an error of the backward pass, which says so.
        number = type(loss) is Tensor and loss.numel() == 1 and loss.is_floating_point()
        if not self._moves and number and not math.isfinite(loss.item()):
            self.origin = self.origin or self.first_not_finite(batch)

    def first_not_finite(self, batch: Batch) -> Json:
        """What is not finite first of a batch on the device, see NotFiniteEvent. Only before training ends."""

        def compute() -> Tensor:
            with self.precision.autocast or nullcontext():
                return self.workload.loss(self.carry.forward(self.model, batch), batch)

        alone = self.strategy is None or not self.strategy.gathers
        again = compute if alone and self.workload_parts.step is None else None
        with suppress(Exception):  # the user's code, once more
            return Origin(torch, Looks(torch)).of(self.model, batch, again)
        return {}

    @property
    def kept_steps(self) -> int:
        """Earlier steps whose autograd graphs still exist."""
        own = self.workload_parts.step is not None
        return self._graphs.steps(self._passes) // (1 if own else self.config.batch.accumulation)

    def _own_step(self, batch: Batch, enter: Callable[[int], object]) -> Tensor:
        """One step of the factory's own `step`; returns its loss, detached."""
        parts, training = self.workload_parts, self.training
        assert parts.step is not None
        training.begin_step(training.step, enter)
        self.carry.begin(batch)
        found = parts.step(batch, training)
        self.carry.value = detached(self.carry.value)
        if isinstance(found, Tensor):
            self._look(found)
        loss = training.checked(found, parts.where)
        self._look_closely(loss, batch)
        training.end_step()
        return loss

    def _zero_grad(self, everything: bool) -> None:
        """Drop or clear the gradients. everything: also those that no optimizer has."""
        to_none = self.config.optimizer.set_to_none
        self.optimizer.zero_grad(set_to_none=to_none)
        for parameter in self.parameters if everything else ():
            if to_none or parameter.grad is None:
                parameter.grad = None
            else:
                parameter.grad.zero_()

    def _keep_gradients(self) -> None:
        """Copy gradients out of the memory of compiled CUDA graphs, which the next backward pass overwrites.

        The first backward pass makes its own output the gradient; later ones add to the copy.
        """
        if self.config.batch.accumulation == 1 and self.config.optimizer.set_to_none:
            return  # the gradients are used and dropped before the next backward pass
        for parameter in self.parameters:
            if (grad := parameter.grad) is not None and self._gradients.get(parameter) is not grad:
                parameter.grad = self._gradients[parameter] = grad.clone()

    def update(self, enter: Callable[[int], object]) -> None:
        """Clip gradients and step the optimizer."""
        scaler = self.precision.scaler
        max_norm = self.config.clip.max_norm
        optimizers = self.optimizer.chosen(None)
        if max_norm > 0:
            enter(phase.CLIP)
            if scaler is not None:
                self.optimizer.unscale(scaler, optimizers)
            self.extras["grad_norm"] = clip_gradients(self.parameters, max_norm)
        enter(phase.OPTIMIZER)
        self.optimizer.step(scaler, optimizers)
        if scaler is None:
            return
        self.updated(scaler)

    def updated(self, scaler: torch.amp.GradScaler) -> None:
        """All optimizers have stepped with this scaler."""
        states = scaler._per_optimizer_states.values()
        found = [one.reshape(()) for state in states for one in state["found_inf_per_device"].values()]
        self.skip = torch.stack(found).sum() if len(found) > 1 else found[0] if found else None
        scaler.update()
        # get_scale() would synchronise.
        if (scale := scaler._scale) is not None:
            self.extras["loss_scale"] = scale

    def state(self) -> dict[str, Any]:
        """State for a checkpoint."""
        scaler, parts = self.precision.scaler, self.workload_parts
        found = {
            "model": self.model.state_dict(),
            **self.optimizer.state(),
            "scaler": scaler.state_dict() if scaler is not None else None,
        }
        if parts.state is not None:
            found["carried"] = self.carry.value
        if parts.stateful:
            found["stateful"] = {name: thing.state_dict() for name, thing in parts.stateful.items()}
        return found

    def load(self, state: dict[str, Any]) -> None:
        """Restore `state`. Raises RuntimeError, ValueError or KeyError if it belongs to another model."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load(state)
        self.carry.value = map_tensors(state.get("carried"), lambda tensor: tensor.to(self.device))
        for name, thing in self.workload_parts.stateful.items():
            thing.load_state_dict(state["stateful"][name])
        if self.precision.scaler is not None and state["scaler"]:
            self.precision.scaler.load_state_dict(state["scaler"])


def _nothing(output: Any) -> Tensor:
    """A loss on which every parameter has a gradient that the output depends on. Raises UsageError if none does."""
    found = [(tensor * 0).sum() for tensor in _find_tensors(output) if tensor.requires_grad]  # type: ignore[no-untyped-call]
    if not found:
        kinds = "a tensor, or a list, tuple, dict or dataclass of them"
        raise UsageError(f"forward returned {type(output).__name__} without a gradient: return {kinds}")
    return torch.stack(found).sum()


@contextmanager
def _without_gradient(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Inside, gradients are 0, also where activations are not finite. Not of sharded parameters."""
    handles = [item.register_hook(torch.zeros_like) for item in parameters if item.requires_grad]  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _is_zero(share: Tensor | float | None) -> bool:
    """Whether a micro-batch counts nothing; one on the device does not tell without waiting for it."""
    return isinstance(share, float) and not share


def _why_no_graph(config: Config, gpu: bool, scales: bool, parts: TrainingParts) -> str | None:
    """Why a step of this configuration cannot be captured, or None. parts: what a factory replaces of the step."""
    if parts.step or parts.state or parts.optimizers is not None or parts.lr:
        return "the factory has its own step, state, optimizer or lr, which cannot be captured"
    return why_no_graph(gpu, config.parallel.ranks, scales, config.optimizer.name)


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
