"""Builds the configured workload, its data and its model, on the CPU."""

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
from ndd_engine.errors import ConfigError

from . import antispoof, chartext, finetune, ndd, own, summarise
from .base import Workload
from .problems import Problems, Progress

_PREPARE: dict[type, Callable[[Config, Any, Problems, Progress], Workload | None]] = {
    AntispoofSection: antispoof.prepare,
    ChartextSection: chartext.prepare,
    FinetuneSection: finetune.prepare,
    NddSection: ndd.prepare,
    SummariseSection: summarise.prepare,
    OwnSection: own.prepare,
}


def prepare(config: Config, progress: Progress | None = None) -> Workload:
    """Model and datasets on the CPU. Raises ConfigError with every error in the data.

    The weights come from torch's global generator, which the caller seeds; synthetic data comes from a separate
    generator seeded with run.seed. `progress` is called with short texts to show.
    """
    problems = Problems("workload")
    section = config.workload
    workload = _PREPARE[type(section)](config, section, problems, progress or (lambda _: None))
    if workload is None or problems.found:
        raise ConfigError(problems.found)
    return workload
