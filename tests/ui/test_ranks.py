"""The live screen, the page of ranks and the lines of progress of runs with several ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ndd_console.screens.pages import ranks_lines
from ndd_console.view.live import LiveState, live_rows
from ndd_console.view.ranks import heat_map, panel
from ndd_console.view.rows import width_of
from ndd_console.view.style import Row
from ndd_console.words.diagnosis import DiagnosisResult
from ndd_engine.diagnose import diagnose

from .fake_ranks import PLANTED, planted_snapshot
from .fakes import snapshot

WORLDS = tuple(PLANTED)
KEYS = (("d", "diagnosis"), ("r", "ranks"), ("?", "help"), ("q", "quit"))


def plain(rows: list[Row]) -> str:
    return "\n".join("".join(text for text, _ in row) for row in rows)


def live(world: int, width: int = 80, height: int = 24) -> str:
    value = planted_snapshot(world)
    state = LiveState(
        "chartext-001", "training", KEYS, diagnosis=DiagnosisResult(diagnose(value)), can_try=True
    )
    return plain(live_rows(value, state, width, height))


def test_ranks_that_are_only_a_part_of_those_launched_keep_their_numbers() -> None:
    ranks = planted_snapshot(64).ranks
    assert ranks is not None
    rows = plain(heat_map(replace(ranks, newest=replace(ranks.newest, launched=256, first_rank=64)), 28, 10))
    assert " 64 " in rows and " 0 " not in rows


def test_exchange_and_skew_are_rows_of_the_step_and_the_longest_names_its_rank() -> None:
    text = live(2)
    assert "exchange" in text
    assert "skew" in text
    data = next(line for line in text.splitlines() if "data_wait" in line)
    assert "8.9 r1" in data


def test_few_ranks_are_bars_and_many_a_heat_map() -> None:
    assert "ranks: work" in live(8)
    assert "+8.1" in live(8)
    assert "a cell each" in live(64)
    assert "▓" in live(1024)
    assert "▓" not in live(64)


def test_the_late_rank_is_named_with_its_code() -> None:
    text = live(2)
    assert "+7.6 ms" in text and "text.py:88" in text


@pytest.mark.parametrize("world", WORLDS)
def test_the_page_has_the_slowest_ranks_first_and_a_summary(world: int) -> None:
    rows = ranks_lines(planted_snapshot(world), 78)
    assert all(width_of(row) <= 78 for row in rows)
    lines = plain(rows).splitlines()
    begin = next(index for index, line in enumerate(lines) if line.startswith("rank "))
    ranks = [line.split()[0] for line in lines[begin + 1 : begin + 1 + min(world, 8)]]
    late = PLANTED[world].late
    if late:
        assert ranks[0] == str(late[0])
    assert len(set(ranks)) == min(world, 8)
    words = [line.split()[0] for line in lines if line]
    assert [word for word in words if word in ("least", "median", "mean", "most")] == [
        "least", "median", "mean", "most",
    ]  # fmt: skip


def test_a_run_with_one_rank_shows_none_of_it() -> None:
    value = snapshot(False)
    assert "rank" not in plain(live_rows(value, LiveState("a", "training", KEYS[:1]), 80, 24))
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
