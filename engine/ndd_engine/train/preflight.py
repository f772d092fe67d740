"""What can be refused before anything is written: the configuration, its data, a resume that is none."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from ndd_engine.config import Config, Draft
from ndd_engine.errors import ConfigError, MachineError, Problem, UsageError
from ndd_engine.hardware.detect import detect
from ndd_engine.record.state import RunState
from ndd_engine.text import printable
from ndd_engine.workloads.facts import problems

from . import scalars

# What a resume may change of a workload without becoming another model or other data.
MAY_CHANGE = frozenset({"size", "data", "dropout", "path"})


def preflight(draft: Draft, use_torch: bool = True) -> Config:
    """Every mistake that shows before anything is prepared, at once. Raises ConfigError.

    use_torch: may import torch when a CUDA card is named. Not before a fork: CUDA does not survive one.
    """
    found: list[Problem] = []
    config: Config | None
    try:
        config = draft.resolve()
    except ConfigError as error:
        found += error.problems
        config = draft.salvage()
    if config is not None:
        wrong = {problem.key for problem in found}  # which fell back to their defaults for this look
        for problem in problems(config, ""):
            if problem.key in wrong:
                continue
            found.append(replace(problem, where=draft.where(problem.key.split("."))))
        if config.log.trace is not None and (why := trace_problem(config.log.trace)) is not None:
            found.append(draft.problem(("log", "trace"), why, config.log.trace))
        if config.log.tensorboard and not scalars.available():
            found.append(draft.problem(("log", "tensorboard"), scalars.MISSING, True))
        if config.run.device.startswith("cuda"):
            try:
                detect(config.run.device, use_torch=use_torch)
            except MachineError as error:
                found.append(draft.problem(("run", "device"), str(error), config.run.device))
    if found:
        raise ConfigError(found)
    assert config is not None
    return config


def trace_problem(path: str) -> str | None:
    """Why a trace cannot be written to this path; None when it can. Leaves nothing behind."""
    target = Path(path).expanduser()
    if target.is_dir():
        return "is a folder; name a file in it"
    if not target.parent.is_dir():
        return f"cannot be written: there is no folder {printable(str(target.parent))}"
    try:
        with tempfile.TemporaryFile(dir=target.parent):
            return None
    except OSError as error:
        return f"cannot be written: {error.strerror or error}"


def check_resume(name: str, state: RunState, config: Config, from_step: int | None) -> None:
    """Refuse what cannot be a continuation of the recorded run, before its record is touched. Raises UsageError."""
    run = state.run
    if run is None:
        return  # it never got as far; the checkpoint, if any, is checked when it is loaded
    changed = []
    if run.workload != config.workload.name:
        changed.append(f"workload.name was {run.workload}, now {config.workload.name}")
    if run.items_per_step != config.batch.items:
        changed.append(f"batch.micro x batch.accumulation was {run.items_per_step}, now {config.batch.items}")
    if (seed := run.config["run"]["seed"]) != config.run.seed:
        changed.append(f"run.seed was {seed}, now {config.run.seed}")
    before, now = run.config["workload"], config.workload.model_dump(mode="json")
    changed += [
        f"workload.{key} was {before.get(key)}, now {value}"
        for key, value in now.items()
        if key not in MAY_CHANGE and key != "name" and before.get(key) != value
    ]
    for section, key in (("batch", "sequence"), ("optimizer", "name")):
        value = getattr(getattr(config, section), key)
        if run.config[section][key] != value:
            changed.append(f"{section}.{key} was {run.config[section][key]}, now {value}")
    if changed:
        raise UsageError(
            f"run {name} cannot go on so: {'; '.join(changed)}; start a new run for a change of these"
        )
    limits = [
        limit for limit in (config.run.max_steps, (config.run.epochs or 0) * run.steps_per_epoch) if limit
    ]
    if from_step is None and state.status == "done" and state.step >= min(limits):
        grown = "--set run.epochs" if config.run.max_steps is None else "--max-steps"
        raise UsageError(f"run {name} has done all {state.step} steps; to go further, raise {grown}")
