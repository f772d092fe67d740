"""`ndd-console check`."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ndd_console.words.machine import advice, busy_cores, check_facts
from ndd_engine.config import Draft, read
from ndd_engine.errors import EXIT_DONE, EXIT_MACHINE, EXIT_USAGE, ConfigError, NddError, Problem
from ndd_engine.hardware.gpus import GpuProfile
from ndd_engine.hardware.named_gpus import GIVEN, gpu_named
from ndd_engine.train.request import preflight

from .options import command, configuration, json_option
from .printing import say, show

if TYPE_CHECKING:
    from ndd_engine.predict.budget import Plan

# Figures of the prediction, and what its memory and its plan for a budget say of themselves, in JSON.
_FIGURES = (
    "parameters", "nearest", "available_bytes", "fits", "retries", "step_s", "step_measured", "steps_per_epoch",
    "total_steps", "epoch_s", "total_s", "step_range_s",
)  # fmt: skip
_OF_MEMORY = ("source", "reliable", "why_not")
_OF_PLAN = ("peak_bytes", "levels", "blocks", "slower", "refused", "why")


@command(
    "0 no problems, 2 usage or configuration error, 3 insufficient memory or hardware",
    "check run.toml",
    "check --set batch.micro=512 --set precision.amp=bf16",
    'check run.toml --gpu "RTX 4070"',
)
@configuration
@click.option(
    "--gpu",
    metavar="NAME",
    help="Predict for a GPU that is not in this machine, by its profile or by figures such as "
    f"{GIVEN}. No step runs.",
)
@json_option
def check(
    config: Path | None, workload: str | None, sets: tuple[str, ...], gpu: str | None, as_json: bool
) -> int:
    """Runs a few small training steps. Writes no files."""
    absent = None if gpu is None else gpu_named(gpu)
    try:
        draft = read(config, sets if absent is None else (*sets, "run.device=auto"), workload)
        # Keep stdout clean of what a user's own workload prints.
        with contextlib.redirect_stdout(sys.stderr):
            try:
                preflight(draft)
            except ConfigError as error:
                raise ConfigError([*error.problems, *of_factory(draft, error)]) from None
            report = examine(draft, absent)
    except ConfigError as error:
        if not as_json:
            raise
        show({"ok": False, "problems": [asdict(problem) for problem in error.problems]})
        return EXIT_USAGE
    show(report if as_json else [check_facts(report)])
    return EXIT_MACHINE if report["fits"] is False else EXIT_DONE


def _plan(plan: Plan, limit_bytes: int | None) -> dict[str, Any]:
    """What memory.budget asks for."""
    known = {name: getattr(plan, name) for name in _OF_PLAN}
    return {"limit_bytes": limit_bytes, "found": plan.memory is not None, **known}


def of_factory(draft: Draft, error: ConfigError) -> list[Problem]:
    """The mistakes in an own workload besides those in the configuration, so that all are reported at once.

    [] if its section is among those, since the factory would see other values.
    """
    config = draft.salvage()
    sections = {problem.key.partition(".")[0] for problem in error.problems}
    if config is None or ":" not in config.workload.name or "workload" in sections:
        return []
    from ndd_engine.workloads.factory_data import prepare

    known = {problem.key for problem in error.problems}
    try:
        with draft.locating():
            prepare(config, lambda text: say(f"{text} …"))
    except ConfigError as more:
        return [problem for problem in more.problems if not problem.key or problem.key not in known]
    except NddError:
        pass  # reported once the configuration is valid
    return []


def examine(draft: Draft, gpu: GpuProfile | None = None) -> dict[str, Any]:
    """The report on a valid configuration: data, device, size, memory, time, advice. gpu: not in this machine."""
    say("importing torch …")
    from ndd_engine.predict.outlook import predict, predict_for
    from ndd_engine.workloads.base import item_count

    told: set[str] = set()

    def tell(text: str) -> None:
        """Each stage once: every model size that is probed goes through the same ones."""
        if text not in told:
            told.add(text)
            say(f"{text} …")

    found = predict(draft, tell) if gpu is None else predict_for(draft, gpu, tell)
    prediction, machine, workload, choice = found[:4]
    estimate, micro = prediction.estimate, prediction.config.batch.micro
    config = prediction.config
    return {
        "ok": True,
        "problems": [],
        "workload": config.workload.name,
        "device": machine.device,
        "device_reason": machine.reasons.get("device", ""),
        "size": config.workload.size,
        "size_reason": choice.reason if choice else "as configured",
        "data": found.data,
        "train_items": found.items,
        "eval_items": item_count(workload.eval_data),
        "model": workload.describe_model(),
        "micro_batch": config.batch.micro,
        "effective_batch": config.items_per_step,
        "ranks": config.parallel.ranks,
        "strategy": config.parallel.strategy if config.parallel.ranks > 1 else None,
        "sharded": None if prediction.sharded is None else asdict(prediction.sharded),
        "predicted_bytes": prediction.parts,
        **{f"memory_{name}": getattr(prediction.memory, name) for name in _OF_MEMORY},
        "ways": [asdict(way) for way in prediction.ways],
        "budget": None if prediction.plan is None else _plan(prediction.plan, prediction.available_bytes),
        "bytes_without_retries": prediction.fit.roomy_bytes,
        **{name: getattr(prediction, name) for name in _FIGURES},
        "decides": None if estimate is None else estimate.decides(micro, prediction.config.loader.workers),
        "step_doubt": prediction.time.doubt,
        "busy": None if prediction.busy is None else busy_cores(prediction.busy),
        "notes": list(workload.notes()),
        "advice": list(advice(config, machine.host, machine.device, prediction.steps_per_epoch)),
    }
