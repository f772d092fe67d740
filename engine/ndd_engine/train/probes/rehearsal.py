"""Runs a test step of one micro-batch before training: compiles, counts FLOPs, times it, and looks at the settings.

It does not affect training: random states, buffers and extra states are restored, gradients dropped, and the optimizer
does not step.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ndd_engine.batches import map_tensors
from ndd_engine.errors import UsageError, said
from ndd_engine.measure import memory_history
from ndd_engine.measure.flops import WorkCounter
from ndd_engine.measure.memory import is_out_of_memory
from ndd_engine.measure.phase_clock import no_phase
from ndd_engine.measure.timing import fastest
from ndd_engine.record.event import ThreadTime
from ndd_engine.record.events import BaselineEvent, LoaderEvent
from ndd_engine.train.random_state import kept_buffers, kept_random
from ndd_engine.train.step.stepper import Stepper
from ndd_engine.workloads.base import Batch

if TYPE_CHECKING:
    from ndd_engine.train.parallel.strategy import Strategy


# Time limit in nanoseconds; each measurement runs at least once however long it takes.
BASELINE_NS = 400_000_000
# A micro-batch up to this long is repeated, and measured with another number of threads.
SLOW_NS = 1_500_000_000
MOST_RUNS = 5


@dataclass
class Rehearsal:
    """Results of the test step.

    counter: FLOPs, bytes and operations, None if counting failed. channels_last: whether convolution outputs had that
    format, None without 4-D convolutions. compile_s, graphs, breaks: of torch.compile; compile_error: why it is not
    used. part_calls: module calls per timed part. micro_ns: host time of an eager micro-batch. baseline: the
    micro-batch measured by itself, None if not requested or failed. loader: the cost of creating a micro-batch.
    changed_parameters: whether the forward pass itself changed a parameter, which is not restored.
    """

    counter: WorkCounter | None = None
    channels_last: bool | None = None
    compile_s: float | None = None
    compile_error: str | None = None
    graphs: int = 0
    breaks: int = 0
    part_calls: Counter[str] = field(default_factory=Counter)
    micro_ns: float = 0.0
    baseline: BaselineEvent | None = None
    loader: LoaderEvent | None = None
    changed_parameters: bool = False
    notes: list[str] = field(default_factory=list)


def rehearse(stepper: Stepper, batch: Batch, baseline: Baseline | None = None) -> Rehearsal:
    """Run one micro-batch forward and backward, first eagerly, then as configured. Raises what the model raises.

    baseline: also measure it, as configured.
    """
    found = Rehearsal()
    versions = [_version(parameter) for parameter in stepper.parameters]
    extras = dict(stepper.extras)
    batch = stepper.moved(batch)
    with kept_random(stepper.device), kept_training(stepper), kept_buffers(stepper.model):
        stepper.compute = stepper.shared
        try:
            calls = stepper.parts.calls.copy()
            with _watch_format(stepper.model, found):
                _count(stepper, batch, found)
            found.part_calls = stepper.parts.calls - calls
            if stepper.config.speed.compile != "off":
                _compile(stepper, batch, found)
            elif found.part_calls:
                found.micro_ns = time_micro(stepper, batch)[0]
            if baseline is not None:
                counted = found.counter.operations if found.counter is not None else None
                found.baseline = baseline.measure(stepper, batch, counted)
        finally:
            stepper.drop_gradients()
            stepper.extras = extras
    if stepper.workload_parts.step is None:  # else they were restored
        found.changed_parameters = versions != [_version(parameter) for parameter in stepper.parameters]
    return found


def _version(tensor: Tensor) -> int:
    """Changes with every operation in place."""
    return 0 if tensor.is_inference() else tensor._version


@contextmanager
def kept_training(stepper: Stepper) -> Iterator[None]:
    """Restore what a factory's own step or callbacks change: all of a checkpoint's state, and what was logged.

    Without an own step, only the carried state can change.
    """
    training, carry = stepper.training, stepper.carry
    kept = None
    if stepper.workload_parts.step is not None:
        state = stepper.state()
        state["model"] = dict(state["model"])  # without torch's version numbers of the modules
        kept = map_tensors(state, lambda tensor: tensor.detach().to("cpu", copy=True))
    before, logged, names = carry.value, list(training.logged), set(training.names)
    step, loss, stopping = training.step, training.loss, training.stopping
    carry.value = None
    try:
        yield
    finally:
        if kept is not None:
            stepper.load(kept)
        carry.value = before
        training.logged[:], training.names = logged, names
        training.step, training.loss, training.stopping = step, loss, stopping


def _count(stepper: Stepper, batch: Batch, found: Rehearsal) -> None:
    counter = WorkCounter()
    try:
        with counter:
            stepper.forward_backward(batch, no_phase)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        # Counting may be the cause: repeat without it, which raises the model's own error if there is one.
        stepper.forward_backward(batch, no_phase)
        found.notes.append(f"cannot count the FLOPs of a step: {said(error)}")
        return
    found.counter = counter


def _compile(stepper: Stepper, batch: Batch, found: Rehearsal) -> None:
    speed = stepper.config.speed
    before = compiled()
    mode = None if speed.compile == "default" else speed.compile
    strategy = stepper.strategy
    if strategy is not None and not strategy.gathers:
        # DDP arranges its buckets in the pass after the first one, and tells all ranks.
        stepper.forward_backward(batch, no_phase)
        stepper.drop_gradients()
    begin = time.perf_counter()
    try:
        stepper.compute = torch.compile(stepper.shared, mode=mode, dynamic=speed.compile_dynamic)  # type: ignore[assignment]
        # Several ranks exchange nothing yet: one that cannot compile would be an exchange behind from now on.
        stepper.forward_backward(batch, no_phase, last=strategy is None or strategy.gathers)
    except Exception as error:
        stepper.compute = stepper.shared
        if is_out_of_memory(error):
            raise
        found.compile_error = said(error)
    if strategy is not None:
        _agree(stepper, strategy, found)
    if found.compile_error is not None:
        return
    if strategy is not None and not strategy.gathers:
        stepper.drop_gradients()
        stepper.forward_backward(batch, no_phase)
    found.compile_s = time.perf_counter() - begin
    found.graphs, found.breaks = (now - then for now, then in zip(compiled(), before, strict=True))


def compiled() -> tuple[int, int]:
    """(graphs, graph breaks) of torch.compile in this process so far."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def _agree(stepper: Stepper, strategy: Strategy, found: Rehearsal) -> None:
    """All ranks use compiled code, or none does. Raises UsageError where they have exchanged data while compiling."""
    why = found.compile_error
    if strategy.gathers:
        if why is not None:
            raise UsageError(
                f'speed.compile: torch.compile failed with FSDP2, set speed.compile = "off": {why}'
            )
        return
    failed = strategy.mean(0.0 if why is None else 1.0)
    if failed and why is None:
        stepper.compute = stepper.shared
        found.compile_error = "torch.compile failed on another rank"


@contextmanager
def _watch_format(model: nn.Module, found: Rehearsal) -> Iterator[None]:
    """Check the memory format of 4-D convolution outputs."""

    def look(_module: nn.Module, _inputs: object, output: Tensor) -> None:
        # With one channel, both formats are the same.
        if output.dim() == 4 and output.shape[1] > 1:
            last = output.is_contiguous(memory_format=torch.channels_last)
            found.channels_last = last and found.channels_last is not False

    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    handles = [module.register_forward_hook(look) for module in convolutions]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class Baseline:
    """Measures one micro-batch forward and backward by itself.

    make: creates a batch of another number of items. make_ns: cost of creating one such item, None if unknown.
    cores: CPU cores that this process may use.
    """

    make: Callable[[int], Batch]
    make_ns: float | None
    cores: int

    def measure(self, stepper: Stepper, batch: Batch, operations: int | None) -> BaselineEvent | None:
        """Measure `batch`, which is on the device; None if it fails. Never raises an Exception.

        Leaves gradients and changed buffers behind; the caller restores them.
        """
        deadline = time.perf_counter_ns() + BASELINE_NS
        micro, threads = stepper.config.batch.micro, torch.get_num_threads()
        with kept_random(stepper.device), memory_history.paused():
            limits = (MOST_RUNS, BASELINE_NS / 2, SLOW_NS)
            measured = _guarded(stepper, lambda: time_micro(stepper, batch, *limits))
            if measured is None:
                return None
            micro_ns, runs = measured
            # Twice the micro-batch with gradient accumulation, to see what a larger one gains; otherwise half of it.
            # Half does not predict this: above some size, operators use several threads or another algorithm.
            twice = stepper.config.batch.accumulation > 1
            if twice and stepper.device.type == "cuda":
                free, _ = torch.cuda.mem_get_info(stepper.device)
                twice = free > 2 * torch.cuda.max_memory_allocated(stepper.device)
            other = 2 * micro if twice or micro == 1 else micro // 2
            other_ns = self._other(stepper, other, micro_ns * max(other / micro, 1.0), deadline)
            by_threads = self._threads(stepper, batch, micro_ns, deadline)
        return BaselineEvent(
            micro=micro,
            micro_ns=micro_ns,
            runs=runs,
            other_micro=other if other_ns is not None else None,
            other_ns=other_ns,
            threads=threads,
            by_threads=by_threads,
            operations=operations,
        )

    def _other(self, stepper: Stepper, count: int, expected_ns: float, deadline: int) -> float | None:
        """Nanoseconds of a micro-batch of `count` items; None if it takes too long or would recompile."""
        if self.make_ns is None or not _plain(stepper):
            return None
        left = deadline - time.perf_counter_ns() - count * self.make_ns
        if 2 * expected_ns > left:
            return None

        def measure() -> tuple[float, int]:
            batch = stepper.moved(self.make(count))
            time_micro(stepper, batch)  # lets libraries choose algorithms for this shape
            return time_micro(stepper, batch, MOST_RUNS, left / 2 - expected_ns)

        measured = _guarded(stepper, measure)
        return None if measured is None else measured[0]

    def _threads(self, stepper: Stepper, batch: Batch, expected_ns: float, deadline: int) -> list[ThreadTime]:
        """The same micro-batch with one thread per core; with one thread alone if the run uses that number.

        Threads of small operators, and beside other processes, may take longer than one thread alone.
        """
        threads = torch.get_num_threads()
        other = self.cores if threads != self.cores else 1
        if stepper.device.type != "cpu" or threads == other or not _plain(stepper):
            return []
        left = max(deadline - time.perf_counter_ns(), 0)
        if 2 * expected_ns > max(left, 2 * SLOW_NS):
            return []

        def measure() -> tuple[float, int]:
            torch.set_num_threads(other)
            time_micro(stepper, batch)  # starts the thread pool
            return time_micro(stepper, batch, MOST_RUNS, left - expected_ns, SLOW_NS)

        try:
            measured = _guarded(stepper, measure)
        finally:
            torch.set_num_threads(threads)
        return [] if measured is None else [(float(other), measured[0])]


def _plain(stepper: Stepper) -> bool:
    """Whether steps run eagerly: compiled ones would recompile for every change."""
    return stepper.config.speed.compile == "off" and stepper.graph is None


def time_micro(
    stepper: Stepper, batch: Batch, most: int = 1, budget_ns: float = 0.0, slow_ns: float = 0.0
) -> tuple[float, int]:
    """(nanoseconds of the fastest forward and backward pass, number of runs); see `fastest`."""
    gpu = stepper.device.type == "cuda"

    def before() -> None:
        stepper.carry.value = None  # the number of items may differ
        # With accumulation, most micro-batches add to existing gradients.
        if stepper.config.batch.accumulation == 1:
            stepper.drop_gradients()
        if gpu:
            torch.cuda.synchronize(stepper.device)

    def work() -> None:
        stepper.forward_backward(batch, no_phase)
        if gpu:
            torch.cuda.synchronize(stepper.device)

    return fastest(work, most, budget_ns, before, slow_ns)


def _guarded(stepper: Stepper, measure: Callable[[], tuple[float, int]]) -> tuple[float, int] | None:
    """The result of `measure`, or None if it raises; frees the memory after running out of it."""
    try:
        return measure()
    except Exception:  # noqa: BLE001  training itself reports an error in the model
        pass
    # Outside the handler, because its traceback keeps the tensors alive.
    stepper.drop_gradients()
    if stepper.device.type == "cuda":
        with suppress(Exception):
            torch.cuda.empty_cache()
    return None
