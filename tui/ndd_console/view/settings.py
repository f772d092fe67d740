"""The settings page: requested and applied values, whether they are in effect, and the work per step."""

from __future__ import annotations

from ndd_console.render.rows import block_rows
from ndd_console.words.blocks import Block, Text
from ndd_console.words.settings import settings_table
from ndd_console.words.step import work_facts
from ndd_engine.record.snapshot import Snapshot

from .style import Row


def settings_lines(snapshot: Snapshot, width: int) -> list[Row]:
    """Settings that are not in effect first, defaults last; then the work per step."""
    table = settings_table(snapshot.settings)
    blocks: list[Block] = [table if table.rows else Text("No setting was applied yet.", "note")]
    if snapshot.work is not None:
        blocks.append(work_facts(snapshot, snapshot.work))
    return block_rows(blocks, width)
