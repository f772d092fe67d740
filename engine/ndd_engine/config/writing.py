"""Writes a configuration as TOML with a comment for each key, or only what differs from the defaults."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomlkit
from pydantic import BaseModel
from tomlkit import items

from ndd_engine.errors import ConfigError
from ndd_engine.text import printable

from .loading import read
from .schema import Config


def to_toml(config: Config, heading: str = "", reasons: Mapping[str, str] | None = None) -> str:
    """The configuration as commented TOML; `read` returns an equal configuration from it.

    heading: comment lines at the top. reasons: dotted key -> why a value was chosen, shown instead of its description.
    A key that is not set appears as a comment.
    """
    document = tomlkit.document()
    for line in heading.splitlines():
        document.add(tomlkit.comment(printable(line)) if line else tomlkit.nl())
    for section in type(config).model_fields:
        model: BaseModel = getattr(config, section)
        document.add(tomlkit.nl())
        document.add(section, _table(section, model, reasons or {}))
    return tomlkit.dumps(document)


def _table(section: str, model: BaseModel, reasons: Mapping[str, str]) -> items.Table:
    table = tomlkit.table()
    for key, info in type(model).model_fields.items():
        value = getattr(model, key)
        comment = printable(reasons.get(f"{section}.{key}", info.description or ""))
        if section == "batch" and key == "accumulation" and getattr(model, "effective", None) is not None:
            table.add(tomlkit.comment(f"{key} follows from effective and micro: {value}"))
            continue
        if value is None:
            table.add(tomlkit.comment(f"{key} is not set: {comment}"))
            continue
        item = tomlkit.item(value)
        if comment:
            item.comment(comment)
        table.add(key, item)
    return table


# A key that is set changes the defaults of others (a size, a preset), which may then have to be overridden.
_PASSES = 5
_PATHS = frozenset({"workload.data", "log.trace"})


def changed_toml(config: Config, heading: str = "", reasons: Mapping[str, str] | None = None) -> str:
    """TOML from which `read` returns an equal configuration, without the keys that have their default anyway.

    heading: comment lines at the top. reasons: dotted key -> why it has its value; these keys are always written, with
    the reason as a comment, and the others with the default as a comment.
    """
    why = reasons or {}
    values = _values(config, why)
    document = tomlkit.document()
    for line in heading.splitlines():
        document.add(tomlkit.comment(printable(line)) if line else tomlkit.nl())
    plain = _defaults({"workload": {"name": config.workload.name}})
    for section in type(config).model_fields:
        if section not in values:
            continue
        table = tomlkit.table()
        for key in type(getattr(config, section)).model_fields:
            if key not in values[section]:
                continue
            item = tomlkit.item(values[section][key])
            if comment := printable(why.get(f"{section}.{key}", "")) or _default_comment(plain, section, key):
                item.comment(comment)
            table.add(key, item)
        document.add(tomlkit.nl())
        document.add(section, table)
    return tomlkit.dumps(document)


def _values(config: Config, reasons: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """The tables to write."""
    values: dict[str, dict[str, Any]] = {"workload": {"name": config.workload.name}}
    # Names what other defaults follow from; the limits of the run are required of your own workload.
    first = ("workload.size", "run.preset", "run.epochs", "run.max_steps")
    # An effective batch is valid with some micro-batches only.
    batch = () if config.batch.effective is None else ("batch.micro", "batch.effective")
    for name in (*first, *batch, *reasons):
        section, _, key = name.partition(".")
        value = getattr(getattr(config, section, None), key, None)
        if value is not None and not (name == "batch.accumulation" and config.batch.effective is not None):
            values.setdefault(section, {})[key] = _written(section, key, value)
    for _ in range(_PASSES):
        now = _defaults(values)
        added = False
        for section in type(config).model_fields:
            model: BaseModel = getattr(config, section)
            for key in type(model).model_fields:
                value = getattr(model, key)
                if key in values.get(section, {}) or value is None or (section, key) == ("workload", "path"):
                    continue
                if (section, key) == ("batch", "accumulation") and config.batch.effective is not None:
                    continue
                if now is None or getattr(getattr(now, section), key, None) != value:
                    values.setdefault(section, {})[key] = _written(section, key, value)
                    added = True
        if not added:
            break
    for name in first[2:]:
        section, _, key = name.partition(".")
        _drop_default(values, section, key, config, name in reasons)
    if folders := _folders(config):
        values["workload"]["path"] = folders
    return values


def _drop_default(
    values: dict[str, dict[str, Any]], section: str, key: str, config: Config, keep: bool
) -> None:
    """Leave out a key again if the other ones give the same configuration."""
    if keep or key not in values.get(section, {}):
        return
    fewer = {
        name: {k: v for k, v in table.items() if (name, k) != (section, key)}
        for name, table in values.items()
    }
    found = _defaults(fewer)
    if found is not None and getattr(getattr(found, section), key) == getattr(getattr(config, section), key):
        del values[section][key]
        if not values[section]:
            del values[section]


def _defaults(values: dict[str, Any]) -> Config | None:
    """The configuration with these values and the defaults otherwise; None if it is not valid."""
    try:
        draft = read(overrides=values)
        return draft.resolve(draft.auto["candidates"][0] if draft.size == "auto" else None)
    except ConfigError:
        return None


def _folders(config: Config) -> list[str]:
    """The folders of the user's module besides the working directory, relative to it where they are below it."""
    here = Path.cwd()
    found = []
    for folder in getattr(config.workload, "path", ()):
        path = Path(folder)
        if path.absolute() != here:
            found.append(_relative(str(path)))
    return found


def _written(section: str, key: str, value: Any) -> Any:
    """The value as TOML; paths below the working directory are relative to it."""
    if f"{section}.{key}" in _PATHS and isinstance(value, str):
        return _relative(value)
    return [_written("", "", item) for item in value] if isinstance(value, (list, tuple)) else value


def _relative(path: str) -> str:
    here = Path.cwd()
    return (
        os.path.relpath(path, here) if Path(path).is_absolute() and Path(path).is_relative_to(here) else path
    )


def _default_comment(plain: Config | None, section: str, key: str) -> str:
    """ "default: 32", "" where that means nothing."""
    if plain is None or (section, key) in (("workload", "name"), ("workload", "size"), ("workload", "path")):
        return ""
    value = getattr(getattr(plain, section), key, None)
    return "default: not set" if value is None else f"default: {json.dumps(value, default=str)}"
