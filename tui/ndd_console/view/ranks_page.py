"""The page of the ranks: the parts of a step, the slowest ranks with their phases, and a heat map."""

from __future__ import annotations

from ndd_console.render.rows import block_rows
from ndd_console.words.blocks import Text
from ndd_console.words.ranks import ranks_facts, slowest
from ndd_engine.record.snapshot import Snapshot

from .ranks import heat_map
from .rows import BLANK
from .style import Row

_HEAT = 12  # rows of the heat map


def ranks_lines(snapshot: Snapshot, width: int) -> list[Row]:
    """All lines of the page."""
    ranks = snapshot.ranks
    if ranks is None:
        return block_rows([Text("This run has one rank.", "note")], width)
    lines = block_rows([ranks_facts(snapshot, ranks), slowest(ranks.newest)], width)
    return [*lines, BLANK, *heat_map(ranks, width, _HEAT)] if ranks.newest.cells else lines
