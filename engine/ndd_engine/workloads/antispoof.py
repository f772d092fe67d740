"""Placeholder."""

from __future__ import annotations

from collections.abc import Callable

from ndd_engine.config.schema import Config
from ndd_engine.config.workload_sections import AntispoofSection

from .base import Workload
from .windows import Complaints


def prepare(
    config: Config, section: AntispoofSection, complaints: Complaints, tell: Callable[[str], None]
) -> Workload | None:
    complaints.add("workload.name", "not there yet")
    return None
