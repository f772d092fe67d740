"""Placeholder."""

from __future__ import annotations

from ndd_engine.config.workload_sections import OwnSection

from .windows import Complaints


def check(section: OwnSection, complaints: Complaints) -> None:
    complaints.add("workload.name", "not there yet")
