"""The result of tuning in words: what was tried, what it gained, and what was kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ndd_engine.text import MISSING, size

from .blocks import Block, Table, Text
from .trial import ratio_text

if TYPE_CHECKING:
    from ndd_engine.trial.tuning import TuningState


def tuning_blocks(state: TuningState) -> Iterator[Block]:
    """The settings that were measured as a table, those that were not, and the result in a sentence."""
    from ndd_engine.trial.tuning import NOT_ASKED

    rows = tuple(
        (
            row.candidate.title, ratio_text(row.trial, MISSING),
            ratio_text(row.to_start, MISSING) if row.to_start else "",
            size(row.trial.change.get("peak_bytes")) if row.trial else MISSING,
            row.trial.loss if row.trial else MISSING, f"{row.state}: {row.reason}",
        )
        for row in state.rows
        if row.state in ("kept", "dropped")
    )  # fmt: skip
    if rows:
        yield Table("", ("setting", "vs. best so far", "vs. baseline", "peak memory", "losses", ""), rows)
    for row in state.rows:
        if row.state == "skipped" and row.reason != NOT_ASKED:
            yield Text(f"not tried: {row.candidate.title}: {row.reason}")
    yield Text(state.text)
