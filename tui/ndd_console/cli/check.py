"""`ndd-console check`: validates a configuration and predicts memory and time of its run."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Sized
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import click

from ndd_engine.config import Config, Draft, read
from ndd_engine.config.workload_sections import OwnSection
from ndd_engine.errors import (
    EXIT_DONE,
    EXIT_MACHINE,
    EXIT_USAGE,
    ConfigError,
    MachineError,
    NddError,
    TrainingError,
)
from ndd_engine.hardware.host import Host
from ndd_engine.text import duration, number, printable, size
from ndd_engine.train.preflight import preflight
from ndd_engine.workloads.own_module import place, said

from .options import configuration

FEW_STEPS = 10


@click.command()
@configuration
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def check(config: Path | None, workload: str | None, sets: tuple[str, ...], as_json: bool) -> int:
    """Check a configuration and its data, and estimate memory and time of a step. Does not write files."""
    try:
        draft = read(config, sets, workload)
        preflight(draft)
        # Keep stdout clean of what a user's own workload prints.
        with contextlib.redirect_stdout(sys.stderr):
            report = examine(draft, lambda text: click.echo(f"{text} …", err=True))
    except ConfigError as error:
        if not as_json:
            raise
        problems = [asdict(problem) for problem in error.problems]
        click.echo(json.dumps({"ok": False, "problems": problems}, indent=2))
        return EXIT_USAGE
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        for line in describe(report):
            click.echo(line)
    return EXIT_MACHINE if report["fits"] is False else EXIT_DONE


def examine(draft: Draft, progress: Any) -> dict[str, Any]:
    """The report on a valid configuration: data, device, size, memory, time, advice."""
    progress("importing torch")
    import torch

    from ndd_engine.hardware.detect import detect
    from ndd_engine.measure.memory import is_out_of_memory
    from ndd_engine.predict.outlook import outlook
    from ndd_engine.train.failures import smaller_batch
    from ndd_engine.train.prepare import seed
    from ndd_engine.train.probes.autosize import decide
    from ndd_engine.workloads.registry import prepare

    machine = detect(draft.resolve().run.device)
    device = torch.device(machine.device)
    config, choice = decide(draft, machine, progress)
    seed(config.run.seed)
    workload = prepare(config, progress)
    try:
        found = outlook(config, workload, device, machine.free_bytes, progress)
    except NddError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise MachineError(f"out of memory in a test step on {device}; {smaller_batch(config)}") from None
        if not isinstance(config.workload, OwnSection):
            raise
        # An error in the user's model, not in this program.
        raise TrainingError(
            f"{place(error) or config.workload.name}: a step failed: {said(error)}"
        ) from error
    return {
        "ok": True,
        "problems": [],
        "workload": config.workload.name,
        "device": machine.device,
        "device_reason": machine.reasons.get("device", ""),
        "size": config.workload.size,
        "size_reason": choice.reason if choice else "as configured",
        "data": workload.describe_data(),
        "train_items": len(cast(Sized, workload.train_data)),
        "eval_items": len(cast(Sized, workload.eval_data)),
        "model": workload.describe_model(),
        "parameters": found.parameters,
        "micro_batch": config.batch.micro,
        "effective_batch": config.batch.items,
        "predicted_bytes": found.parts,
        "memory_source": found.memory.source,
        "memory_reliable": found.memory.reliable,
        "memory_why_not": found.memory.why_not,
        "nearest": found.nearest if found.fits is False else None,
        "available_bytes": found.available_bytes,
        "fits": found.fits,
        "step_s": found.step_s,
        "step_measured": found.step_measured,
        "steps_per_epoch": found.steps_per_epoch,
        "total_steps": found.total_steps,
        "epoch_s": found.epoch_s,
        "total_s": found.total_s,
        "notes": list(workload.notes()),
        "advice": [
            *advice(config, machine.host, machine.device),
            *few_steps(found.steps_per_epoch, config.batch.items),
        ],
    }


def advice(config: Config, host: Host, device: str) -> list[str]:
    """Warnings about settings that are valid but probably unintended."""
    found = []
    if config.loader.workers > host.usable_cpus:
        found.append(
            f"loader.workers = {config.loader.workers} exceeds the {host.usable_cpus:g} cores this process can use"
        )
    if config.loader.pin_memory and device == "cpu":
        found.append("loader.pin_memory has no effect without a CUDA GPU")
    amp = config.precision.amp
    if device == "cpu" and (amp == "fp16" or (amp == "bf16" and not host.bf16_units)):
        found.append(
            f"precision.amp = {amp}: this CPU has no {amp} instructions; measure the effect with ndd-console try"
        )
    if not (
        config.checkpoint.every_epochs or config.checkpoint.every_steps or config.checkpoint.every_minutes
    ):
        found.append("no checkpoint is saved before the end: a crash loses the whole run")
    if not (config.evaluate.every_epochs or config.evaluate.every_steps):
        found.append("no evaluation runs before the end")
    return found


def few_steps(steps: int, items: int) -> list[str]:
    """A warning if an epoch has too few optimizer steps."""
    if steps >= FEW_STEPS:
        return []
    plural = "s" if steps > 1 else ""
    return [
        f"an epoch has only {steps} step{plural} of {items} items; a smaller effective batch gives more updates"
    ]


def describe(report: dict[str, Any]) -> list[str]:
    """The report as text."""
    memory = report["predicted_bytes"]
    fits = {True: "fits", False: "DOES NOT FIT", None: "available memory unknown"}[report["fits"]]
    step = (
        "measured"
        if report["step_measured"]
        else f"extrapolated from micro-batches smaller than {report['micro_batch']}"
    )
    lines = [
        _line("config", "no problems"),
        _line("data", printable(report["data"])),
        _line("device", f"{report['device']} ({printable(report['device_reason'])})"),
        _line("model", f"{number(report['parameters'])} parameters ({printable(report['model'])})"),
    ]
    if report["size"]:
        lines.append(_line("size", f"{report['size']} ({printable(report['size_reason'])})"))
    parts = ", ".join(f"{name} {size(count)}" for name, count in memory.items() if name != "total" and count)
    available = size(report["available_bytes"])
    lines.append(
        _line("memory", f"predicted {size(memory['total'])} of {available} available, {fits}: {parts}")
    )
    lines.append(_line("", f"from {report['memory_source']}"))
    if not report["memory_reliable"]:
        lines.append(_line("", f"low confidence: {report['memory_why_not']}"))
    if report["nearest"] is not None:
        micro, times = report["nearest"]
        lines.append(
            _line(
                "fits", f"--set batch.micro={micro} --set batch.accumulation={times} (same effective batch)"
            )
        )
    lines += [
        _line("step", f"{duration(report['step_s'])} for {report['effective_batch']} items ({step})"),
        _line(
            "time",
            f"predicted {duration(report['epoch_s'])} per epoch ({number(report['steps_per_epoch'])} steps), "
            f"{duration(report['total_s'])} total ({number(report['total_steps'])} steps), "
            "without evaluation and checkpoints",
        ),
    ]
    lines += [_line("note", printable(text)) for text in report["notes"]]
    lines += [_line("advice", text) for text in report["advice"]]
    return lines


def _line(label: str, text: str) -> str:
    return f"{label:<9}{text}"
