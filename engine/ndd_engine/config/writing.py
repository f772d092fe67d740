"""Writes a configuration as TOML, with a comment for each key."""

from __future__ import annotations

from collections.abc import Mapping

import tomlkit
from pydantic import BaseModel
from tomlkit import items

from ndd_engine.text import printable

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
