"""What in a run's configuration is not the default of its workload."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from ndd_engine.config import read
from ndd_engine.errors import ConfigError
from ndd_engine.record.events import RunEvent
from ndd_engine.text import MISSING

# The name of a run is no setting; `path` is where an own workload was looked for.
_LEFT_OUT = frozenset({"run.name", "workload.path"})


def differences(run: RunEvent) -> tuple[tuple[str, str, str], ...] | str:
    """(key, value in this run, default) of every key that differs, in the order of the configuration.

    The defaults are those of the workload at its own size. A text instead says why there are none to compare with.
    """
    try:
        defaults = read(workload=run.workload).resolve(_size(run.config)).model_dump(mode="json")
    except ConfigError as error:
        return str(error).splitlines()[0]
    base = dict(_flat(defaults))
    return tuple(
        (key, _word(value), _word(base[key]) if key in base else MISSING)
        for key, value in _flat(run.config)
        if key not in _LEFT_OUT and (key not in base or base[key] != value)
    )


def _size(config: dict[str, Any]) -> str | None:
    workload = config.get("workload")
    found = workload.get("size") if isinstance(workload, dict) else None
    return found if isinstance(found, str) else None


def _flat(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _word(value: object) -> str:
    """As in TOML; a value that is decided when the run is prepared has none."""
    return "unset" if value is None else json.dumps(value, ensure_ascii=False)
