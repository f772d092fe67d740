"""What a configuration's data holds, and every mistake in it, without importing torch."""

from __future__ import annotations

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
from .windows import Complaints, DataFacts


def facts(config: Config) -> DataFacts | None:
    """The facts of the configured data; None for a user's own. Raises ConfigError with every mistake."""
    complaints = Complaints("workload")
    found = _read(config, complaints)
    if complaints.problems:
        raise ConfigError(complaints.problems)
    return found


def problems(config: Config, where: str) -> list[Problem]:
    """Every mistake of the configured data; [] when it can be trained on. `where` goes into each."""
    complaints = Complaints(where)
    _read(config, complaints)
    return complaints.problems


def _read(config: Config, complaints: Complaints) -> DataFacts | None:
    section = config.workload
    data: (
        antispoof_data.SpeechData | text_data.TextData | finetune_data.DocumentData | eeg_data.EegData
        | summarise_data.PairData | None
    )  # fmt: skip
    match section:
        case AntispoofSection():
            data = antispoof_data.read(config, section, complaints)
        case ChartextSection():
            data = text_data.read(config, section, complaints)
        case FinetuneSection():
            data = finetune_data.read(config, section, complaints)
        case NddSection():
            data = eeg_data.read(config, section, complaints)
        case SummariseSection():
            data = summarise_data.read(config, section, complaints)
        case OwnSection():
            own_module.check(section, complaints)
            return None
    return None if data is None else data.facts()
