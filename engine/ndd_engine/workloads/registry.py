"""Builds the configured workload: its data and its model, on the processor."""

from __future__ import annotations

from collections.abc import Callable

from ndd_engine.config.schema import ChartextSection, Config
from ndd_engine.errors import ConfigError

from . import chartext, eeg_data, ndd, text_data
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
    if isinstance(section, ChartextSection):
        tell(f"reading {text_data.source_name(section)}")
        text = text_data.read(config, section, complaints)
        if text is None:
            raise ConfigError(complaints.problems)
        tell("building the model")
        return chartext.Chartext(section, config.run.seed, text)
    tell("making the recording" if section.data == "builtin" else f"reading {section.data}")
    eeg = eeg_data.read(config, section, complaints)
    if eeg is None:
        raise ConfigError(complaints.problems)
    prepared = ndd.prepare_data(section, config.run.seed, eeg)
    tell("building the model")
    return ndd.Ndd(section, eeg, prepared)
