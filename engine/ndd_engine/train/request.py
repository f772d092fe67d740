"""The request for a run, and the part of a run that preparation uses."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ndd_engine.config import Config, Draft
from ndd_engine.errors import ConfigError, MachineError, Problem, UsageError
from ndd_engine.files import expanded, write_problem
from ndd_engine.hardware.detect import Nvml, detect
from ndd_engine.record.events import Event, Json, RunEvent, StageEvent
from ndd_engine.record.rundir import RunDir
from ndd_engine.record.state import RunState
from ndd_engine.run.control import Control, StopNow
from ndd_engine.workloads.interface import problems

from . import loggers

if TYPE_CHECKING:
    from .parallel.rank_place import OtherRanks


@dataclass(frozen=True)
class RunRequest:
    """What to run.

    root: the folder of all runs. resume: continue this run; from_step: from that checkpoint instead of the newest one.
    restart: begin again in the folder of this run, which ended before its first checkpoint.
    probes: measure the cost of a micro-batch before training and look for findings. Processes whose findings nobody
    reads leave this out.
    """

    draft: Draft
    root: Path
    resume: RunDir | None = None
    from_step: int | None = None
    probes: bool = True
    restart: RunDir | None = None


@dataclass(frozen=True)
class OpenRun:
    """The part of an open run that preparation and the loop use. ranks: None for a run of one process."""

    request: RunRequest
    ranks: OtherRanks | None
    directory: RunDir
    control: Control
    put: Callable[[Event], None]

    def stage(self, text: str, name: str = "prepare") -> None:
        """Report what is being prepared. Raises StopNow once the run was asked to stop."""
        self.put(StageEvent(name, text))
        if self.control.stopping:
            raise StopNow


CUDA_DRIVER: str | None = "libcuda.so.1"

# Workload keys that a resume may change: they change neither the model nor the data.
MAY_CHANGE = frozenset({"size", "data", "dropout", "path"})


def preflight(draft: Draft, use_torch: bool = True) -> Config:
    """Report every mistake that can be found before preparation. Raises ConfigError with all of them.

    use_torch: allow importing torch if a CUDA GPU is requested. Not before a fork: CUDA does not survive it. Where the
    driver has no NVML (some virtual machines, WSL2), a requested GPU is then checked when torch is there.
    """
    found: list[Problem] = []
    try:
        config: Config | None = draft.resolve()
    except ConfigError as error:
        found += error.problems
        config = draft.salvage()
    if config is not None:
        wrong = {problem.key for problem in found}  # they were replaced by their defaults for this check
        more = [problem for problem in problems(config, "") if problem.key not in wrong]
        found += [replace(problem, where=draft.where(problem.key.split("."))) for problem in more]
        if config.log.trace is not None and (why := write_problem(expanded(config.log.trace))):
            found.append(draft.problem(("log", "trace"), why, config.log.trace))
        found += [
            draft.problem(("log", key), text, value) for key, value, text in loggers.missing(config.log)
        ]
        if config.run.device.startswith("cuda") and (use_torch or not _only_torch_knows()):
            try:
                detect(config.run.device, use_torch=use_torch)
            except MachineError as error:
                found.append(draft.problem(("run", "device"), str(error), config.run.device))
    if found:
        raise ConfigError(found)
    assert config is not None
    return config


def _only_torch_knows() -> bool:
    """Whether there is a driver for CUDA, and no NVML."""
    nvml = Nvml()
    try:
        if nvml.open():
            return False
    finally:
        nvml.close()
    with contextlib.suppress(OSError):
        ctypes.CDLL(CUDA_DRIVER)  # this initialises nothing
        return True
    return False


def check_resume(name: str, state: RunState, config: Config, from_step: int | None) -> None:
    """Refuse to resume with another workload, model or data, before the record changes. Raises UsageError."""
    run = state.run
    if run is None:
        return  # the run ended during preparation; a checkpoint, if any, is checked when it is loaded
    changed = []
    if run.workload != config.workload.name:
        changed.append(f"workload.name was {run.workload}, now {config.workload.name}")
    if run.items_per_step != config.items_per_step:
        product = "batch.micro x batch.accumulation x parallel.ranks"
        changed.append(f"{product} was {run.items_per_step}, now {config.items_per_step}")
    if (seed := _section(run, "run").get("seed")) != config.run.seed:
        changed.append(f"run.seed was {seed}, now {config.run.seed}")
    before, now = _section(run, "workload"), config.workload.model_dump(mode="json")
    changed += [
        f"workload.{key} was {before.get(key)}, now {value}"
        for key, value in now.items()
        if key not in MAY_CHANGE and key != "name" and before.get(key) != value
    ]
    for section, key in (("batch", "sequence"), ("optimizer", "name"), ("optimizer", "decay")):
        value = getattr(getattr(config, section), key)
        was = _section(run, section).get(key)
        if was != value:
            changed.append(f"{section}.{key} was {was}, now {value}")
    if changed:
        raise UsageError(f"cannot resume {name}: {'; '.join(changed)}; start a new run to change these")
    limits = (config.run.max_steps, (config.run.epochs or 0) * run.steps_per_epoch)
    # Without a limit in steps, the length of the data is unknown: the checkpoint says how many passes are done.
    least = min(filter(None, limits), default=None)
    if from_step is None and state.status == "done" and least is not None and state.step >= least:
        grown = "--set run.epochs" if config.run.max_steps is None else "--max-steps"
        raise UsageError(f"run {name} has finished all {state.step:,} steps; to train longer, raise {grown}")


def _section(run: RunEvent, name: str) -> Json:
    """A section of the recorded configuration; empty if the record lacks it."""
    found = run.config.get(name)
    return found if isinstance(found, dict) else {}
