"""The size of a configuration's data and the mistakes in it, without importing torch."""

from __future__ import annotations

import importlib

from ndd_engine.config.schema import Config
from ndd_engine.errors import ConfigError, Problem

from . import own_module
from .interface import Facts, Settings


def facts(config: Config, where: str = "workload") -> Facts | None:
    """The facts of the configured data; None if only the factory knows them. Raises ConfigError with every error."""
    section = config.workload
    if ":" in section.name:
        own_module.check(section, where)
        return None
    found: Facts = (
        importlib.import_module(f"{__package__}.{section.name}_data")
        .read(Settings.of(config, where=where))
        .facts
    )
    return found


def problems(config: Config, where: str) -> list[Problem]:
    """Every error in the configured data, each with `where` as its origin; [] if it can be trained on."""
    try:
        facts(config, where)
    except ConfigError as error:
        return list(error.problems)
    return []
