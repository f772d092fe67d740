"""What is measured before training: the model size, the cost of a micro-batch and of its data, and a test step.

Nothing of it affects training: random states, buffers and extra states are restored, gradients dropped, and the
optimizer does not step.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from ndd_engine.batches import map_tensors
from ndd_engine.config import Config, Draft
from ndd_engine.errors import UsageError, said
from ndd_engine.hardware.gpus import Machine, usable_threads
from ndd_engine.measure import memory
from ndd_engine.measure.memory import is_out_of_memory
from ndd_engine.measure.reporting import WorkCounter
from ndd_engine.record.event import ThreadTime
from ndd_engine.record.events import BaselineEvent, LoaderEvent
from ndd_engine.text import counted, number, printable
from ndd_engine.train.checkpoint_state import kept_buffers, kept_random
from ndd_engine.train.data.item_sources import StreamOrder, item_bytes
from ndd_engine.train.data.loader import CPU, Batches
from ndd_engine.train.step.stepper import Stepper
from ndd_engine.workloads.base import Batch, Stream, Workload, parameter_count
from ndd_engine.workloads.factory_data import prepare
from ndd_engine.workloads.interface import problems
from ndd_watch import recompute
from ndd_watch.clock import PhaseClock, no_phase
from ndd_watch.switches import same_item

if TYPE_CHECKING:
    from ndd_engine.train.parallel.strategy import Strategy


def fastest(
    work: Callable[[], object],
    most: int,
    budget_ns: float,
    before: Callable[[], object] | None = None,
    slow_ns: float = 0.0,
) -> tuple[float, int]:
    """(nanoseconds of the fastest run, number of runs): at least one, as long as the next fits the budget.

    before: called before each run, untimed. slow_ns: a run up to this long is repeated once in any case.
    """
    best, runs, spent = float("inf"), 0, 0
    while not runs or (runs < most and (spent + best <= budget_ns or (runs == 1 and best <= slow_ns))):
        if before is not None:
            before()
        begin = time.perf_counter_ns()
        work()
        last = time.perf_counter_ns() - begin
        best, runs, spent = min(best, last), runs + 1, spent + last
    return float(best), runs


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
            with _watch_format(stepper.model, found), _refuse_effects(stepper):
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
def _refuse_effects(stepper: Stepper) -> Iterator[None]:
    """Raise UsageError for a block of `memory.recompute` that cannot compute twice with the same result."""
    modules = {block.name: block.module for block in recompute.blocks_of(stepper.model)}
    with recompute.watched_effects(stepper.model, modules) as effects:
        yield
    for name, why in effects.items():
        if why:
            raise UsageError(f"memory.recompute: {printable(name)} cannot compute again: {why}")


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
        with kept_random(stepper.device), memory.paused():
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


# Time limits of the measurements, in nanoseconds; each one runs at least once however long it takes.
ITEMS_NS = 40_000_000
COLLATE_NS = 30_000_000
GATHER_NS = 10_000_000
MOST_ITEMS = 64


def probe_loader(batches: Batches, sample: Batch, sample_ns: float) -> LoaderEvent:
    """Measure the cost of creating a micro-batch; `sample` is the first one, created in `sample_ns` nanoseconds.

    Uses a few items of the second micro-batch, whose items are not in a cache yet. Never raises an Exception: what
    cannot be measured is null.
    """
    source, sampler = batches.source, batches.sampler
    measured: dict[str, Any] = {}  # fields of LoaderEvent
    random = False
    if isinstance(source, StreamOrder):
        with suppress(Exception), kept_random(CPU):
            wall, cpu, count = (
                source.stream.spent
            )  # of the sample: more items would be taken from the training
            measured = {"item_ns": wall / count, "item_cpu_ns": min(cpu, wall) / count, "probed": count}
            measured["collate_ns"] = fastest(lambda: source.sample(), 2, COLLATE_NS // 2)[0]
        size = item_bytes(sample) or None
        return LoaderEvent(0, sampler.micro, False, None, True, size, stream=True, **measured)
    with suppress(Exception), kept_random(CPU):
        indices = list(islice(sampler.tensors(), 2))[-1]
        if source.on.type == "cpu":
            if (gather := source.possible) is not None:
                measured["gather_ns"] = fastest(lambda: gather.batch(indices), MOST_RUNS, GATHER_NS)[0]
            items = _time_items(source.data, indices.tolist(), measured)
            random = not same_item(torch, items[0], source.data[indices[0].item()], unknown=True)
            # As many items as fit the budget even if collating took all of the sample's time, scaled up if not all.
            affordable = int(COLLATE_NS / max(sample_ns / sampler.micro, 1.0))
            count = min(sampler.micro, max(affordable, 1))
            batch, join = (items * -(-count // len(items)))[:count], source.collate or default_collate
            joining_ns = fastest(lambda: join(batch), 2, COLLATE_NS // 2)[0]
            measured["collate_ns"] = joining_ns * sampler.micro / count
    return LoaderEvent(
        items=sampler.items,
        micro=sampler.micro,
        in_memory=source.possible is not None,
        encoded=source.encoded,
        epochs_differ=sampler.epochs_differ or random,
        batch_bytes=item_bytes(sample) or None,
        **measured,
    )


def _delay_ns() -> int | None:
    """Nanoseconds for which this thread could run and had no core, since its start; None if unknown.

    The second figure of schedstat; see the kernel's documentation of scheduler statistics.
    """
    try:
        return int(Path("/proc/thread-self/schedstat").read_bytes().split()[1])
    except (OSError, ValueError, IndexError):
        return None


def _time_items(data: Any, indices: Sequence[int], measured: dict[str, Any]) -> list[Any]:
    """Time items at `indices` until the budget is used up, and return them."""
    items: list[Any] = []
    delayed = _delay_ns()
    begin, begin_cpu = time.perf_counter_ns(), time.thread_time_ns()
    for index in indices[:MOST_ITEMS]:
        items.append(data[index])
        if time.perf_counter_ns() - begin > ITEMS_NS:
            break
    wall, cpu = time.perf_counter_ns() - begin, time.thread_time_ns() - begin_cpu
    delayed_until = _delay_ns()
    measured["probed"] = len(items)
    if delayed is not None and delayed_until is not None:
        measured["item_delay_ns"] = min(max(delayed_until - delayed, 0), wall) / len(items)
    # The two clocks are not read at the same instant.
    measured["item_ns"], measured["item_cpu_ns"] = wall / len(items), min(cpu, wall) / len(items)
    return items


# The probe runs alone; the run shares the cores with the screen, the recorder and other users.
MARGIN = 1.3
# Below this share of the target rate the prediction decides, although it is only accurate to a factor of two.
HOPELESS = 0.4
MEASURE_S = 0.25
WARM_UP_STEPS = 2
# Loader settings of a probe.
ALONE = {"workers": 0, "prefetch": None, "persistent": None, "cache": False, "placement": "host"}


@dataclass(frozen=True)
class SizeChoice:
    """A size and the reason as text. threads: intra-op threads if not the default number.
    memory_gb: memory of the GPU that the size is for, see Draft.resolve."""

    size: str
    reason: str
    threads: int | None = None
    memory_gb: float | None = None


def decide(
    draft: Draft, machine: Machine, progress: Callable[[str], None], threads: int | None = None
) -> tuple[Config, SizeChoice | None]:
    """The configuration for this machine, and how its model size was chosen if it is "auto".

    Also sets torch's number of threads. threads: if the configuration does not say; None: the usable cores.
    """
    torch.set_num_threads(draft.resolve().run.threads or threads or usable_threads(machine.host))
    if draft.size != "auto":
        return draft.resolve(), None
    gpu = machine.chosen
    total = gpu.memory_total_bytes if gpu is not None else None
    memory_gb = None if total is None else total / (1 << 30)
    choice = choose_size(draft, torch.device(machine.device), progress, memory_gb)
    config = draft.resolve(choice.size, choice.memory_gb)
    if choice.threads is not None:
        config = config.changed(run={"threads": choice.threads})
    return config, choice


def choose_size(
    draft: Draft, device: torch.device, progress: Callable[[str], None], memory_gb: float | None = None
) -> SizeChoice:
    """The size for `size = "auto"`: a fixed one on a GPU, else the largest that reaches the target steps per second.

    memory_gb: GiB of GPU memory, which decides the micro-batch. Leaves torch with the best number of threads.
    """
    auto = draft.auto
    # Skip sizes that this data is too small for (a text shorter than their sequence).
    every = (*auto["candidates"], auto["gpu_size"])
    feasible = [size for size in every if not problems(draft.resolve(size), "")]
    if not feasible:
        return SizeChoice(auto["candidates"][0], "the data is too small for all sizes")
    if device.type == "cuda":
        micro = draft.resolve(feasible[-1], memory_gb).batch.micro
        reason = f"size {feasible[-1]}, micro-batch {micro}: for a CUDA GPU"
        return SizeChoice(feasible[-1], reason, memory_gb=memory_gb)
    wanted = float(auto["min_steps_per_second"])
    sizes = [size for size in feasible if size in auto["candidates"]]
    if not sizes:
        return SizeChoice(feasible[-1], f"size {feasible[-1]}: the only one with enough data")
    size, rate, too_slow = _largest(sizes, draft, device, wanted, progress)
    threads = torch.get_num_threads()
    if rate < wanted * MARGIN and threads > 1 and draft.resolve(size).run.threads is None:
        # If other processes use the cores, spinning threads slow each other down: one thread may be far faster.
        torch.set_num_threads(1)
        larger, faster, _ = _largest(sizes, draft, device, wanted, progress)
        if faster > rate:
            reason = f"no CUDA GPU: size {larger}, 1 thread, about {_in_run(faster)} steps/s"
            shared = f"{_in_run(rate)} with {counted(threads, 'thread')}: the cores are shared"
            return SizeChoice(larger, f"{reason}; {shared}", 1)
        torch.set_num_threads(threads)
    # Has to fit on one line of a narrow screen.
    return SizeChoice(size, f"no CUDA GPU: size {size}, about {_in_run(rate)} steps/s{too_slow}")


def _in_run(measured: float) -> str:
    """The steps per second to expect in the run, as text: the figure that decides, rounded down to two digits.

    A size is taken exactly if the figure reaches the target.
    """
    rate = measured / MARGIN
    if rate <= 0:
        return "0"
    unit = 10.0 ** (math.floor(math.log10(rate)) - 1)
    return number(math.floor(rate / unit * (1 + 1e-9)) * unit, 2)


def _largest(
    sizes: Sequence[str], draft: Draft, device: torch.device, wanted: float, progress: Callable[[str], None]
) -> tuple[str, float, str]:
    """(the largest size that reaches the target rate, or the smallest; its rate; why no larger one)."""
    chosen = sizes[0]
    measured = work = 0.0
    for size in sizes:
        # Preparing all of the data for each size would take longer than measuring it.
        config = draft.resolve(size, few=True)
        torch.manual_seed(config.run.seed)
        workload = prepare(config, progress)
        batch = config.batch
        size_work = float(parameter_count(workload.model) * batch.micro * batch.sequence)
        # Do not spend seconds on a size whose FLOPs already make it far too slow.
        predicted = measured * work / size_work
        if measured and predicted < wanted * HOPELESS:
            return chosen, measured, f" ({size} {_in_run(predicted)} predicted, target {wanted:g})"
        progress(f"measuring model size {size} on this CPU")
        rate = steps_per_second(config, workload, device, 1 / (wanted * MARGIN))
        if measured and rate < wanted * MARGIN:
            return chosen, measured, f" ({size} {_in_run(rate)}, target {wanted:g})"
        chosen, measured, work = size, rate, size_work
        if rate < wanted * MARGIN:
            return chosen, measured, f" (target {wanted:g})"
    return chosen, measured, ""


def steps_per_second(config: Config, workload: Workload, device: torch.device, give_up_s: float) -> float:
    """Steps per second of a configuration, by its median step over a quarter of a second.

    A first step slower than three times `give_up_s` is the answer: warm-up never takes that long.
    """
    stepper = Stepper(workload, config, device, total_steps=1000)
    batches = probe_batches(workload, config)
    clock = PhaseClock()
    times: list[float] = []
    done, epoch = 0, 0
    iterator = batches.epoch(epoch)
    deadline = float("inf")
    while not times or time.perf_counter() < deadline:
        begin = time.perf_counter()
        if stepper.step(iterator, clock, done) is None:
            epoch += 1
            iterator = batches.epoch(epoch)
            continue
        clock.end_step()
        clock.take()
        spent = time.perf_counter() - begin
        done += 1
        if done == 1 and spent > 3 * give_up_s:
            times.append(spent)
            break
        if done <= WARM_UP_STEPS:
            deadline = time.perf_counter() + MEASURE_S
        else:
            times.append(spent)
    times.sort()
    return 1 / times[len(times) // 2]


def probe_batches(workload: Workload, config: Config) -> Batches:
    """Batches for a probe, created in this process: starting workers or caching would take too long."""
    config = config.changed(loader=ALONE)
    order = None
    if isinstance(workload.train_data, Stream) and workload.order is not None:
        order = replace(workload.order, batch_size=None)  # of any size, also if its items are batches
    return Batches(
        workload.train_data, config, workload.collate, workload.epochs_differ, order=order, resumes=False
    )
