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
from .problems import Problems
from .windows import DataFacts

_READERS: dict[type, Callable[[Config, Any, Problems], Any]] = {
    AntispoofSection: antispoof_data.read_recordings,
    ChartextSection: text_data.read_characters,
    FinetuneSection: finetune_data.read_documents,
    NddSection: eeg_data.read_eeg,
    SummariseSection: summarise_data.read_pairs,
}


def facts(config: Config) -> DataFacts | None:
    """The facts of the configured data; None for your own workload. Raises ConfigError with every error."""
    problems = Problems("workload")
    found = _read(config, problems)
    if problems.found:
        raise ConfigError(problems.found)
    return found


def problems(config: Config, where: str) -> list[Problem]:
    """Every error in the configured data, each with `where` as its origin; [] if it can be trained on."""
    collected = Problems(where)
    _read(config, collected)
    return collected.found


def _read(config: Config, problems: Problems) -> DataFacts | None:
    section = config.workload
    if isinstance(section, OwnSection):
        own_module.check(section, problems)
        return None
    data = _READERS[type(section)](config, section, problems)
    return None if data is None else data.facts()
