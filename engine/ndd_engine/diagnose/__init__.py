"""Names what holds a run back: pure rules, a Snapshot in and Findings out. Imports no torch."""

from __future__ import annotations

from .finding import CAUSES, Change, Evidence, Finding
from .rules import diagnose

__all__ = ["CAUSES", "Change", "Evidence", "Finding", "diagnose"]
