"""Several ranks in words."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ndd_console.words.run import late_text, late_words, progress_line, ranks_facts, ranks_words, slowest
from tests.ui.fake_ranks import PLANTED, planted_snapshot
from tests.ui.fakes import snapshot


def test_ranks_and_hosts_are_counted() -> None:
    assert ranks_words(planted_snapshot(2)) == "2 ranks, DDP, 1 host"
    assert ranks_words(planted_snapshot(1024)) == "1,024 ranks, FSDP2, 128 hosts"
    assert late_words(snapshot(False)) == ranks_words(snapshot(False)) == ""
    value = planted_snapshot(64)
    assert value.ranks is not None
    newest = replace(value.ranks.newest, launched=256, first_rank=64)
    assert ranks_words(replace(value, ranks=replace(value.ranks, newest=newest))).startswith(
        "64 of 256 ranks, FSDP2"
    )


def test_progress_names_the_slowest() -> None:
    assert late_words(planted_snapshot(2)) == "2 ranks, slowest 1 (+7.6 ms data_wait)"
    assert late_words(planted_snapshot(64)) == "64 ranks, no straggler"
    assert "2 ranks, slowest 1 (+7.6 ms data_wait)" in progress_line(planted_snapshot(2))


@pytest.mark.parametrize("world", PLANTED)
def test_the_straggler_is_named_and_needs_attention(world: int) -> None:
    value = planted_snapshot(world)
    ranks, planted = value.ranks, PLANTED[world].late
    assert ranks is not None
    facts, table = ranks_facts(value, ranks), slowest(ranks.newest)
    assert dict(facts.rows)["straggler"] == late_text(ranks)
    if planted:
        assert late_text(ranks).startswith(f"rank {planted[0]}") and facts.warn == {"straggler"}
        assert table.rows[0][0] == str(planted[0]) and table.warn == {0}
    else:
        assert late_text(ranks) == "none" and not facts.warn and not table.warn
    assert [row[0] for row in table.rows[-4:]] == ["least", "median", "mean", "most"]
