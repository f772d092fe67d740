"""Prepares a run from a checked configuration: device, size, workload, loaders, checkpoint, hardware sampler."""

from __future__ import annotations

import gc
import json
import os
import platform
import random
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ndd_engine.batches import expanded
from ndd_engine.child import ChildError, ChildProcess, spec_of
from ndd_engine.config import Config, anywhere, to_toml
from ndd_engine.errors import (
    MachineError,
    NddError,
    OutOfMemoryError,
    UsageError,
    message_of,
    said,
    shortened,
)
from ndd_engine.files import PATIENCE_S, replacing, unwritable
from ndd_engine.hardware.detect import detect
from ndd_engine.hardware.gpus import Machine, usable_threads
from ndd_engine.hardware.sampler import Sampler
from ndd_engine.measure import memory
from ndd_engine.measure.memory import is_out_of_memory
from ndd_engine.measure.reporting import work_event
from ndd_engine.record.events import Event, Json, MarkEvent, RunEvent
from ndd_engine.text import counted, printable, span
from ndd_engine.train.data.loader import cannot_load, no_step
from ndd_engine.train.parallel.strategy import strategy_of
from ndd_engine.train.parallel.world import World, check_data, check_model, device_of, from_first
from ndd_engine.train.rehearsal import Baseline, Rehearsal, SizeChoice, decide, probe_loader, rehearse
from ndd_engine.version import __version__
from ndd_engine.workloads.base import Workload, parameter_count
from ndd_engine.workloads.factory_data import prepare
from ndd_engine.workloads.interface import place
from ndd_watch.changes import GLOBALS
from ndd_watch.clock import PhaseClock

from .checkpoint import Saved, newest_good
from .checkpoint_state import kept_random, restore_random_state, unloadable
from .data.loader import Batches, EvalBatches
from .data.order import ALONE, Share, mixed
from .evaluate import check_metric, check_used
from .failures import out_of_memory
from .loop import Loop
from .request import OpenRun
from .settings import UNKNOWN_STEPS
from .step.graph import StepGraph
from .step.stepper import Stepper

# Chooses what blocks of the model compute again; a program of its own, since `predict` is above `train`.
_PLANNER = "ndd_engine.predict.probe_process"


@dataclass
class Prepared:
    """A run that is ready to train. Stop the sampler afterwards; loader workers end with the loop."""

    config: Config
    device: torch.device
    clock: PhaseClock
    loop: Loop
    sampler: Sampler


def prepare_run(run: OpenRun) -> Prepared:
    """Prepare the run and report each stage. Raises NddError."""
    draft = run.request.draft
    run.stage("detecting the hardware")
    ranks = run.ranks
    asked = draft.resolve().run.device
    machine = detect(asked if ranks is None else device_of(asked, ranks.place))
    device = torch.device(machine.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    for problem in machine.problems:
        run.put(MarkEvent("warning", 0, problem))
    config, choice = _decided(run, machine)
    _switch_torch(config)
    world = None
    if ranks is not None:
        world = World.join(run, ranks, device)

    run.stage("reading the data")
    seed(config.run.seed)
    with draft.locating():
        workload = prepare(config, run.stage)
        if run.request.probes:
            check_used(workload.training, config)
    strategy = strategy_of(config, device, workload.training)
    share = ALONE if world is None else Share(world.rank, world.size)
    observed = run.request.probes and config.log.profile_every_s > 0
    batches = training_batches(workload, config, device, run.stage, share, observed)
    evaluation = EvalBatches(
        workload.eval_data, config, workload.collate, device, run.stage, workload.eval_order, share
    )
    if world is not None:
        check_data(world, batches)
        if strategy is not None and strategy.gathers:
            check_model(world, workload.model)
    total = total_steps(config, batches.steps_per_epoch)
    if not total:
        raise UsageError(no_step(batches, config))
    run.stage("moving the model to the device")
    if run.request.probes:
        own = run.directory.path
        if world is not None and not world.place.first:
            own = run.directory.ranks / str(world.rank)
        memory.start(device, config.log.memory_history, own)
    stepper = Stepper(workload, config, device, total, strategy)
    if stepper.graphed:
        stepper.graph = StepGraph(stepper)
    clock = PhaseClock()
    if device.type == "cuda":
        make_event = partial(torch.cuda.Event, enable_timing=True)
        clock.gpu.prepare(make_event, torch.cuda.current_stream)
    settle: Callable[[Callable[[], Any]], None] | None = None
    if world is None:
        loop = Loop(run, stepper, batches, evaluation, clock)
    else:
        from .parallel.rank_loop import RankLoop  # imports much that a single process does not need

        ranked = RankLoop(run, stepper, batches, evaluation, clock, world)
        loop, settle = ranked, ranked.settle
        if not world.place.first:  # the model is the same everywhere, its random numbers are not
            seed(mixed(config.run.seed, world.rank))

    _check_resumable(loop)
    if run.request.probes:
        # Takes time, and after a failure there may be no file descriptor left for it.
        from . import checkpoint_tensors  # noqa: F401
    if run.request.resume is not None:
        run.stage("loading the checkpoint")
        _resume(run, loop, device)
        # A run that was killed between its last checkpoint and its end has nothing left to train: it ends as done.
        if loop.finished and (loop.step > total or run.request.from_step is not None):
            done = f"run {run.directory.name} has finished all {loop.step:,} steps"
            raise UsageError(f"{done}; to train longer, raise run.epochs")
    run.stage("running a test step")
    # Probes would exchange gradients, too.
    cores = usable_threads(machine.host) if run.request.probes and world is None else None
    rehearsal = _rehearse(stepper, batches, cores)
    if settle is not None:
        settle(batches.sample)
    if run.request.resume is not None and rehearsal.changed_parameters:
        _resume(run, loop, device)
    if run.request.probes:
        if loop.config.evaluate.metric is not None:
            run.stage("evaluating a batch")
        of_first = str if world is None else _said_by_first(world)
        check_metric(stepper, evaluation, run.control.check_kill, of_first)
    config = loop.config
    if world is None or world.place.first:
        _write_config(run, config, machine)
    run.put(_run_event(run, machine, loop))
    if choice is not None:
        run.put(MarkEvent("choice", loop.step, choice.reason))
    for event in _trial_step_events(loop, rehearsal, machine):
        run.put(event)
    others = () if world is None else world.pids_here
    sampler = Sampler(machine.chosen, run.put, run_dir=run.directory.path, ranks=others)
    if world is None or world.place.first or device.type == "cuda":
        sampler.start()
    if device.type == "cuda":
        # Measure the peak of training steps only, without loading and moving the model.
        torch.cuda.reset_peak_memory_stats(device)
    # Objects that exist now live until the end: keep the garbage collector from scanning them.
    gc.collect()
    gc.freeze()
    return Prepared(config, device, clock, loop, sampler)


def _said_by_first(world: World) -> Callable[[str], str]:
    return lambda text: world.exchange.from_first(lambda: text)


def _decided(run: OpenRun, machine: Machine) -> tuple[Config, SizeChoice | None]:
    """The resolved configuration; with several ranks it is what rank 0 resolved."""
    draft, ranks = run.request.draft, run.ranks
    if ranks is None:
        config, choice = decide(draft, machine, run.stage)
        return _within_budget(run, anywhere(config)), choice
    threads, chosen = ranks.place.threads(usable_threads(machine.host)), None

    def make() -> Json:
        nonlocal chosen
        config, chosen = decide(draft, machine, run.stage, threads)
        return _within_budget(run, anywhere(config)).model_dump(mode="json")

    found = from_first(ranks.store, ranks.place, "config", make)
    config = Config.model_validate_json(json.dumps(found))
    torch.set_num_threads(config.run.threads or threads)
    return config, chosen


def _within_budget(run: OpenRun, config: Config) -> Config:
    """The configuration with the levels of the model's blocks that memory.budget asks for. Raises NddError.

    They are chosen in another process, whose memory and random numbers are not those of the run.
    """
    if config.memory.budget is None or config.memory.recompute:
        return config
    command = {"do": "plan", **spec_of(None, None, (), config.model_dump(mode="json", exclude_none=True))}
    try:
        with ChildProcess(_PLANNER) as child:
            found = child.ask(
                command, None, lambda text: run.stage(f"memory budget: {text}") if text else None
            )
    except ChildError as error:
        kind = {kind.exit_status: kind for kind in (UsageError, MachineError)}.get(
            error.status or 0, NddError
        )
        raise kind(str(error)) from None
    run.put(MarkEvent("choice", 0, f"memory.budget {config.memory.budget}: {found['reason']}"))
    return config.changed(memory={"recompute": found["recompute"]})


def _write_config(run: OpenRun, config: Config, machine: Machine) -> None:
    heading = f"Run {run.directory.name}, as resolved for {machine.device}."
    try:
        with replacing(run.directory.config, PATIENCE_S) as file:
            file.write(to_toml(config, heading).encode())
    except OSError as error:
        raise NddError(unwritable(run.directory.config, error)) from None


def training_batches(
    workload: Workload,
    config: Config,
    device: torch.device,
    tell: Callable[[str], None],
    share: Share = ALONE,
    observed: bool = False,
) -> Batches:
    """The training batches of a workload. Raises UsageError and DoesNotFitError, see `Batches`."""
    differ, order = workload.epochs_differ, workload.order
    return Batches(
        workload.train_data, config, workload.collate, differ, device, tell, order, share, observed
    )


def _trial_step_events(loop: Loop, rehearsal: Rehearsal, machine: Machine) -> Iterator[Event]:
    stepper, speed, batch = loop.stepper, loop.config.speed, loop.config.batch
    for note in (*stepper.workload.notes(), *rehearsal.notes):
        yield MarkEvent("note", loop.step, note)
    if (seconds := rehearsal.compile_s) is not None:
        text = f"compiled in {seconds:.1f} s ({speed.compile}), before the first step"
        yield MarkEvent("compile", loop.step, text, {"seconds": seconds, "mode": speed.compile})
    if rehearsal.loader is not None:
        yield rehearsal.loader
    if rehearsal.baseline is not None:
        yield rehearsal.baseline
    yield from loop.settings.of_model(rehearsal)
    if (counter := rehearsal.counter) is not None:
        clips, moments = loop.config.clip.max_norm > 0, stepper.optimizer.moment_bytes()
        precision = stepper.precision.name
        yield work_event(
            counter, stepper.model, batch.micro, batch.accumulation, clips, moments, machine.chosen, precision
        )


def _rehearse(stepper: Stepper, batches: Batches, cores: int | None) -> Rehearsal:
    """Run the test step and the loader probe, and stop timing sub-phases that are too expensive to time.

    cores: CPU cores for the probes, None to skip them. Raises OutOfMemoryError.
    """
    try:
        # The items of the sample draw random numbers, too, if the data is not as it should be.
        with kept_random(stepper.device):
            begin = time.perf_counter_ns()
            sample = batches.sample()
            cost = baseline = None
            if cores is not None:
                cost = probe_loader(batches, sample, time.perf_counter_ns() - begin)
                baseline = Baseline(batches.sample, cost.item_ns, cores)
            found = rehearse(stepper, sample, baseline)
            found.loader = cost
    except Exception as error:
        if is_out_of_memory(error):
            text = out_of_memory(error, "in a test step", stepper.config, stepper.device, stepper)
            raise OutOfMemoryError(text) from None
        raise
    if dropped := stepper.parts.keep_cheap(found.part_calls, found.micro_ns):
        why = f"because timing would slow down a micro-batch of {span(found.micro_ns)}"
        found.notes.append(f"Not timed separately: {', '.join(dropped)} in forward, {why}.")
    return found


def seed(value: int) -> None:
    """Seed torch's and Python's random generators."""
    torch.manual_seed(value)
    random.seed(value)


def total_steps(config: Config, steps_per_epoch: int | None) -> int:
    """Optimizer steps of the whole run: run.epochs or run.max_steps, whichever ends first.

    steps_per_epoch: None if it is unknown; UNKNOWN_STEPS is returned if the run ends after passes only.
    """
    epochs = config.run.epochs
    known = None if epochs is None or steps_per_epoch is None else epochs * steps_per_epoch
    return min((limit for limit in (config.run.max_steps, known) if limit is not None), default=UNKNOWN_STEPS)


def _switch_torch(config: Config) -> None:
    speed = config.speed
    for key, kind in GLOBALS.items():
        if (value := config.value(key)) is not None:
            kind(value, None).set(value)
    torch.backends.cudnn.deterministic = speed.deterministic
    if speed.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # The call imports torch.compile (over a second), even to turn off what is off.
    if torch.are_deterministic_algorithms_enabled() != speed.deterministic:
        torch.use_deterministic_algorithms(speed.deterministic)


def _check_resumable(loop: Loop) -> None:
    """Raise UsageError if the model's state cannot be saved, or cannot be loaded into the same model."""
    if (why := unloadable(loop.state())) is not None:
        raise UsageError(why)
    model = loop.stepper.model
    for name, value in model.state_dict().items():
        if isinstance(value, torch.Tensor) and expanded(value):
            text = "is an expanded tensor, which no checkpoint can be loaded into: add .clone()"
            raise UsageError(f"{shortened(name, 100)} {text}")
    try:
        model.load_state_dict(model.state_dict())
    except Exception as error:
        where = place(error)
        text = f"the model cannot load its own state, so a run could not resume: {said(error)}"
        raise UsageError(text + (f" ({where})" if where else "")) from error


def _resume(run: OpenRun, loop: Loop, device: torch.device) -> None:
    loop.store.clean()
    saved, state = newest_good(loop.store, run.request.from_step)
    for name in loop.store.damaged():
        run.put(
            MarkEvent("warning", saved.step, f"ignored a damaged file of a checkpoint: {printable(name)}")
        )
    _check_data(run.directory.name, saved, state, loop)
    shown = printable(str(saved.path))
    try:
        saved_threads = state["threads"]
        loop.load(state)
        restore_random_state(state["random"], device)
    except UsageError as error:
        raise UsageError(f"cannot resume {run.directory.name}: {error}") from None
    except Exception as error:  # noqa: BLE001
        where = place(error)  # the user's own set_extra_state or load_state_dict
        text = f"{shown} belongs to another model or optimizer: {message_of(error)}"
        raise UsageError(text + (f" ({where})" if where else "")) from (error if where else None)
    loop.saved = saved
    threads = torch.get_num_threads()
    if device.type == "cpu" and saved_threads != threads:
        text = f"the checkpoint was saved with {counted(saved_threads, 'thread')}, this run uses {threads}"
        run.put(MarkEvent("warning", loop.step, f"{text}: losses may differ in the last digits"))


def _check_data(name: str, saved: Saved, state: dict[str, Any], loop: Loop) -> None:
    """Refuse to resume on other data or another order, where the saved position has no meaning."""
    now = loop.state()
    words = {
        "items": "training items",
        "effective_batch": "items in a step (effective batch)",
        "seed": "run.seed",
        "data_crc": "the contents of the data (checksum)",
        "order": "the order of the data",
    }
    changed = [
        f"{text} was {state[key]}, now {now[key]}" for key, text in words.items() if state[key] != now[key]
    ]
    if not changed and (why := cannot_load(loop.batches, state["position"])) is not None:
        changed.append(why)
    if changed:
        raise UsageError(f"cannot resume {name} from {saved.path.name}: {'; '.join(changed)}")


def _run_event(run: OpenRun, machine: Machine, loop: Loop) -> RunEvent:
    config, stepper, saved, gpu = loop.config, loop.stepper, loop.saved, machine.chosen
    own = loop.batches.own_order
    workload = stepper.workload
    return RunEvent(
        name=run.directory.name,
        workload=config.workload.name,
        config=config.model_dump(mode="json"),
        pid=os.getpid(),
        host=socket.gethostname(),
        device=machine.device,
        device_name=gpu.name if gpu is not None else machine.host.cpu,
        gpu=gpu.to_dict() if gpu is not None else None,
        versions=versions(),
        parameters=parameter_count(stepper.model),
        precision=stepper.precision.name,
        item=workload.item,
        token=workload.token,
        tokens_per_item=workload.tokens_per_item,
        items_per_step=config.items_per_step,
        items_per_epoch=loop.batches.items_per_epoch or 0,
        steps_per_epoch=loop.steps_per_epoch,
        epochs=-(-loop.total_steps // loop.steps_per_epoch)
        if loop.steps_per_epoch
        else config.run.epochs or 0,
        total_steps=0 if loop.total_steps == UNKNOWN_STEPS else loop.total_steps,
        model=workload.describe_model(),
        data=workload.describe_data(),
        threads=torch.get_num_threads(),
        usable_cores=machine.host.usable_cpus,
        resumed_step=loop.step if saved is not None else None,
        resumed_from=saved.path.name if saved is not None else None,
        resumed_epoch=None if saved is None or own is None else own.passes,
        alternatives=dict(workload.alternatives),
    )


def versions() -> dict[str, str]:
    """Versions needed to reproduce the run."""
    found = {
        "ndd": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }
    return found | ({"cuda": torch.version.cuda} if torch.version.cuda else {})
