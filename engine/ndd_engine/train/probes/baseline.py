"""Measures the compute time of one micro-batch by itself before training.

Leaves no trace: random states and thread counts are restored, and a failed measurement is left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch

from ndd_engine.measure import memory_history
from ndd_engine.measure.clock import no_phase
from ndd_engine.measure.timing import fastest
from ndd_engine.record.event import ThreadTime
from ndd_engine.record.events import BaselineEvent
from ndd_engine.train.random_state import kept_random
from ndd_engine.train.step.stepper import Stepper
from ndd_engine.workloads.base import Batch

# Time limit in nanoseconds; each measurement runs at least once however long it takes.
BASELINE_NS = 400_000_000
# A micro-batch up to this long is repeated, and measured with another number of threads.
SLOW_NS = 1_500_000_000
MOST_RUNS = 5


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
            other = _other_size(stepper, micro)
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
        """The same micro-batch with one thread per core, if the run uses another number of threads."""
        threads = torch.get_num_threads()
        if stepper.device.type != "cpu" or threads == self.cores or not _plain(stepper):
            return []
        # The user chose the number of threads, so comparing it with another one is worth the time.
        left = max(deadline - time.perf_counter_ns(), 0)
        if 2 * expected_ns > max(left, 2 * SLOW_NS):
            return []

        def measure() -> tuple[float, int]:
            torch.set_num_threads(self.cores)
            time_micro(stepper, batch)  # starts the thread pool
            return time_micro(stepper, batch, MOST_RUNS, left - expected_ns, SLOW_NS)

        try:
            measured = _guarded(stepper, measure)
        finally:
            torch.set_num_threads(threads)
        return [] if measured is None else [(float(self.cores), measured[0])]


def _other_size(stepper: Stepper, micro: int) -> int:
    """Twice the micro-batch with gradient accumulation, to see what a larger one gains; otherwise half of it.

    Half does not predict this: above some size, operators use several threads or another algorithm.
    """
    twice = stepper.config.batch.accumulation > 1
    if twice and stepper.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(stepper.device)
        twice = free > 2 * torch.cuda.max_memory_allocated(stepper.device)
    return 2 * micro if twice or micro == 1 else micro // 2


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
