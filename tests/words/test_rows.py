"""Blocks as rows and as lines: nothing is wider than the screen, and what matters stays in a narrow table."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ndd_console.render.rows import block_rows
from ndd_console.render.text import lines
from ndd_console.view.rows import cells, width_of
from ndd_console.words.blocks import COMMAND, Bars, Block, Facts, Lines, Table, Text, Time, Verdict

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
        draws(st.booleans()), draws(st.frozensets(st.integers(0, 3))),
    )  # fmt: skip


BLOCKS = st.one_of(
    st.builds(Text, WORDS, st.sampled_from(["", "note", "warn"])),
    st.builds(Facts, PAIRS, WORDS),
    st.builds(
        Verdict, WORDS, st.tuples(WORDS), st.sampled_from(["", "at most 2.3x"]), PAIRS, st.just("warn")
    ),
    st.builds(
        Bars, WORDS, st.lists(st.tuples(WORDS, st.floats(0, 1), st.just("57 %"), st.just("blue"))).map(tuple)
    ),
    tables(),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(BLOCKS, max_size=3), st.integers(1, 130))
def test_no_row_is_wider_than_the_screen(blocks: list[Block], width: int) -> None:
    for row in block_rows(blocks, width):
        assert width_of(row) <= width
        assert all(text.isprintable() for text, _ in row)


@settings(max_examples=150, deadline=None)
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
    frozenset({0}), wide=1, paths=True,
)  # fmt: skip


@pytest.mark.parametrize(
    ("width", "end"),
    [(80, "clips.py:41 in load  Clips.__getitem__"), (50, "clips.py:41 in load"), (28, "41 in load")],
)
def test_a_path_keeps_its_end_longer_than_the_columns_after_it(width: int, end: str) -> None:
    assert plain(PATHS, width)[-1].endswith(end)


def test_a_long_text_stands_below_the_other_columns_where_there_is_little_room() -> None:
    row = ("✖ not in effect", "speed.attention", "the mask " * 5)
    table = Table("", ("effect", "setting", "verified by"), (row,))
    wide, narrow = plain(table, 90), plain(table, 50)
    assert wide[1].endswith("the mask") and len(wide) == 2
    assert narrow[1] == "✖ not in effect  speed.attention" and narrow[2].startswith("    the mask")


def test_a_command_continues_with_a_backslash_and_a_label_that_repeats_is_left_out() -> None:
    command = "ndd-console try a --set x=1 --set yyyyyyyyyy=2"
    block = Facts((("evidence", "one"), ("evidence", "two"), (COMMAND, command)))
    assert plain(block, 50) == [
        "evidence      one", "              two", "              ndd-console try a --set x=1 \\",
        "              --set yyyyyyyyyy=2",
    ]  # fmt: skip


def test_a_plot_is_not_shown_on_a_screen() -> None:
    with pytest.raises(TypeError):
        block_rows([Lines("loss", "plain", "", (), Time(1.0))], 80)
