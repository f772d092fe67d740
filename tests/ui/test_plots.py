"""Intervals, plots and cut rows; and the canvas: partial updates leave the terminal as a full update would."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pyte
import pytest
from hypothesis import given
from hypothesis import strategies as st
from textual.app import App, ComposeResult
from textual.geometry import Region

from ndd_console.view.bars import interval_rows, plot_rows, progress_rows
from ndd_console.view.live import LiveState, live_rows
from ndd_console.view.rows import BLANK, aligned, cells, cut, fit, shorten, width_of, wrap
from ndd_console.view.style import COLOUR, Look, Row
from ndd_console.widgets.canvas import Canvas, changes
from ndd_engine.trial.outcome import Progress

from .fake_wizard import proposal
from .fakes import snapshot


def text_of(rows: list[Row]) -> str:
    return "\n".join("".join(text for text, _ in row) for row in rows)


@given(st.text("ab数 …█", max_size=12), st.integers(0, 14), st.integers(0, 14))
def test_cutting_keeps_cells(text: str, start: int, length: int) -> None:
    row: Row = ((text, "text"), ("cd", "bold"))
    whole = fit(row, 40)
    assert width_of(whole) == 40
    assert width_of(cut(whole, start, start + length)) == length
    assert cells(shorten(text, start)) <= start
    for line in wrap(text, max(start, 2)):
        assert cells(line) <= max(start, 2)


WORDS = st.text("ab数 \x1b", max_size=30)


@given(st.lists(st.tuples(WORDS, WORDS, st.just("2.4 GiB"), WORDS), max_size=4), st.integers(30, 120))
def test_columns_stand_below_each_other_and_fit(texts: list[tuple[str, ...]], width: int) -> None:
    grid = [[(text, "text") for text in row] for row in (*texts, ("name", "no figures " * 20))]
    rows = aligned(grid, width, wide=1, drop=(3, 2))
    assert all(width_of(row) <= width and "\x1b" not in text_of([row]) for row in rows)
    assert len({cells(row[0][0]) for row in rows}) == 1
    assert len({width_of(row[:2]) for row in rows[:-1] if len(row) > 2}) <= 1
    assert texts == [] or width_of(rows[-1]) == width  # the last text takes the rest of its row


@pytest.mark.parametrize(
    ("ratio", "low", "high", "style"),
    [
        (1.42, 1.35, 1.49, "good"),
        (0.9, 0.85, 0.95, "bad"),
        (1.01, 0.97, 1.05, "warn"),
        (9.0, 7.0, 12.0, "good"),
    ],
)
def test_an_interval_is_drawn_where_it_lies(ratio: float, low: float, high: float, style: str) -> None:
    scale, line = (text_of([row]) for row in interval_rows(ratio, low, high, 60))
    assert len(scale) == len(line) == 60
    dot, left, right = (line.index(char) for char in "●├┤")
    assert left < dot < right
    at_one = next(i for i, char in enumerate(scale) if char == "1" and not scale[i + 1 : i + 2].strip())
    # 1 lies left of a gain, right of a loss, and inside an interval that says neither.
    assert (left > at_one) is (style == "good") and (right < at_one) is (style == "bad")
    assert interval_rows(ratio, low, high, 60)[1][1][1] == style and style in COLOUR
    assert interval_rows(ratio, low, high, 12) == [] and interval_rows(None, low, high, 60) == []
    assert interval_rows(float("nan"), low, high, 60) == [] and interval_rows(ratio, 0.0, high, 60) == []


def test_progress_stays_within_its_budget() -> None:
    assert ", 3 of 60 s" in text_of(progress_rows(Progress("warming up", 3.0, 60.0), "fused AdamW", 78))
    late = text_of(progress_rows(Progress("measuring", 70.0, 60.0, 3), "fused AdamW", 78))
    assert ", 60 of 60" in late and "70" not in late


@pytest.mark.parametrize(
    ("memory", "steps", "expected"),
    [
        # Nothing to compare: a sentence instead of a single dot.
        ((4.0, 4.0, 4.0001), (0.04, 0.04, 0.04), ["all 3 need 4.0 GiB and process 3,200 items/s: nothing to plot"]),
        # The same speed: one row over memory.
        ((3.0, 4.0, 5.0), (0.04, 0.0399, 0.0398), [
            "  3,216 ┤▲                             ●                             ●",
            "         3.0 GiB       memory, at 3,200 to 3,216 items/s       5.0 GiB",
        ]),
        # The same memory: one column, and one label in place of two that are equal.
        ((4.0, 4.0, 4.0001), (0.04, 0.02, 0.08), [
            "  6,400 ┤                              ●", "items/s ┤", *["        ┤"] * 2,
            "        ┤                              ▲", "        ┤",
            "        ┤                              ●", "        ┤", "      0 ┤",
            "                                all need 4.0 GiB",
        ]),
    ],
)  # fmt: skip
def test_the_plot_of_equal_values_says_that_they_are_equal(
    memory: tuple[float, ...], steps: tuple[float, ...], expected: list[str]
) -> None:
    pairs = zip(memory, steps, strict=True)
    rows = [replace(proposal("medium", 256, 128, 1, *each), item="item") for each in pairs]
    plot = plot_rows(rows, rows, rows[0], 70, 11)
    *found, marks = ["".join(part for part, _ in row).rstrip() for row in plot]
    assert ([*found, marks] if len(expected) == 1 else found) == expected
    assert len(expected) == 1 or "does not fit" in marks


# The canvas


def on_a_terminal(*sent: str) -> list[list[tuple[str, ...]]]:
    """Character, colour and weight of each cell, after this output; a blank has no style."""
    screen = pyte.Screen(80, 24)
    pyte.Stream(screen).feed("".join(sent))
    lines = (screen.buffer[y] for y in range(24))
    cells = ([line[x] for x in range(80)] for line in lines)
    return [
        [(cell.data, cell.fg, str(cell.bold)) if cell.data != " " else () for cell in line] for line in cells
    ]


ADDRESS = re.compile(r"\x1b\]8;[^;]*;(.*?)\x1b\\")


def addresses(sent: str) -> list[tuple[str, str]]:
    """(text, address) of the parts of an output that are links."""
    parts = ADDRESS.split(re.sub(r"\x1b\[[\d;]*[Hm]", "", sent))
    return [(text, address) for address, text in zip(parts[1::2], parts[2::2], strict=True) if address]


async def test_places_in_code_are_links_on_the_canvas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a link that is partly the same, all cells are sent again; without links, only the cells that differ."""

    class OneCanvas(App[None]):
        def compose(self) -> ComposeResult:
            yield Canvas(Look(links=True))

    app = OneCanvas()
    async with app.run_test(size=(40, 2)):
        canvas = app.query_one(Canvas)
        regions: list[Region] = []
        monkeypatch.setattr(canvas, "refresh", lambda *more: regions.extend(more))

        def sent(text: str, folder: str | None = "/code") -> set[tuple[str, str]]:
            regions.clear()
            canvas.show([fit(((text, "text"),), 40), BLANK], None if folder is None else Path(folder))
            spans = [(one.y, one.x, one.right) for one in regions] if regions else [(0, 0, 40)]
            return set(addresses(canvas.patch(spans)))

        sent("数 at a/train.py:41")
        address = "file:///code/b/train.py"
        assert sent("数 at b/train.py:41") == {("b/train.py:41", address)}
        assert sent("数 at b/train.py:42") == {("2", address)}
        assert ("b/train.py:42", address) in sent("a b/train.py:42")
        assert [part.style.link for part in canvas.render_line(0) if part.style and part.style.link] == [
            address
        ]
        assert not sent("a b/train.py:42", None)
        assert sent("a /b/train.py:42", None) == {("/b/train.py:42", "file:///b/train.py")}


def assert_painted(old: list[Row], new: list[Row]) -> int:
    """What is sent for the changes leaves what the whole frame would. Returns its bytes."""

    def painted(rows: list[Row], spans: list[tuple[int, int, int]] | None = None) -> str:
        canvas = Canvas()
        canvas.show(rows)
        return canvas.patch([(y, 0, width_of(row)) for y, row in enumerate(rows)] if spans is None else spans)

    spans = [(y, a, b) for y in range(len(new)) if old[y] != new[y] for a, b in changes(old[y], new[y])]
    sent = painted(new, spans)
    assert on_a_terminal(painted(old), sent) == on_a_terminal(painted(new))
    return len(sent.encode())


SPANS = st.lists(
    st.tuples(st.text("ab 数█", max_size=6), st.sampled_from(["text", "bold", "accent"])), max_size=5
)


@given(SPANS, SPANS)
def test_a_patch_paints_what_changed(old: list[tuple[str, str]], new: list[tuple[str, str]]) -> None:
    assert_painted([fit(tuple(old), 24)], [fit(tuple(new), 24)])


def test_a_figure_costs_a_few_bytes() -> None:
    state = LiveState("a", "training", (("q", "quit"),))
    before = live_rows(snapshot(), state, 80, 24)
    assert assert_painted(before, live_rows(snapshot(), state, 80, 24)) == 0
    assert assert_painted(before, live_rows(snapshot(grad_norm=0.8361), state, 80, 24)) < 24
    assert assert_painted(before, live_rows(snapshot(step=4_227, lr=7.1e-4, loss=1.479), state, 80, 24)) < 120
