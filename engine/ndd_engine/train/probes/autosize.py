"""Which model size to take when the user named none: measured on this machine, within about two seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ndd_engine.config import Config, Draft
from ndd_engine.hardware.gpu import Machine
from ndd_engine.hardware.host import usable_threads
from ndd_engine.measure.clock import PhaseClock
from ndd_engine.text import number
from ndd_engine.train.data.loader import Batches
from ndd_engine.train.step.stepper import Stepper
from ndd_engine.workloads.base import Workload, parameter_count
from ndd_engine.workloads.facts import problems
from ndd_engine.workloads.registry import prepare

# The probe runs alone; the run shares the cores with the screen, the record and other people.
MARGIN = 1.3
# Below this share of the wanted rate a prediction, which is good to about a factor of two, settles it.
HOPELESS = 0.4
MEASURE_S = 0.25
WARM_UP_STEPS = 2
# Loader settings of a probe.
ALONE = {"workers": 0, "prefetch": None, "persistent": None, "cache": False, "placement": "host"}


@dataclass(frozen=True)
class SizeChoice:
    """A size and, for people, why. threads: intra-op threads, where another number than the usual was better.
    memory_gb: of the card that the size is for, see Draft.resolve."""

    size: str
    reason: str
    threads: int | None = None
    memory_gb: float | None = None


def decide(
    draft: Draft, machine: Machine, progress: Callable[[str], None]
) -> tuple[Config, SizeChoice | None]:
    """The configuration for this machine, and how its model's size was chosen where that is "auto".

    Tells torch how many threads to use.
    """
    torch.set_num_threads(draft.resolve().run.threads or usable_threads(machine.host))
    if draft.size != "auto":
        return draft.resolve(), None
    card = machine.chosen
    total = card.memory_total_bytes if card is not None else None
    memory_gb = None if total is None else total / (1 << 30)
    choice = choose_size(draft, torch.device(machine.device), progress, memory_gb)
    config = draft.resolve(choice.size, choice.memory_gb)
    if choice.threads is not None:
        config = config.model_copy(update={"run": config.run.model_copy(update={"threads": choice.threads})})
    return config, choice


def choose_size(
    draft: Draft, device: torch.device, progress: Callable[[str], None], memory_gb: float | None = None
) -> SizeChoice:
    """The size for `size = "auto"`: the card's on a card, else the largest that steps often enough.

    memory_gb: GiB of the card, which the guides' batches go by. Leaves torch with the threads that were found best.
    """
    auto = draft.auto
    # Sizes that this data cannot feed (a text shorter than their sequence) are not in question.
    feasible = [
        size for size in (*auto["candidates"], auto["card_size"]) if not problems(draft.resolve(size), "")
    ]
    if not feasible:
        return SizeChoice(auto["candidates"][0], "the data is too small for every size")
    if device.type == "cuda":
        micro = draft.resolve(feasible[-1], memory_gb).batch.micro
        reason = f"size {feasible[-1]}, micro-batch {micro}: a CUDA card is there"
        return SizeChoice(feasible[-1], reason, memory_gb=memory_gb)
    wanted = float(auto["min_steps_per_second"])
    sizes = [size for size in feasible if size in auto["candidates"]]
    if not sizes:
        return SizeChoice(feasible[-1], f"size {feasible[-1]}: the only one that this data can feed")
    size, rate, too_slow = _largest(sizes, draft, device, wanted, progress)
    threads = torch.get_num_threads()
    if rate < wanted * MARGIN and threads > 1 and draft.resolve(size).run.threads is None:
        # When others use the cores, threads that spin at barriers take them from each other: one may be far faster.
        torch.set_num_threads(1)
        alone = _largest(sizes, draft, device, wanted, progress)
        if alone[1] > rate:
            beside = f"; {threads} threads {number(rate)}: others use the cores"
            return SizeChoice(
                alone[0], f"no CUDA card: size {alone[0]}, 1 thread, {number(alone[1])} steps/s{beside}", 1
            )
        torch.set_num_threads(threads)
    # Short enough for one line of a narrow screen.
    return SizeChoice(size, f"no CUDA card: size {size}, {number(rate, 2)} steps/s{too_slow}")


def _largest(
    sizes: Sequence[str], draft: Draft, device: torch.device, wanted: float, progress: Callable[[str], None]
) -> tuple[str, float, str]:
    """(the largest size that makes the wanted steps per second, or the smallest; its rate; why no larger one)."""
    chosen = sizes[0]
    measured = work = 0.0
    for size in sizes:
        config = draft.resolve(size)
        # Making or reading all of the data for each size would take longer than measuring it.
        few = config.workload.model_copy(update=draft.auto.get("probe", {}))
        config = config.model_copy(update={"workload": few})
        torch.manual_seed(config.run.seed)
        workload = prepare(config, progress)
        batch = config.batch
        size_work = float(parameter_count(workload.model) * batch.micro * batch.sequence)
        # A size that is far too slow by its multiplications is not worth the seconds of trying it.
        predicted = measured * work / size_work
        if measured and predicted < wanted * HOPELESS:
            return chosen, measured, f" ({size} {number(predicted, 2)} predicted, {wanted:g} wanted)"
        progress(f"measuring model size {size} on this processor")
        rate = steps_per_second(config, workload, device, 1 / (wanted * MARGIN))
        if measured and rate < wanted * MARGIN:
            return chosen, measured, f" ({size} {number(rate, 2)}, {wanted:g} wanted)"
        chosen, measured, work = size, rate, size_work
        if rate < wanted * MARGIN:
            break
    return chosen, measured, ""


def steps_per_second(config: Config, workload: Workload, device: torch.device, give_up_s: float) -> float:
    """Steps per second of a configuration, by its median step over a quarter of a second.

    A first step slower than three times `give_up_s` is taken as the answer: a warm-up is never that large.
    """
    stepper = Stepper(workload, config, device, total_steps=1000)
    batches = probe_batches(workload, config)
    clock = PhaseClock()
    times: list[float] = []
    done, epoch = 0, 0
    iterator = batches.epoch(epoch)
    deadline = float("inf")
    while not times or (time.perf_counter() < deadline):
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
    """Batches for a probe: made in this process as they come, since workers and encoding ahead take their time."""
    config = config.model_copy(update={"loader": config.loader.model_copy(update=ALONE)})
    return Batches(workload.train_data, config, workload.collate, workload.epochs_differ)
