"""Prepares a run from a checked configuration: device, size, workload, loaders, checkpoint, hardware sampler."""

from __future__ import annotations

import gc
import os
import platform
import random
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ndd_engine import __version__
from ndd_engine.config import Config, anywhere, to_toml
from ndd_engine.errors import NddError, OutOfMemoryError, UsageError
from ndd_engine.hardware.detect import detect
from ndd_engine.hardware.gpu import Machine
from ndd_engine.hardware.host import usable_threads
from ndd_engine.hardware.sampler import Sampler
from ndd_engine.measure.clock import DevicePhaseClock, PhaseClock, TimingEvent
from ndd_engine.measure.flops import work_event
from ndd_engine.measure.memory import is_out_of_memory
from ndd_engine.record.events import LoaderEvent, MarkEvent, RunEvent
from ndd_engine.text import printable
from ndd_engine.train.data.loader import Batches, EvalBatches
from ndd_engine.train.data.probe import probe_loader
from ndd_engine.train.probes.autosize import decide
from ndd_engine.train.probes.baseline import Baseline
from ndd_engine.train.probes.rehearsal import Rehearsal, rehearse
from ndd_engine.train.step.stepper import Stepper
from ndd_engine.workloads.base import Workload, parameter_count
from ndd_engine.workloads.registry import prepare

from .checkpoint import CheckpointStore, Saved, newest_good
from .failures import out_of_memory
from .loop import Loop
from .random_state import restore_random_state
from .request import OpenRun
from .settings import VerifiedSettings


@dataclass
class Prepared:
    """A run that is ready to train, and what to stop afterwards."""

    config: Config
    device: torch.device
    clock: PhaseClock
    loop: Loop
    sampler: Sampler

    def close(self) -> None:
        """Stop the hardware sampler; loader workers end with the loop."""
        self.sampler.stop()


def prepare_run(run: OpenRun) -> Prepared:
    """Prepare the run and report each stage. Raises NddError."""
    draft = run.request.draft
    run.stage("detecting the hardware")
    machine = detect(draft.resolve().run.device)
    device = torch.device(machine.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    for problem in machine.problems:
        run.put(MarkEvent("warning", 0, problem))
    config, choice = decide(draft, machine, run.stage)
    config = anywhere(config)
    _determinism(config)

    run.stage("reading the data")
    seed(config.run.seed)
    workload = prepare(config, run.stage)
    batches = Batches(
        workload.train_data, config, workload.collate, workload.epochs_differ, device, run.stage
    )
    evaluation = EvalBatches(workload.eval_data, config, workload.collate, device, run.stage)
    steps_per_epoch = batches.per_epoch // config.batch.accumulation
    total = total_steps(config, steps_per_epoch)
    run.stage("moving the model to the device")
    stepper = Stepper(workload, config, device, total)
    clock = DevicePhaseClock(_timing_event) if device.type == "cuda" else PhaseClock()
    store = CheckpointStore(run.directory.checkpoints, config.checkpoint.keep)
    settings = VerifiedSettings(stepper, batches, evaluation)
    loop = Loop(config, stepper, batches, evaluation, clock, run.control, store, run.put, settings)

    saved = None
    if run.request.resume is not None:
        run.stage("loading the checkpoint")
        saved = _resume(run, loop, device)
        if loop.step >= total:
            raise UsageError(
                f"run {run.directory.name} has finished all {total} steps; to train longer, raise run.epochs"
            )
    run.stage("running a trial step")
    cores = usable_threads(machine.host) if run.request.probes else None
    rehearsal, loader_cost = _rehearse(stepper, batches, config, cores)
    try:
        write_config(
            run.directory.config, config, f"Run {run.directory.name}, as resolved for {machine.device}."
        )
    except OSError as error:
        raise NddError(f"cannot write {printable(str(run.directory.config))}: {error.strerror}") from None
    run.put(_run_event(run, config, machine, workload, stepper, loop, saved))
    if choice is not None:
        run.put(MarkEvent("choice", loop.step, choice.reason))
    for note in (*workload.notes(), *rehearsal.notes):
        run.put(MarkEvent("note", loop.step, note))
    if rehearsal.compile_s is not None:
        text = f"compiled in {rehearsal.compile_s:.1f} s ({config.speed.compile}), before the first step"
        data = {"seconds": rehearsal.compile_s, "mode": config.speed.compile}
        run.put(MarkEvent("compile", loop.step, text, data))
    if loader_cost is not None:
        run.put(loader_cost)
    if rehearsal.baseline is not None:
        run.put(rehearsal.baseline)
    for event in settings.of_model(rehearsal):
        run.put(event)
    if rehearsal.counter is not None:
        run.put(
            work_event(
                rehearsal.counter,
                stepper.model,
                config.batch.micro,
                config.batch.accumulation,
                config.clip.max_norm > 0,
                stepper.moment_bytes(),
                machine.chosen,
                stepper.precision.name,
            )
        )
    sampler = Sampler(machine.chosen, run.put, run_dir=run.directory.path)
    sampler.start()
    if device.type == "cuda":
        # Measure the peak of training steps only, without loading and moving the model.
        torch.cuda.reset_peak_memory_stats(device)
    # Objects that exist now live until the end: keep the garbage collector from scanning them.
    gc.collect()
    gc.freeze()
    return Prepared(config, device, clock, loop, sampler)


def _rehearse(
    stepper: Stepper, batches: Batches, config: Config, cores: int | None
) -> tuple[Rehearsal, LoaderEvent | None]:
    """Run the trial step and the loader probe, and stop timing sub-phases that are too expensive to time.

    cores: CPU cores for the probes, None to skip them. Raises OutOfMemoryError.
    """
    try:
        begin = time.perf_counter_ns()
        sample = batches.sample()
        cost = baseline = None
        if cores is not None:
            cost = probe_loader(batches, sample, time.perf_counter_ns() - begin)
            baseline = Baseline(batches.sample, cost.item_ns, cores)
        found = rehearse(stepper, sample, baseline)
    except Exception as error:
        if is_out_of_memory(error):
            text = out_of_memory(error, "in a trial step", config, stepper.device, stepper)
            raise OutOfMemoryError(text) from None
        raise
    if dropped := stepper.parts.keep_cheap(found.part_calls, found.micro_ns):
        found.notes.append(
            f"Not timed separately: {', '.join(dropped)} in forward, because timing would slow down a micro-batch of "
            f"{found.micro_ns / 1e6:.2g} ms."
        )
    return found, cost


def seed(value: int) -> None:
    """Seed torch's and Python's random generators."""
    torch.manual_seed(value)
    random.seed(value)


def total_steps(config: Config, steps_per_epoch: int) -> int:
    """Optimizer steps of the whole run: run.epochs or run.max_steps, whichever ends first."""
    limits = [config.run.max_steps] if config.run.max_steps is not None else []
    if config.run.epochs is not None:
        limits.append(config.run.epochs * steps_per_epoch)
    return min(limits)


def _timing_event() -> TimingEvent:
    event: TimingEvent = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    return event


def _determinism(config: Config) -> None:
    speed = config.speed
    torch.backends.cudnn.benchmark = speed.cudnn_benchmark
    torch.backends.cudnn.deterministic = speed.deterministic
    if speed.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(speed.deterministic)


def _resume(run: OpenRun, loop: Loop, device: torch.device) -> Saved:
    store = loop.store
    saved, state = newest_good(store, run.request.from_step)
    _check_data(run.directory.name, saved, state, loop)
    try:
        loop.stepper.load(state)
    except (RuntimeError, ValueError, KeyError) as error:
        first = printable(str(error).splitlines()[0])
        raise UsageError(
            f"{printable(str(saved.path))} belongs to another model or optimizer: {first}"
        ) from None
    restore_random_state(state["random"], device)
    loop.step = int(state["step"])
    loop.saved = saved
    if device.type == "cpu" and state["threads"] != torch.get_num_threads():
        run.put(
            MarkEvent(
                "warning",
                loop.step,
                f"the checkpoint was saved with {state['threads']} threads, this run uses {torch.get_num_threads()}: "
                "losses may differ in the last digits",
            )
        )
    return saved


def _check_data(name: str, saved: Saved, state: dict[str, Any], loop: Loop) -> None:
    """Refuse to resume on other data or another order, where the saved position has no meaning."""
    now = loop.state()
    words = {
        "items": "training items",
        "effective_batch": "items in a step (effective batch)",
        "seed": "run.seed",
        "data_crc": "the contents of the data (checksum)",
    }
    changed = [
        f"{text} was {state[key]}, now {now[key]}"
        for key, text in words.items()
        if state.get(key) != now[key]
    ]
    if changed:
        raise UsageError(f"cannot resume {name} from {saved.path.name}: {'; '.join(changed)}")


def _run_event(
    run: OpenRun,
    config: Config,
    machine: Machine,
    workload: Workload,
    stepper: Stepper,
    loop: Loop,
    saved: Saved | None,
) -> RunEvent:
    threads = torch.get_num_threads()
    name = machine.chosen.name if machine.chosen is not None else machine.host.cpu
    return RunEvent(
        name=run.directory.name,
        workload=config.workload.name,
        config=config.model_dump(mode="json"),
        pid=os.getpid(),
        host=socket.gethostname(),
        device=machine.device,
        device_name=name,
        card=machine.chosen.to_dict() if machine.chosen is not None else None,
        versions=versions(),
        parameters=parameter_count(stepper.model),
        precision=stepper.precision.name,
        item=workload.item,
        token=workload.token,
        tokens_per_item=workload.tokens_per_item,
        items_per_step=config.batch.items,
        items_per_epoch=loop.steps_per_epoch * config.batch.items,
        steps_per_epoch=loop.steps_per_epoch,
        epochs=-(-loop.total_steps // loop.steps_per_epoch),
        total_steps=loop.total_steps,
        model=workload.describe_model(),
        data=workload.describe_data(),
        threads=threads,
        usable_cores=machine.host.usable_cpus,
        resumed_step=loop.step if saved is not None else None,
        resumed_from=saved.path.name if saved is not None else None,
    )


def versions() -> dict[str, str]:
    """Versions needed to reproduce the run."""
    found = {
        "ndd": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def write_config(path: Path, config: Config, heading: str) -> None:
    """Write the resolved configuration to the run's folder, completely or not at all. Raises OSError."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(to_toml(config, heading), encoding="utf-8")
    temporary.replace(path)
