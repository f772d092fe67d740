"""The diagnosis page: every finding with its evidence, and the measurements that the rules use."""

from __future__ import annotations

from ndd_console.render.rows import block_rows
from ndd_console.words.diagnosis import DiagnosisResult, diagnosis_blocks
from ndd_engine.record.snapshot import Snapshot

from .style import Row


def diagnosis_lines(
    snapshot: Snapshot, result: DiagnosisResult, name: str, can_try: bool, width: int
) -> list[Row]:
    """The findings, then the measurements. name: of the run, for the commands."""
    return block_rows(diagnosis_blocks(snapshot, result, name, can_try), width)
