"""The configuration values of a run that differ from the defaults of its workload."""

from __future__ import annotations

import json

from ndd_engine.config import read
from ndd_engine.errors import ConfigError
from ndd_engine.record.events import RunEvent
from ndd_engine.text import MISSING
from ndd_engine.trial.outcome import flatten

# The name of a run is not a setting; `path` is where your own workload was found.
_LEFT_OUT = frozenset({"run.name", "workload.path"})


def differences(run: RunEvent) -> tuple[tuple[str, str, str], ...] | str:
    """(key, value in this run, default) of every key that differs, in the order of the configuration.

    The defaults are those of the workload at its size; one without a default length has that of the run. Returns a
    text instead if they cannot be read.
    """
    workload = run.config.get("workload")
    size = workload.get("size") if isinstance(workload, dict) else None
    size = size if isinstance(size, str) else None
    try:
        try:
            defaults = read(workload=run.workload).resolve(size)
        except ConfigError:
            own = run.config.get("run")
            length = {
                key: own[key] for key in ("epochs", "max_steps") if isinstance(own, dict) and own.get(key)
            }
            defaults = read(workload=run.workload, overrides={"run": length}).resolve(size)
    except ConfigError as error:
        return str(error).splitlines()[0]
    base = flatten(defaults.model_dump(mode="json"))
    return tuple(
        (key, _toml(value), _toml(base[key]) if key in base else MISSING)
        for key, value in flatten(run.config).items()
        if key not in _LEFT_OUT and (key not in base or base[key] != value)
    )


def _toml(value: object) -> str:
    """The value as in TOML; None is a value that is chosen when the run is prepared."""
    return "unset" if value is None else json.dumps(value, ensure_ascii=False)
