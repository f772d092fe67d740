"""Chooses the model size if the user gave none, by measuring on this machine for about two seconds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from ndd_engine.config import Config, Draft
from ndd_engine.hardware.gpus import Machine
from ndd_engine.hardware.host import usable_threads
from ndd_engine.measure.phase_clock import PhaseClock
from ndd_engine.text import counted, number
from ndd_engine.train.data.loader import Batches
from ndd_engine.train.step.stepper import Stepper
from ndd_engine.workloads.base import Stream, Workload, parameter_count
from ndd_engine.workloads.interface import problems
from ndd_engine.workloads.registry import prepare

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
    return Batches(workload.train_data, config, workload.collate, workload.epochs_differ, order=order)
