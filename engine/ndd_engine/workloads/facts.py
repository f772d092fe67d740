"""The size of a configuration's data and the errors in it, without importing torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ndd_engine.config.schema import Config
from ndd_engine.config.workload_sections import (
    AntispoofSection,
    ChartextSection,
    FinetuneSection,
    NddSection,
    OwnSection,
    SummariseSection,
)
from ndd_engine.errors import ConfigError, Problem

from . import antispoof_data, eeg_data, finetune_data, own_module, summarise_data, text_data
from .problems import Problems, Progress
from .windows import DataFacts

_READERS: dict[type, Callable[[Config, Any, Problems, Progress], Any]] = {
    AntispoofSection: antispoof_data.read_recordings,
    ChartextSection: text_data.read_characters,
    FinetuneSection: finetune_data.read_documents,
    NddSection: eeg_data.read_eeg,
    SummariseSection: summarise_data.read_pairs,
}


def facts(config: Config) -> DataFacts | None:
    """The facts of the configured data; None for your own workload. Raises ConfigError with every error."""
    problems = Problems("workload")
    data = read_data(config, problems)
    if problems.found:
        raise ConfigError(problems.found)
    return None if data is None else data.facts()


def problems(config: Config, where: str) -> list[Problem]:
    """Every error in the configured data, each with `where` as its origin; [] if it can be trained on."""
    collected = Problems(where)
    read_data(config, collected)
    return collected.found


def read_data(config: Config, problems: Problems, progress: Progress = lambda _: None) -> Any:
    """The data of a built-in workload; None after adding to `problems`, and for your own workload."""
    section = config.workload
    if isinstance(section, OwnSection):
        own_module.check(section, problems)
        return None
    return _READERS[type(section)](config, section, problems, progress)
