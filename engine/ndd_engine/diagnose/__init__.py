"""Finds the bottleneck of a run: pure rules that turn a Snapshot into Findings. Imports no torch.

Phase shares are taken over the recent windows; rare events (evaluations, checkpoints, first batches, garbage
collections, compilations) over the whole run. A share counts when it is above 5 % and above two standard errors. A
rule that needs a signal that is missing (null) returns no finding. The page docs/diagnosis.md describes every cause.
"""

from __future__ import annotations

from .finding import CAUSES, ENDINGS, Change, Evidence, Finding
from .rules import diagnose

__all__ = ["CAUSES", "ENDINGS", "Change", "Evidence", "Finding", "diagnose"]
