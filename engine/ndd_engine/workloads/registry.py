"""Builds the configured workload: its data and its model, on the processor."""

from __future__ import annotations

from collections.abc import Callable

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
from .windows import Complaints


def prepare(config: Config, progress: Callable[[str], None] | None = None) -> Workload:
    """Model and datasets on the processor. Raises ConfigError with every mistake in the data.

    The weights are drawn from torch's global generator, which the caller seeds before; made-up data comes
    from a generator of its own, seeded with run.seed. `progress` is told short texts on the way.
    """
    tell = progress or (lambda _: None)
    complaints = Complaints("workload")
    section = config.workload
    workload: Workload | None
    match section:
        case AntispoofSection():
            workload = antispoof.prepare(config, section, complaints, tell)
        case ChartextSection():
            workload = chartext.prepare(config, section, complaints, tell)
        case FinetuneSection():
            workload = finetune.prepare(config, section, complaints, tell)
        case NddSection():
            workload = ndd.prepare(config, section, complaints, tell)
        case SummariseSection():
            workload = summarise.prepare(config, section, complaints, tell)
        case OwnSection():
            workload = own.prepare(config, section, complaints, tell)
    if workload is None or complaints.problems:
        raise ConfigError(complaints.problems)
    return workload
