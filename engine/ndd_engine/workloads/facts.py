"""The size of a configuration's data and the errors in it, without importing torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ndd_engine.config.schema import Config
from ndd_engine.config.workload_sections import OwnSection
from ndd_engine.errors import ConfigError, Problem

from . import antispoof_data, eeg_data, finetune_data, own_module, summarise_data, text_data
from .problems import Problems, Progress
from .windows import DataFacts

_READERS: dict[str, Callable[[Config, Any, Problems, Progress], Any]] = {
    "antispoof": antispoof_data.read_recordings,
    "chartext": text_data.read_characters,
    "finetune": finetune_data.read_documents,
    "eeg": eeg_data.read_eeg,
    "summarise": summarise_data.read_pairs,
}


def facts(config: Config) -> DataFacts | None:
    """The facts of the configured data; None for your own workload. Raises ConfigError with every error."""
    data = read_data(config)
    return None if data is None else data.facts()


def problems(config: Config, where: str) -> list[Problem]:
    """Every error in the configured data, each with `where` as its origin; [] if it can be trained on."""
    try:
        read_data(config, where=where)
    except ConfigError as error:
        return list(error.problems)
    return []


def read_data(config: Config, progress: Progress = lambda _: None, where: str = "workload") -> Any:
    """The data of a built-in workload; None for your own. Raises ConfigError with every error."""
    section = config.workload
    if isinstance(section, OwnSection):
        own_module.check(section, where)
        return None
    return _READERS[section.name](config, section, Problems(where, section.data), progress)
