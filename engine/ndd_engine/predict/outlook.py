"""Predicted memory and time of a configuration on this machine, and the closest batch that fits if it does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from types import TracebackType
from typing import NamedTuple

import torch

from ndd_engine.config import Config, Draft
from ndd_engine.errors import MachineError, NddError, TrainingError, said
from ndd_engine.hardware.detect import detect, equal_gpus, with_free_memory
from ndd_engine.hardware.gpus import GpuProfile, Machine, detect_host, usable_threads
from ndd_engine.hardware.named_gpus import usable_bytes
from ndd_engine.hardware.sampler import Sampler
from ndd_engine.measure.memory import is_out_of_memory
from ndd_engine.record.events import SampleEvent
from ndd_engine.record.figures import core_use
from ndd_engine.record.snapshot import CoreUse
from ndd_engine.text import counted, factor, size
from ndd_engine.train.data.loader import ordered_steps
from ndd_engine.train.failures import less_memory
from ndd_engine.train.parallel.strategy import why_not
from ndd_engine.train.prepare import seed, total_steps
from ndd_engine.train.rehearsal import SizeChoice, decide
from ndd_engine.train.settings import UNKNOWN_STEPS
from ndd_engine.train.step.optimizers import moment_bytes
from ndd_engine.workloads.base import Workload, item_count, parameter_count
from ndd_engine.workloads.factory_data import prepare
from ndd_engine.workloads.interface import place

from .absent import ShapeTracer, all_items, data_s, reading_once, ways_elsewhere
from .budget import BudgetPlanner, Plan, Way, ways_to_fit
from .estimate import Fit, ItemCounts, Memory, StepTime, spread
from .launches import StepEstimate
from .rank_memory import Shares, is_sharded, pretended, shares
from .step_probes import SIZES, Prober, context_bytes, items_of

# Seconds between two samples: timing a single micro-batch takes about half a second.
PERIOD_S = 0.2


class CoreWatch:
    """Samples the CPU use of this process and of others inside `with`."""

    def __init__(self) -> None:
        self._host = detect_host()
        self._samples: list[SampleEvent] = []
        self._sampler = Sampler(None, self._samples.append, PERIOD_S, host=self._host)

    def __enter__(self) -> CoreWatch:
        self._sampler.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._samples.append(self._sampler.read_once())
        self._sampler.stop()

    @property
    def use(self) -> CoreUse | None:
        """The mean use of the cores, in cores; None if it could not be read."""
        return core_use(self._host.usable_cpus, self._samples)


def disturbed(use: CoreUse | None, on_gpu: bool) -> CoreUse | None:
    """`use` if other processes took cores that the steps wanted; None otherwise, or if it is unknown.

    The rule is that of the finding `neighbour-cores`. on_gpu: one core launches the kernels, whatever the threads.
    """
    if use is None or not use.shared or not use.full:
        return None
    return use if use.lacks(1 if on_gpu else torch.get_num_threads()) else None


# Timing stops after a micro-batch that takes longer; larger ones are extrapolated.
LONGEST_S = 0.8


@dataclass(frozen=True)
class Sharded:
    """The same batch with the model sharded over `ranks` (FSDP2): predicted bytes of one rank, and whether it fits."""

    ranks: int
    peak_bytes: int
    fits: bool | None


@dataclass(frozen=True)
class Outlook:
    """Bytes and seconds. kept_bytes: items cached by the loader; available_bytes: None if unknown."""

    config: Config
    memory: Memory
    time: StepTime
    parameters: int
    parameter_bytes: int
    optimizer_bytes: int
    kept_bytes: int
    available_bytes: int | None
    steps_per_epoch: int | None  # None: the length of the data is unknown
    total_steps: int | None
    # The use of the cores while steps were timed, if other processes took some of them from the steps.
    busy: CoreUse | None = None
    # Of several ranks: what one of them holds throughout. All bytes here are those of one rank.
    shares: Shares | None = None
    # If it does not fit: what sharding the model over several ranks would need.
    sharded: Sharded | None = None
    # Of a GPU that is not in this machine: the range of `time`.
    estimate: StepEstimate | None = None
    # What memory.budget asks for; None without one, or with blocks that are chosen already.
    plan: Plan | None = None
    # If it does not fit: what would make it fit, the fastest first.
    ways: tuple[Way, ...] = ()

    @cached_property
    def fit(self) -> Fit:
        """Whether it fits into the available memory, and the predicted peak."""
        batch = self.config.batch
        return self.memory.fit(batch.micro, batch.accumulation, self.available_bytes, self.kept_bytes)

    @property
    def total_bytes(self) -> int:
        """Predicted peak, as nvidia-smi or the process reports it; if it fits with retries, under the limit."""
        return self.fit.peak_bytes

    @property
    def parts(self) -> dict[str, int]:
        """The peak by component; activations are the remainder."""
        shares = self.shares or Shares(self.parameter_bytes, self.parameter_bytes, self.optimizer_bytes)
        # On the host the process holds the parameters before the steps, unless it shards them.
        on_host = self.memory.on == "host" and not is_sharded(self.config)
        known = {
            "parameters": shares.parameters,
            "gradients": shares.gradients,
            "optimizer": shares.optimizer,
            **({"gathered layers": shares.gathered, "buckets": shares.buckets} if self.shares else {}),
            "process": max(self.memory.outside_bytes - (shares.parameters if on_host else 0), 0),
            "kept items": self.kept_bytes,
            "heap": self.memory.heap_bytes(self.config.batch.micro),
        }
        total = self.total_bytes
        return {**known, "activations": max(total - sum(known.values()), 0), "total": total}

    @property
    def fits(self) -> bool | None:
        """Whether it fits into the available memory, with or without retries; None if that is unknown."""
        return self.fit.fits

    @property
    def retries(self) -> int:
        """Allocator retries that it fits with; 0 if it fits without, or does not fit."""
        return self.fit.retries

    @property
    def nearest(self) -> tuple[int, int] | None:
        """(micro, accumulation) of the largest smaller micro-batch that fits at the same effective batch.

        It needs no retries. None if nothing does or the configuration fits without retries.
        """
        if self.fits is not False and not self.retries:
            return None
        items = self.config.batch.items
        for micro in range(self.config.batch.micro - 1, 0, -1):
            peak = self.memory.peak(micro, items // micro) if items % micro == 0 else None
            if peak is not None and peak + self.kept_bytes <= (self.available_bytes or 0):
                return micro, items // micro
        return None

    @property
    def step_s(self) -> float:
        """Seconds of an optimizer step."""
        batch = self.config.batch
        return self.time.step_s(batch.micro, batch.accumulation, self.config.loader.workers)

    @property
    def step_range_s(self) -> tuple[float, float] | None:
        """Of an estimate, the seconds of a step with a fast and with a slow host; None if it was measured."""
        if self.estimate is None:
            return None
        batch, workers = self.config.batch, self.config.loader.workers
        low, high = (
            time.step_s(batch.micro, batch.accumulation, workers)
            for time in (self.estimate.low, self.estimate.high)
        )
        return low, high

    @property
    def step_measured(self) -> bool:
        """Whether this micro-batch was timed."""
        return self.estimate is None and self.time.measured(self.config.batch.micro)

    @property
    def epoch_s(self) -> float | None:
        """Predicted seconds per epoch, without evaluation and checkpoints; None if its length is unknown."""
        return None if self.steps_per_epoch is None else self.step_s * self.steps_per_epoch

    @property
    def total_s(self) -> float | None:
        """Predicted seconds of the whole run, without evaluation and checkpoints; None if its length is unknown."""
        return None if self.total_steps is None else self.step_s * self.total_steps


def outlook(
    config: Config,
    workload: Workload,
    device: torch.device,
    available_bytes: int | None,
    gpus: int = 1,
    *,
    progress: Callable[[str], None],
) -> Outlook:
    """Probe a configuration on the device in this process. Raises what a step raises.

    available_bytes: on the device; the ranks on a host share its memory. gpus: in this machine, that ranks could use.
    """
    ranks = config.parallel.ranks
    if device.type == "cpu" and available_bytes is not None:
        available_bytes //= ranks
    with pretended(ranks, device):
        found = _outlook(config, workload, device, available_bytes, progress)
    others = ranks if ranks > 1 else gpus if device.type == "cuda" else 1
    if found.fits is not False or others == 1 or is_sharded(config):
        return found
    sharded = config.changed(parallel={"ranks": others, "strategy": "fsdp2"})
    if why_not(sharded, workload.training) is not None:
        return found
    progress("predicting a sharded model")
    outside = found.memory.outside_bytes
    if device.type == "cpu":
        outside = max(outside - found.parameter_bytes, 0)
    with pretended(others, device):
        memory = Prober(sharded, workload, device, progress).memory(outside)
    batch = config.batch
    fit = memory.fit(batch.micro, batch.accumulation, found.available_bytes, found.kept_bytes)
    return replace(found, sharded=Sharded(others, fit.peak_bytes, fit.fits))


def _outlook(
    config: Config,
    workload: Workload,
    device: torch.device,
    available_bytes: int | None,
    progress: Callable[[str], None],
) -> Outlook:
    ranks = config.parallel.ranks
    per_epoch = ordered_steps(workload, config)
    if per_epoch is not None:
        per_epoch //= ranks
    prober = Prober(config, workload, device, progress)
    resident = prober.warm()
    prober.check_metric()
    outside = context_bytes(device, available_bytes) if device.type == "cuda" else resident
    # On the host, `available_bytes` excludes what this process already holds, but the prediction includes it.
    held = 0 if device.type == "cuda" else outside
    available = None if available_bytes is None else available_bytes + held
    # What is sharded is created within the recorded steps; the whole model is gone by then.
    gone = sum(item.nbytes for item in workload.model.parameters()) if is_sharded(config) else 0
    memory = prober.memory(max(outside - (0 if device.type == "cuda" else gone), 0))
    loader = config.loader
    kept = items_of(workload).loader_bytes(device.type == "cuda", loader.placement, loader.cache)
    limit, plan = limit_of(config, available), None
    if limit is not None and config.memory.budget is not None and not config.memory.recompute:
        plain = memory.peak(config.batch.micro, config.batch.accumulation) + kept
        runs_plain = available is None or plain <= available
        added = kept
        if device.type == "cpu" and runs_plain:  # the heap of the process holds more than is in use
            prober.time([config.batch.micro], LONGEST_S, lambda _micro: True)
            added += prober.with_heap(memory).heap_bytes(config.batch.micro)
        plan = BudgetPlanner(prober, memory, added, runs_plain=runs_plain).plan(limit)
        if plan.memory is not None:
            prober, memory = prober.with_levels(plan.levels), plan.memory
            config = prober.config
    micros = [micro for micro in spread(SIZES[0], config.batch.micro) if micro <= config.batch.micro]
    recorded = memory.family.at[1]  # these sizes ran already

    def may_run(micro: int) -> bool:
        return micro <= recorded or limit is None or memory.peak(micro) <= limit

    with CoreWatch() as cores:
        times = prober.time(micros, LONGEST_S, may_run)
    assert times is not None
    memory = prober.with_heap(memory)
    parameter_bytes = sum(tensor.nbytes for tensor in workload.model.parameters() if tensor.requires_grad)
    moments = (
        moment_bytes(config.optimizer, workload.model)
        if ranks > 1
        else prober.stepper().optimizer.moment_bytes()
    )
    total = total_steps(config, per_epoch)
    found = Outlook(
        config=config,
        memory=memory,
        time=times,
        parameters=parameter_count(workload.model),
        parameter_bytes=parameter_bytes,
        optimizer_bytes=moments,
        kept_bytes=kept,
        available_bytes=limit,
        steps_per_epoch=per_epoch,
        total_steps=None if total == UNKNOWN_STEPS else total,
        busy=disturbed(cores.use, device.type == "cuda"),
        shares=None if ranks == 1 else shares(config, workload.model, moments),
        plan=plan,
    )
    if found.fits is not False or limit is None:
        return found
    progress("looking for what would fit")
    return replace(found, ways=tuple(ways_to_fit(prober, memory, times, limit, kept, found.nearest)))


def limit_of(config: Config, available_bytes: int | None) -> int | None:
    """The bytes that a rank may use on its device: what is available, or less if memory.budget says so."""
    budget = config.memory.budget_bytes
    known = [bytes_ for bytes_ in (available_bytes, budget) if bytes_ is not None]
    return min(known, default=None)


class Prediction(NamedTuple):
    """What a configuration needs. choice: how the model size was chosen, if it was "auto".

    items: of the training data, None if unknown. data: all of it in words.
    """

    outlook: Outlook
    machine: Machine
    workload: Workload
    choice: SizeChoice | None
    items: int | None
    data: str


def predict(draft: Draft, progress: Callable[[str], None]) -> Prediction:
    """Prepare the run of a draft that passed preflight and probe its steps.

    Raises MachineError out of memory, and TrainingError for an exception in the user's own workload.
    """
    asked = draft.resolve()
    machine = with_free_memory(detect(asked.run.device))
    device = torch.device(machine.device)
    ranks = asked.parallel.ranks
    # As each of several ranks will have.
    threads = max(usable_threads(machine.host) // ranks, 1) if ranks > 1 else None
    config, choice = decide(draft, machine, progress, threads)
    seed(config.run.seed)
    with draft.locating():
        workload = prepare(config, progress)
    try:
        found = outlook(config, workload, device, *room(machine, config.parallel.ranks), progress=progress)
    except NddError:
        raise
    except Exception as error:
        raise _step_error(error, config, device) from error
    return Prediction(
        found, machine, workload, choice, item_count(workload.train_data), workload.describe_data()
    )


def predict_for(draft: Draft, gpu: GpuProfile, progress: Callable[[str], None]) -> Prediction:
    """The same for a GPU that is not in this machine, by the shapes of its steps; nothing is computed.

    Raises TrainingError for a model that cannot be traced by its shapes.
    """
    size = draft.auto["gpu_size"] if draft.size == "auto" else None
    memory_gb = gpu.memory_gb if draft.size == "auto" else None
    config, shapes = (draft.resolve(size, memory_gb, shapes=least) for least in (False, True))
    if config.precision.amp == "auto":
        amp = next((kind for kind in ("bf16", "fp16") if gpu.peak_tflops(kind)), "off")
        config, shapes = (one.changed(precision={"amp": amp}) for one in (config, shapes))
    progress("reading the data")
    seed(config.run.seed)
    with draft.locating():
        workload = prepare(shapes, progress)
    ranks, batch = config.parallel.ranks, config.batch
    cuda = torch.device("cuda")
    try:
        with pretended(ranks, cuda):
            tracer = ShapeTracer(shapes, reading_once(workload), progress)
            memory = tracer.memory(f"steps traced by their shapes for {gpu.name}")
            progress("timing the data")
            took = data_s(shapes, workload, [batch.micro])
            found = tracer.estimate(gpu, [batch.micro]).with_data(took)
            items, kept, data = all_items(config, shapes, workload)
            prediction = _elsewhere(config, workload, memory, found, items, kept, gpu)
            limit = prediction.available_bytes
            if prediction.fits is False and limit is not None:
                progress("looking for what would fit")
                # With the batch as configured: shapes have a smaller one.
                tracer.config = shapes.changed(batch=config.batch.model_dump())
                added, nearest = prediction.kept_bytes, prediction.nearest
                ways = ways_elsewhere(tracer, memory, gpu, limit, added, nearest)
                prediction = replace(prediction, ways=tuple(ways))
    except NddError:
        raise
    except Exception as error:
        raise _step_error(error, config, cuda) from error
    machine = Machine((), None, gpu.name, {"device": "not in this machine"}, detect_host())
    return Prediction(prediction, machine, workload, None, items, data)


def _elsewhere(
    config: Config,
    workload: Workload,
    memory: Memory,
    estimate: StepEstimate,
    items: int | None,
    kept: ItemCounts,
    gpu: GpuProfile,
) -> Outlook:
    ranks = config.parallel.ranks
    per_epoch = None if items is None else items // config.items_per_step
    total, moments = total_steps(config, per_epoch), moment_bytes(config.optimizer, workload.model)
    return Outlook(
        config=config,
        memory=memory,
        time=estimate.middle,
        parameters=parameter_count(workload.model),
        parameter_bytes=sum(tensor.nbytes for tensor in workload.model.parameters() if tensor.requires_grad),
        optimizer_bytes=moments,
        kept_bytes=kept.loader_bytes(True, config.loader.placement, config.loader.cache),
        available_bytes=limit_of(config, usable_bytes(gpu)),
        steps_per_epoch=per_epoch,
        total_steps=None if total == UNKNOWN_STEPS else total,
        shares=None if ranks == 1 else shares(config, workload.model, moments),
        estimate=estimate,
    )


def room(machine: Machine, ranks: int) -> tuple[int | None, int]:
    """(free bytes of the device, or of the fullest GPU that a rank gets; the GPUs that ranks could use)."""
    gpus = equal_gpus(machine)
    if machine.chosen is None or ranks == 1:
        return machine.free_bytes, max(len(gpus), 1)
    free = [gpu.free_bytes for gpu in gpus[:ranks]]
    known = [bytes_ for bytes_ in free if bytes_ is not None]
    return (min(known) if known and len(known) == len(free) else machine.free_bytes), max(len(gpus), 1)


def _step_error(error: Exception, config: Config, device: torch.device) -> Exception:
    if is_out_of_memory(error):
        shard = ""
        if config.parallel.ranks > 1 and config.parallel.strategy == "ddp":
            shard = ', or shard the model: parallel.strategy = "fsdp2"'
        return MachineError(f"out of memory in a training step on {device}; {less_memory(config)}{shard}")
    return TrainingError(f"{place(error) or config.workload.name}: a step failed: {said(error)}")


def planned(draft: Draft, progress: Callable[[str], None]) -> tuple[list[str], str]:
    """(the value of memory.recompute that keeps a run within memory.budget, why).

    Raises what `predict` raises, and MachineError if no levels do.
    """
    found, machine, *_ = predict(draft, progress)
    plan, limit = found.plan, found.available_bytes
    if plan is None or limit is None:
        raise MachineError(
            f"memory.budget: the free memory of {machine.device} is unknown: set a number of bytes"
        )
    if plan.memory is None:
        raise MachineError(
            f"memory.budget: training needs at least {size(plan.peak_bytes)} of the {size(limit)} that it may use: "
            f"{plan.why}; {less_memory(found.config)}"
        )
    return found.config.memory.recompute, reason_of(plan, limit)


def reason_of(plan: Plan, limit: int) -> str:
    """What a plan does, in words."""
    fits = f"predicted {size(plan.peak_bytes)} of {size(limit)}"
    if not plan.levels:
        return f"no block has to compute again: {fits}"
    blocks = counted(plan.blocks, "block")
    what = f"{len(plan.levels)} of {blocks} keep less for backward"
    costs = "" if plan.slower is None else f", and a micro-batch takes {factor(plan.slower)} times as long"
    return f"{what}: {fits}{costs}"
