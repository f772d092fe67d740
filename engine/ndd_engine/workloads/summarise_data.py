"""Placeholder."""

from __future__ import annotations

from ndd_engine.config.schema import Config
from ndd_engine.config.workload_sections import SummariseSection

from .windows import Complaints, DataFacts


class PairData:
    def facts(self) -> DataFacts:
        raise NotImplementedError


def read(config: Config, section: SummariseSection, complaints: Complaints) -> PairData | None:
    complaints.add("workload.name", "not there yet")
    return None
