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

from . import own
from .antispoof import Antispoof
from .base import Workload
from .chartext import Chartext
from .facts import read_data
from .finetune import Finetune
from .ndd import Ndd
from .problems import Problems, Progress
from .summarise import Summarise

_BUILDERS: dict[type, Callable[[Config, Any, Any, Progress], Workload]] = {
    AntispoofSection: Antispoof,
    ChartextSection: Chartext,
    FinetuneSection: Finetune,
    NddSection: Ndd,
    SummariseSection: Summarise,
}


def prepare(config: Config, progress: Progress = lambda _: None) -> Workload:
    """Model and datasets on the CPU. Raises ConfigError with every error in the data.

    The weights come from torch's global generator, which the caller seeds; synthetic data comes from a separate
    generator seeded with run.seed. `progress` is called with short texts to show.
    """
    problems = Problems("workload")
    section = config.workload
    workload: Workload | None = None
    if isinstance(section, OwnSection):
        workload = own.prepare(config, section, problems, progress)
    elif (data := read_data(config, problems, progress)) is not None:
        workload = _BUILDERS[type(section)](config, section, data, progress)
    if workload is None or problems.found:
        raise ConfigError(problems.found)
    return workload
