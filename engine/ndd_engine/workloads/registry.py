"""Builds the configured workload, its data and its model, on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ndd_engine.config.schema import Config
from ndd_engine.config.workload_sections import OwnSection

from . import own
from .antispoof import Antispoof
from .base import Workload
from .chartext import Chartext
from .eeg import Eeg
from .facts import read_data
from .finetune import Finetune
from .problems import Progress
from .summarise import Summarise

_BUILDERS: dict[str, Callable[[Config, Any, Any, Progress], Workload]] = {
    "antispoof": Antispoof,
    "chartext": Chartext,
    "finetune": Finetune,
    "eeg": Eeg,
    "summarise": Summarise,
}


def prepare(config: Config, progress: Progress = lambda _: None) -> Workload:
    """Model and datasets on the CPU. Raises ConfigError with every error in the data.

    The weights come from torch's global generator, which the caller seeds; synthetic data comes from a separate
    generator seeded with run.seed. `progress` is called with short texts to show.
    """
    data, section = read_data(config, progress), config.workload
    if isinstance(section, OwnSection):
        return own.prepare(config, section, progress)
    return _BUILDERS[section.name](config, section, data, progress)
