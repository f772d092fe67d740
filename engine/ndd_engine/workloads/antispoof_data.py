"""Placeholder."""

from __future__ import annotations

from ndd_engine.config.schema import Config
from ndd_engine.config.workload_sections import AntispoofSection

from .windows import Complaints, DataFacts


class SpeechData:
    def facts(self) -> DataFacts:
        raise NotImplementedError


def read(config: Config, section: AntispoofSection, complaints: Complaints) -> SpeechData | None:
    complaints.add("workload.name", "not there yet")
    return None
