"""What the functions of the API accept: configurations, values on top, names of runs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import tomlkit
from tomlkit.exceptions import ConvertError

from ndd_engine.config import Draft, read
from ndd_engine.config.loading import COMMAND_LINE
from ndd_engine.errors import ConfigError, Problem, UsageError
from ndd_engine.record.rundir import RunDir, find_run, runs_root
from ndd_engine.text import printable
from ndd_engine.trial.outcome import Base

PathLike: TypeAlias = "str | os.PathLike[str]"
Source: TypeAlias = "PathLike | Mapping[str, Any] | None"
Sets: TypeAlias = "str | Sequence[str] | Mapping[str, Any]"


def root_of(runs: PathLike | None) -> Path:
    """The folder of the runs; None for $NDD_RUNS, otherwise ./runs."""
    return runs_root(None if runs is None else Path(runs))


def configured_run(root: Path, name: PathLike) -> RunDir:
    """The run with this name or path. Raises UsageError when there is none, or when it has no configuration yet."""
    found = find_run(root, os.fspath(name))
    if found.command.exists():
        raise UsageError(
            f"run {found.name} is one of a script, which is only observed: start it again with ndd-console run"
        )
    if not found.config.exists():
        raise UsageError(f"run {found.name} has no config.toml: it ended before training began")
    return found


def baseline_of(baseline: Source, workload: str | None, root: Path) -> Base:
    """The baseline of a trial: a mapping, a TOML file that exists, otherwise a run. Raises UsageError."""
    if baseline is None or isinstance(baseline, Mapping):
        name = f"the workload {workload}" if workload else "the defaults"
        return Base(
            name if baseline is None else "the configuration", None, workload, strings(baseline or {})
        )
    path = Path(baseline)
    if path.is_file():
        return Base(str(path), path, workload)
    if path.suffix == ".toml":
        raise UsageError(f"{printable(str(path))}: no such file")
    if workload is not None:
        raise UsageError(f"run {printable(path.name)} already has a workload, which cannot be changed")
    run = find_run(root, os.fspath(baseline))
    if run.command.exists():
        return Base(f"run {run.name}", run=run)  # of a script
    return Base.of_run(configured_run(root, baseline))


def draft_of(
    config: Source, sets: Sets, workload: str | None, overrides: dict[str, Any] | None = None
) -> Draft:
    """The configuration, with mistakes in mappings and `sets` reported as "config". Raises ConfigError."""
    path, values = (None, config) if config is None or isinstance(config, Mapping) else (Path(config), {})
    names = {COMMAND_LINE: "config"}
    try:
        draft = read(path, (*strings(values or {}), *strings(sets, "sets")), workload, overrides)
    except ConfigError as error:
        found = (
            replace(problem, where=names.get(problem.where, problem.where)) for problem in error.problems
        )
        raise ConfigError(list(found)) from None
    return replace(draft, layers=tuple((names.get(where, where), layer) for where, layer in draft.layers))


def strings(values: Sets, where: str = "config") -> tuple[str, ...]:
    """As "section.key=value" with the value in TOML; nested mappings are flattened. Raises ConfigError."""
    if isinstance(values, str):
        return (values,)
    if not isinstance(values, Mapping):
        return tuple(values)
    found: list[str] = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            found += strings({f"{key}.{name}": item for name, item in value.items()}, where)
        else:
            try:
                plain = os.fspath(value) if isinstance(value, os.PathLike) else value
                found.append(f"{key}={'none' if plain is None else tomlkit.item(plain).as_string()}")
            except (ConvertError, TypeError, ValueError):
                kind = f"{value!r} ({type(value).__name__})"
                allowed = "a boolean, a number, a string or a list of them"
                raise ConfigError(
                    [Problem(where, str(key), "has no form in TOML", printable(kind), allowed)]
                ) from None
    return tuple(found)
