"""Placeholder."""

from __future__ import annotations

from ndd_engine.config.schema import Config
from ndd_engine.config.workload_sections import FinetuneSection

from .windows import Complaints, DataFacts


class DocumentData:
    def facts(self) -> DataFacts:
        raise NotImplementedError


def read(config: Config, section: FinetuneSection, complaints: Complaints) -> DocumentData | None:
    complaints.add("workload.name", "not there yet")
    return None
