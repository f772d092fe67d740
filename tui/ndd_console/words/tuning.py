"""Tuning in words: what was tried, what it gained, and what was kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ndd_engine.text import size

from .blocks import Block, Table, Text
from .trial import ratio_text

if TYPE_CHECKING:
    from ndd_engine.trial.tuning import TuningRow, TuningState

COLUMNS = ("state", "setting", "vs. best so far", "vs. baseline", "memory", "losses", "why")


def setting_texts(row: TuningRow) -> tuple[str, ...]:
    """The cells of a setting; those that say nothing are ""."""
    trial, figures = row.trial, ("", "", "", "")
    if trial is not None and trial.ratio is not None:
        losses = "n/a" if trial.loss == "not comparable" else trial.loss
        memory = size(trial.change.get("peak_bytes"))
        figures = (ratio_text(trial), ratio_text(row.to_start), memory, losses)
    return (
        row.state,
        row.candidate.title,
        *figures,
        row.reason or (trial.verdict if trial is not None else ""),
    )


def tuning_blocks(state: TuningState) -> Iterator[Block]:
    """The settings that were asked for, and the result in a sentence."""
    from ndd_engine.trial.tuning import NOT_ASKED

    rows = tuple(setting_texts(row) for row in state.rows if row.reason != NOT_ASKED)
    if rows:
        yield Table("", COLUMNS, rows)
    yield Text(state.text)
