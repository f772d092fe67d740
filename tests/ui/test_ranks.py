"""What the screens show of several ranks, besides the pictures of test_snapshots.py and the words of tests/words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ndd_console.screens.pages import ranks_lines
from ndd_console.view.blocks import heat_map, panel
from ndd_console.view.live import LiveState, live_rows
from ndd_console.view.style import Row

from .fake_ranks import planted_snapshot
from .fakes import snapshot


def plain(rows: list[Row]) -> str:
    return "\n".join("".join(text for text, _ in row) for row in rows)


def test_ranks_that_are_only_a_part_of_those_launched_keep_their_numbers() -> None:
    ranks = planted_snapshot(64).ranks
    assert ranks is not None
    rows = plain(heat_map(replace(ranks, newest=replace(ranks.newest, launched=256, first_rank=64)), 28, 10))
    assert " 64 " in rows and " 0 " not in rows


def test_a_run_with_one_rank_shows_none_of_it() -> None:
    value = snapshot(False)
    assert "rank" not in plain(live_rows(value, LiveState("a", "training", (("d", "diagnosis"),)), 80, 24))
    assert "one rank" in plain(ranks_lines(value, 78))


def test_a_strange_record_is_shown_without_an_error() -> None:
    ranks = planted_snapshot(1024).ranks
    assert ranks is not None
    for change in (
        {"cells": "?x9", "cell_ranks": 0},
        {"hosts": 0, "world": 1 << 40},
        {"rows_us": {"x": [1.0], "7": []}, "row_names": ["own"], "world": 2},
        {"columns_us": {}, "cells": ""},
    ):
        changes: dict[str, Any] = dict(change)
        newest = replace(ranks.newest, **changes)
        strange = replace(ranks, newest=newest)
        panel(strange, 28, 10)
        heat_map(strange, 28, 10)
        ranks_lines(replace(planted_snapshot(1024), ranks=strange), 78)
