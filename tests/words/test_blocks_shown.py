"""Blocks as rows and as lines: nothing is wider than the screen; comparisons and memory snapshots as blocks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ndd_console.render.rows import block_rows
from ndd_console.render.text import lines
from ndd_console.view.rows import cells, short_places, width_of
from ndd_console.words.blocks import (
    COMMAND,
    Bars,
    Block,
    Curves,
    NamedValues,
    Table,
    Text,
    Time,
    Verdict,
    at_most,
)
from ndd_console.words.comparison import two_compared
from ndd_console.words.trace import memory_blocks
from ndd_engine.diagnose.view import ceiling
from ndd_engine.recordings.snapshots import examine
from ndd_engine.trial.compare import compare
from tests.recordings.snapshots import MIB, History, frame, written
from tests.trial.written_runs import steady, windows, write_run

WORDS = st.text(st.sampled_from("ab -/.数\x1b[9é"), max_size=50)
PAIRS = st.lists(st.tuples(WORDS, WORDS), max_size=4).map(tuple)


@st.composite
def tables(draws: st.DrawFn) -> Table:
    count = draws(st.integers(1, 7))
    row = st.tuples(*(WORDS for _ in range(count)))
    right = draws(st.frozensets(st.integers(0, count - 1)))
    wide = draws(st.integers(-1, count - 1))
    return Table(
        draws(WORDS), draws(row), tuple(draws(st.lists(row, max_size=4))), right, draws(WORDS), wide,
        draws(st.frozensets(st.integers(0, 3))),
    )  # fmt: skip


BLOCKS = st.one_of(
    st.builds(Text, WORDS, st.sampled_from(["", "note", "warn"])),
    st.builds(NamedValues, PAIRS, WORDS),
    st.builds(
        Verdict, WORDS, st.tuples(WORDS), st.sampled_from(["", "at most 2.3x"]), PAIRS, st.just("warn")
    ),
    st.builds(
        Bars, WORDS, st.lists(st.tuples(WORDS, st.floats(0, 1), st.just("57 %"), st.just("blue"))).map(tuple)
    ),
    tables(),
)


@settings(max_examples=120)
@given(st.lists(BLOCKS, max_size=3), st.integers(1, 130))
def test_no_row_is_wider_than_the_screen(blocks: list[Block], width: int) -> None:
    for row in block_rows(blocks, width):
        assert width_of(row) <= width
        assert all(text.isprintable() for text, _ in row)


@given(st.lists(BLOCKS, max_size=3), st.integers(20, 130), st.booleans())
def test_lines_of_a_command_fit_the_terminal_and_cannot_control_it(
    blocks: list[Block], width: int, colour: bool
) -> None:
    for line in lines(blocks, width, colour):
        shown = re.sub(r"\x1b\[[0-9;]*m", "", line)
        assert shown.isprintable() and cells(shown) <= width
        assert colour or shown == line


def plain(block: Block, width: int) -> list[str]:
    return ["".join(text for text, _ in row) for row in block_rows([block], width)]


PATHS = Table(
    "", ("share", "function", "called by"), (("58 %", "/home/me/project/clips.py:41 in load", "Clips.__getitem__"),),
    frozenset({0}), wide=1,
)  # fmt: skip


@pytest.mark.parametrize(
    ("width", "end"),
    [
        (80, "/home/me/project/clips.py:41 in load  Clips.__getitem__"), (35, "/…/project/clips.py:41 in load"),
        (28, "…/clips.py:41 in load"),
    ],
)  # fmt: skip
def test_a_place_keeps_its_file_its_line_and_its_function_longer_than_the_columns_after_it(
    width: int, end: str
) -> None:
    assert plain(PATHS, width)[-1].endswith(end)


@pytest.mark.parametrize("text", ["waits in {}net/layers/clips.py:41 in load", "({}x.py:3)", "{}no place"])
def test_a_place_with_many_folders_is_shortened_at_once(text: str) -> None:
    shown = short_places(text.format("a/" * 50_000), 40)
    assert cells(shown) <= 40 or "no place" in shown
    assert shown.endswith(text.rpartition("/")[2].rpartition("}")[2])


def test_a_long_text_stands_below_the_other_columns_where_there_is_little_room() -> None:
    row = ("✖ not in effect", "speed.attention", "the mask " * 5)
    table = Table("", ("effect", "setting", "verified by"), (row,))
    wide, narrow = plain(table, 90), plain(table, 50)
    assert wide[1].endswith("the mask") and len(wide) == 2
    assert narrow[1] == "✖ not in effect  speed.attention" and narrow[2].startswith("    the mask")


def test_a_command_continues_with_a_backslash_and_a_label_that_repeats_is_left_out() -> None:
    command = "ndd-console try a --set x=1 --set yyyyyyyyyy=2"
    block = NamedValues((("evidence", "one"), ("evidence", "two"), (COMMAND, command)))
    assert plain(block, 50) == [
        "evidence      one", "              two", "              ndd-console try a --set x=1 \\",
        "              --set yyyyyyyyyy=2",
    ]  # fmt: skip


def test_a_plot_is_not_shown_on_a_screen() -> None:
    with pytest.raises(TypeError):
        block_rows([Curves("loss", "plain", "", (), Time(1.0))], 80)


@pytest.mark.parametrize(
    ("ratio", "more", "words"),
    [
        (3.0, {}, "B is slower"),
        (1 / 3, {}, "B is faster"),
        (1.0, {}, "ndd-console try"),
        (3.0, {"workload": "eeg"}, "different workloads or models"),
    ],
)
def test_the_verdict_of_a_comparison(
    tmp_path: Path, ratio: float, more: dict[str, object], words: str
) -> None:
    a = write_run(tmp_path / "a", windows(steady(60, 1.0)))
    b = write_run(tmp_path / "b", windows(steady(60, ratio, seed=1)), **more)
    facts, figures = two_compared(compare(a, b))
    assert isinstance(facts, NamedValues) and dict(facts.rows)["speed"].endswith(words)
    assert isinstance(figures, Table) and figures.columns == ("", "A", "B", "B / A")


@pytest.mark.long
def test_a_memory_snapshot_names_the_owner_and_the_failure(tmp_path: Path) -> None:
    history = History(cap=100 * MIB)
    history.alloc(60 * MIB, [frame("/home/me/train.py", 7, "build")])
    history.alloc(60 * MIB)
    blocks = list(memory_blocks(examine(written(tmp_path, history))))
    tables = [block for block in blocks if isinstance(block, Table)]
    facts = [block for block in blocks if isinstance(block, NamedValues)]
    assert [block.title for block in facts] == ["GPU 0", "Out of memory at entry 2"]
    assert dict(facts[0].rows)["retries"] == "none"
    assert dict(facts[1].rows)["request"].split()[:5:3] == ["60.0", "40.0"]
    assert tables[0].rows == (("60.0 MiB", "100 %", "1x", "me/train.py:7 build"),)
    assert all(all(table.columns) for table in tables)
    assert "+0.0%" in tables[-1].note


def test_lines_wrap_only_on_a_terminal_and_have_no_colour_on_a_pipe() -> None:
    blocks = [Text("a warning " * 20, "warn"), Table("", ("", "name"), (("1", "x" * 90),), frozenset({0}))]
    assert len(lines(blocks)) == 4
    assert max(map(len, lines(blocks, 40))) <= 40
    assert "\x1b" not in "".join(lines(blocks)) and "\x1b[33m" in "".join(lines(blocks, colour=True))


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.2, "at most 1.25x"), (0.6, "at most 2.5x"), (0.98327, "at most 59.8x"), (0.99999, "100x or more")],
)
def test_a_ceiling_that_is_cut_off_is_no_bound(share: float, text: str) -> None:
    assert at_most(ceiling(share)) == text
