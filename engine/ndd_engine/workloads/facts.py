"""What a configuration's data holds, and every mistake in it, without importing torch."""

from __future__ import annotations

from dataclasses import dataclass

from ndd_engine.config.schema import ChartextSection, Config
from ndd_engine.errors import ConfigError, Problem

from . import eeg_data, text_data
from .windows import Complaints


@dataclass(frozen=True)
class DataFacts:
    """Items of one pass and what they are called. text: one line for people."""

    train_items: int
    eval_items: int
    tokens_per_item: int
    item: str
    token: str
    text: str


def facts(config: Config) -> DataFacts:
    """The facts of the configured data. Raises ConfigError with every mistake."""
    complaints = Complaints("workload")
    data = _read(config, complaints)
    if data is None or complaints.problems:
        raise ConfigError(complaints.problems)
    layout = data.layout
    return DataFacts(
        layout.train_items, layout.eval_items, layout.sequence, "window", layout.unit, data.line()
    )


def problems(config: Config, where: str) -> list[Problem]:
    """Every mistake of the configured data; [] when it can be trained on. `where` goes into each."""
    complaints = Complaints(where)
    _read(config, complaints)
    return complaints.problems


def _read(config: Config, complaints: Complaints) -> text_data.TextData | eeg_data.EegData | None:
    section = config.workload
    if isinstance(section, ChartextSection):
        return text_data.read(config, section, complaints)
    return eeg_data.read(config, section, complaints)
