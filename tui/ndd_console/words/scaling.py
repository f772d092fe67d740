"""Measurements with several numbers of ranks, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from ndd_engine.record.events import Finding, checker
from ndd_engine.text import MISSING, duration, number, percent, plural, size, span

from .blocks import Block, Table, Text
from .finding import verdict

if TYPE_CHECKING:
    from ndd_engine.trial.scaling import ScalingRow, ScalingState

# Findings that are shown for each number of ranks.
_MOST_FINDINGS = 2


def scaling_blocks(state: ScalingState, name: str) -> Iterator[Block]:
    """name: of the run or the configuration, for the commands."""
    from ndd_engine.trial.scaling import in_words

    if state.failed:
        yield Text(state.failed, "bad")
    yield Text(state.batch_text)
    rows = tuple((row.point.name, *_figures(row)) for row in state.rows)
    unit = next((row.facts["unit"] for row in state.rows if row.facts.get("unit")), "item")
    columns = ("", "step", f"{plural(unit)}/s", "of linear", "exchange", "skew", "memory")
    yield Table("", columns, rows, frozenset(range(1, len(columns))))
    for row in state.rows:
        if row.text and not state.failed:
            yield Text(row.text)
            yield from (Text(f"  {line}") for line in in_words(row.lost))
            for finding in list(row.facts.get("findings") or ())[:_MOST_FINDINGS]:
                yield verdict(checker(Finding).validate_python(finding), name)


def _figures(row: ScalingRow) -> tuple[str, ...]:
    facts = row.facts
    rate, efficiency = facts.get("items_per_s"), row.efficiency
    share = MISSING
    if row.first is None:
        share = "" if rate is not None else MISSING
    elif efficiency is not None:
        value, low, high = efficiency
        share = f"{percent(value)} ({low * 100:.0f} to {high * 100:.0f})"
    parts: Mapping[str, float] = facts.get("parts_ns") or {}
    alone = row.point.ranks == 1
    spans = (span(parts[name]) if name in parts else MISSING for name in ("exchange", "skew"))
    exchanged = ("", "") if alone else tuple(spans)
    return duration(facts.get("step_s")), number(rate), share, *exchanged, size(facts.get("peak_bytes"))
