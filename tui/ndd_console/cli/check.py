"""`ndd-console check`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ndd_engine.config import Config, Draft, read
from ndd_engine.errors import EXIT_DONE, EXIT_MACHINE, EXIT_USAGE, ConfigError, NddError, Problem
from ndd_engine.hardware.host import Host
from ndd_engine.record.derive import others_text
from ndd_engine.record.snapshot import CoreUse
from ndd_engine.text import duration, number, printable, size
from ndd_engine.train.preflight import preflight

from .options import command, configuration, json_option
from .printing import say, show

FEW_STEPS = 10
_TIMES = ("step_s", "step_measured", "steps_per_epoch", "total_steps", "epoch_s", "total_s")


@command(
    "0 no problems, 2 usage or configuration error, 3 insufficient memory or hardware",
    "check run.toml",
    "check --set batch.micro=512 --set precision.amp=bf16",
)
@configuration
@json_option
def check(config: Path | None, workload: str | None, sets: tuple[str, ...], as_json: bool) -> int:
    """Check a configuration, its data and this machine, and predict memory and step time.

    Runs a few small training steps. Writes no files.
    """
    try:
        draft = read(config, sets, workload)
        # Keep stdout clean of what a user's own workload prints.
        with contextlib.redirect_stdout(sys.stderr):
            try:
                preflight(draft)
            except ConfigError as error:
                raise ConfigError([*error.problems, *of_factory(draft, error)]) from None
            report = examine(draft)
    except ConfigError as error:
        if not as_json:
            raise
        show({"ok": False, "problems": [asdict(problem) for problem in error.problems]})
        return EXIT_USAGE
    show(report if as_json else (f"{label:<9}{text}" for label, text in describe(report)))
    return EXIT_MACHINE if report["fits"] is False else EXIT_DONE


def of_factory(draft: Draft, error: ConfigError) -> list[Problem]:
    """The mistakes in an own workload besides those in the configuration, so that all are reported at once.

    [] if its section is among those, since the factory would see other values.
    """
    config = draft.salvage()
    sections = {problem.key.partition(".")[0] for problem in error.problems}
    if config is None or ":" not in config.workload.name or "workload" in sections:
        return []
    from ndd_engine.workloads.registry import prepare

    known = {problem.key for problem in error.problems}
    try:
        with draft.locating():
            prepare(config, lambda text: say(f"{text} …"))
    except ConfigError as more:
        return [problem for problem in more.problems if not problem.key or problem.key not in known]
    except NddError:
        pass  # reported once the configuration is valid
    return []


def examine(draft: Draft) -> dict[str, Any]:
    """The report on a valid configuration: data, device, size, memory, time, advice."""
    say("importing torch …")
    from ndd_engine.predict.configured import predict
    from ndd_engine.workloads.order import item_count

    found, machine, workload, choice = predict(draft, lambda text: say(f"{text} …"))
    config = found.config
    return {
        "ok": True,
        "problems": [],
        "workload": config.workload.name,
        "device": machine.device,
        "device_reason": machine.reasons.get("device", ""),
        "size": config.workload.size,
        "size_reason": choice.reason if choice else "as configured",
        "data": workload.describe_data(),
        "train_items": item_count(workload.train_data),
        "eval_items": item_count(workload.eval_data),
        "model": workload.describe_model(),
        "parameters": found.parameters,
        "micro_batch": config.batch.micro,
        "effective_batch": config.items_per_step,
        "ranks": config.parallel.ranks,
        "strategy": config.parallel.strategy if config.parallel.ranks > 1 else None,
        "sharded": None if found.sharded is None else asdict(found.sharded),
        "predicted_bytes": found.parts,
        "memory_source": found.memory.source,
        "memory_reliable": found.memory.reliable,
        "memory_why_not": found.memory.why_not,
        "nearest": found.nearest,
        "available_bytes": found.available_bytes,
        "fits": found.fits,
        "retries": found.retries,
        "bytes_without_retries": found.fit.roomy_bytes,
        **{name: getattr(found, name) for name in _TIMES},
        "step_doubt": found.time.doubt,
        "busy": None if found.busy is None else busy_cores(found.busy),
        "notes": list(workload.notes()),
        "advice": list(advice(config, machine.host, machine.device, found.steps_per_epoch)),
    }


def advice(config: Config, host: Host, device: str, steps_per_epoch: int | None) -> Iterator[str]:
    """Warnings about settings that are valid but probably unintended."""
    loader, amp = config.loader, config.precision.amp
    if loader.workers > host.usable_cpus:
        yield f"loader.workers = {loader.workers} exceeds the {host.usable_cpus:g} cores this process can use"
    if loader.pin_memory and device == "cpu":
        yield "loader.pin_memory has no effect without a CUDA GPU"
    if device == "cpu" and (amp == "fp16" or (amp == "bf16" and not host.bf16_units)):
        yield f"precision.amp = {amp}: this CPU has no {amp} instructions; measure the effect with ndd-console try"
    saved = config.checkpoint
    if not (saved.every_epochs or saved.every_steps or saved.every_minutes):
        yield "no checkpoint is saved before the end: a crash loses the whole run"
    if not (config.evaluate.every_epochs or config.evaluate.every_steps):
        yield "no evaluation runs before the end"
    if steps_per_epoch is not None and steps_per_epoch < FEW_STEPS:
        plural = "s" if steps_per_epoch > 1 else ""
        yield (
            f"an epoch has only {steps_per_epoch} step{plural} of {config.items_per_step} items; "
            "a smaller effective batch gives more updates"
        )


def busy_cores(use: CoreUse) -> dict[str, Any]:
    """The cores that this process and others used while steps were timed, and in words."""
    names = "pid", "name", "cores"
    return {
        "text": f"while steps were timed, {others_text(use, 'used')}; check again when they have ended",
        "cores": use.usable,
        "used_by_steps": use.own,
        "used_by_others": use.others,
        "processes": [dict(zip(names, each, strict=True)) for each in use.neighbours],
    }


def retries_in_words(retries: int, roomy_bytes: int) -> str:
    """What it means that a configuration fits with retries."""
    plural = "y" if retries == 1 else "ies"
    return (
        f"{retries} allocator retr{plural} in the first steps: cached memory is released and allocated again, "
        f"which costs time; {size(roomy_bytes)} would avoid that"
    )


def sharding_in_words(report: dict[str, Any]) -> str:
    """What does not fit, and what sharding the model would need."""
    sharded, device = report["sharded"], "GPU" if report["device"].startswith("cuda") else "rank"
    with_ddp = " with DDP" if report["ranks"] > 1 else ""
    needed = f"{size(report['predicted_bytes']['total'])} of {size(report['available_bytes'])}"
    text = f"does not fit one {device}{with_ddp}: {needed}; "
    found = f"with FSDP2 on {sharded['ranks']} ranks {size(sharded['peak_bytes'])} each"
    if not sharded["fits"]:
        return f"{text}{found} do not fit either"
    return f"{text}{found}: --set parallel.ranks={sharded['ranks']} --set parallel.strategy=fsdp2"


def describe(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The report as (label, text)."""
    memory, micro = report["predicted_bytes"], report["micro_batch"]
    fits = {True: "fits", False: "DOES NOT FIT", None: "available memory unknown"}[report["fits"]]
    if report["retries"]:
        fits += ", with retries"
    step = "measured" if report["step_measured"] else f"extrapolated from micro-batches smaller than {micro}"
    yield "config", "no problems"
    yield "data", printable(report["data"])
    yield "device", f"{report['device']} ({printable(report['device_reason'])})"
    yield "model", f"{number(report['parameters'])} parameters ({printable(report['model'])})"
    if report["size"]:
        yield "size", f"{report['size']} ({printable(report['size_reason'])})"
    parts = ", ".join(f"{name} {size(count)}" for name, count in memory.items() if name != "total" and count)
    available = size(report["available_bytes"])
    where = f"for each of {report['ranks']} ranks" if report["ranks"] > 1 else "available"
    yield "memory", f"predicted {size(memory['total'])} of {available} {where}, {fits}: {parts}"
    yield "", f"from {report['memory_source']}"
    if not report["memory_reliable"]:
        yield (
            "",
            f"low confidence: {report['memory_why_not']}; measure it with: ndd-console wizard, or train a few steps",
        )
    if report["sharded"] is not None:
        yield "", sharding_in_words(report)
    if report["retries"]:
        yield "", retries_in_words(report["retries"], report["bytes_without_retries"])
    if report["nearest"] is not None:
        micro, times = report["nearest"]
        what = "same effective batch" + (", no retries" if report["retries"] else "")
        yield "fits", f"--set batch.micro={micro} --set batch.accumulation={times} ({what})"
    if report["ranks"] > 1:
        step += "; without the time to exchange gradients"
    yield "step", f"{duration(report['step_s'])} for {report['effective_batch']} items ({step})"
    if report["busy"]:
        yield "", f"low confidence: {report['busy']['text']}"
    if report["step_doubt"]:
        yield "", f"low confidence: {report['step_doubt']}"
    if report["epoch_s"] is None:
        known = report["total_s"] is not None
        total = (
            f"{duration(report['total_s'])} total ({number(report['total_steps'])} steps), "
            if known
            else "n/a: "
        )
        yield "time", f"{'predicted ' * known}{total}the length of the training data is unknown"
    else:
        yield (
            "time",
            f"predicted {duration(report['epoch_s'])} per epoch ({number(report['steps_per_epoch'])} steps), "
            f"{duration(report['total_s'])} total ({number(report['total_steps'])} steps), "
            "without evaluation and checkpoints",
        )
    yield from (("note", printable(text)) for text in report["notes"])
    yield from (("advice", text) for text in report["advice"])
