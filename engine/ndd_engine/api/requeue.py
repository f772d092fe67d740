"""`--resume-or-start`: what the same command does with a run that may exist already, for jobs that are requeued."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from ndd_engine.config import Config, Draft, anywhere, read
from ndd_engine.errors import ConfigError, RunLockedError, UsageError
from ndd_engine.record.file import load_state
from ndd_engine.record.rundir import RunDir, bare
from ndd_engine.record.state import RunState
from ndd_engine.text import number, printable
from ndd_engine.train.request import RunRequest
from ndd_engine.trial.outcome import differences

# Keys that a resumed run keeps from its record, whatever the command names.
_KEPT = frozenset({"run.name", "workload.path"})


@dataclass(frozen=True)
class Decision:
    """What to do: a request, or None if the run has finished. text: the same in a line."""

    request: RunRequest | None
    text: str


def resume_or_start(request: RunRequest) -> Decision:
    """Start the run that the request names, resume it, or prepare it again; nothing if it has finished.

    A run that exists resumes with its recorded configuration and what the request changes in it. Raises UsageError
    (RunLockedError if another process writes the run).
    """
    draft = request.draft
    name = draft.run_name
    if name is None:
        raise UsageError("--resume-or-start needs the name of the run: add --run NAME")
    draft.resolve()  # also checks the name
    run = RunDir(request.root / name)
    if not os.path.lexists(run.path):
        return Decision(request, f"run {name} does not exist: it starts")
    if (owner := run.live_owner()) is not None:
        raise RunLockedError(
            f"run {name} is being written by process {owner['pid']} on {owner['host']}; "
            f"watch it with: ndd-console attach {name}"
        )
    if not (run.exists or bare(run)):
        raise UsageError(f"{printable(str(run.path))} exists and is not a run; choose another name")
    state = load_state(run)
    if not list(_steps(run)) or not run.config.exists():
        lost = f" at step {number(state.step)}" if state.step else ""
        text = f"run {name} ended{lost} before its first checkpoint: it starts again"
        return Decision(replace(request, restart=run), text)
    recorded = read(run.config)
    before = recorded.resolve()
    changed = _changed(before, draft)
    merged = replace(recorded, layers=(*recorded.layers, ("--resume-or-start", _table(changed))))
    if _finished(run, state, merged.resolve()):
        text = f"run {name} has finished at step {number(state.step)}: there is nothing to do"
        if changed:
            text += f"; ignored changes of the configuration: {_listed(changed)}"
        return Decision(None, text)
    text = f"run {name} resumes from its latest checkpoint"
    if changed:
        text += f", with a changed configuration: {_listed(changed)}"
    return Decision(replace(request, draft=merged, resume=run), text)


def changes_text(run: RunDir, draft: Draft) -> str:
    """What a resume changes in the configuration of its run: "optimizer.lr 0.001 -> 0.01".

    "" for nothing, and for a configuration that is not valid: preflight says why.
    """
    try:
        return _listed(_changed(read(run.config).resolve(), draft))
    except ConfigError:
        return ""


def _listed(changed: dict[str, tuple[Any, Any]]) -> str:
    return printable(
        ", ".join(f"{key} {_shown(old)} -> {_shown(new)}" for key, (old, new) in changed.items())
    )


def _changed(before: Config, draft: Draft) -> dict[str, tuple[Any, Any]]:
    """What the command changes in the recorded configuration. Size "auto" stays what it was resolved to."""
    if draft.size == "auto" and draft.auto:
        memories = (None, *(float(tier["min_gb"]) for tier in draft.profile.get("gpus", ())))
        size = getattr(before.workload, "size", None)
        found = min((_apart(before, draft.resolve(size, memory)) for memory in memories), key=len)
        if draft.resolve(size).run.threads is None:
            found.pop("run.threads", None)  # chosen with the size
        return found
    return _apart(before, draft.resolve())


def _apart(before: Config, now: Config) -> dict[str, tuple[Any, Any]]:
    found = differences(before, anywhere(now))
    return {key: values for key, values in found.items() if key not in _KEPT}


def _table(changed: dict[str, tuple[Any, Any]]) -> dict[str, Any]:
    """The new values as a layer of a configuration."""
    table: dict[str, Any] = {}
    for key, (_, new) in changed.items():
        *sections, last = key.split(".")
        inner = table
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[last] = new
    if (table.get("batch") or {}).get("effective") is not None:
        table["batch"].pop("accumulation", None)  # follows from effective
    return table


def _finished(run: RunDir, state: RunState, config: Config) -> bool:
    if state.run is None:
        return False
    limits = (config.run.max_steps, (config.run.epochs or 0) * (state.run.steps_per_epoch or 0))
    limit = min(filter(None, limits), default=None)
    if state.status == "done" and (limit is None or limit == state.run.total_steps):
        return True  # also a run that stopped early by itself
    return limit is not None and max(_steps(run), default=0) >= limit


def _steps(run: RunDir) -> Iterable[int]:
    """Steps of the checkpoints, without importing torch."""
    for path in run.checkpoints.glob("step-*/manifest.json"):
        digits = path.parent.stem.removeprefix("step-")
        if digits.isdecimal():
            yield int(digits)


def _shown(value: Any) -> str:
    return "not set" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
