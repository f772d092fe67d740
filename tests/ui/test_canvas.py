"""The canvas: partial updates leave the terminal as a full update would."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from ndd_console.view.live import LiveState, live_rows
from ndd_console.view.rows import cut, fit, width_of
from ndd_console.view.style import COLOUR, Row
from ndd_console.widgets.canvas import Canvas, changes

from .fakes import snapshot

Cell = tuple[str, str]


class Terminal:
    """Interprets cursor movements and styles; keeps (character, style) of every cell."""

    def __init__(self, rows: list[Row], codes: dict[str, str]) -> None:
        self.codes = codes
        self.cells = [cells_of(row, codes) for row in rows]

    def write(self, text: str) -> None:
        x = y = 0
        code = ""
        for part in re.findall(r"\x1b\[[0-9;]*[Hm]|[^\x1b]", text):
            if part.endswith("H") and part.startswith("\x1b"):
                y, x = (int(number) - 1 for number in part[2:-1].split(";"))
            elif part.startswith("\x1b"):
                code = "" if part == "\x1b[0m" else part
            else:
                for extra in range(cell_len(part)):
                    self.cells[y][x] = (part if extra == 0 else "", code if part != " " else "")
                    x += 1


def cells_of(row: Row, codes: dict[str, str]) -> list[Cell]:
    out: list[Cell] = []
    for text, style in row:
        for char in text:
            out.append((char, codes[style] if char != " " else ""))
            out.extend(("", codes[style]) for _ in range(cell_len(char) - 1))
    return out


def assert_painted(old: list[Row], new: list[Row]) -> int:
    canvas = Canvas()
    terminal = Terminal(old, canvas._codes)
    canvas._rows = new
    spans = [(y, a, b) for y in range(len(new)) if old[y] != new[y] for a, b in changes(old[y], new[y])]
    sent = canvas.patch(spans)
    terminal.write(sent)
    assert terminal.cells == [cells_of(row, canvas._codes) for row in new]
    return len(sent.encode())


SPANS = st.lists(
    st.tuples(st.text("ab 数█", max_size=6), st.sampled_from(["text", "bold", "accent"])), max_size=5
)


@given(SPANS, SPANS)
def test_a_patch_paints_what_changed(old: list[tuple[str, str]], new: list[tuple[str, str]]) -> None:
    assert_painted([fit(tuple(old), 24)], [fit(tuple(new), 24)])


def test_nothing_is_sent_for_equal_rows() -> None:
    rows = live_rows(snapshot(), LiveState("a", "training", ()), 80, 24)
    assert assert_painted(rows, live_rows(snapshot(), LiveState("a", "training", ()), 80, 24)) == 0


def test_a_figure_costs_a_few_bytes() -> None:
    state = LiveState("a", "training", (("q", "quit"),))
    before = live_rows(snapshot(), state, 80, 24)
    assert assert_painted(before, live_rows(snapshot(grad_norm=0.8361), state, 80, 24)) < 24
    assert assert_painted(before, live_rows(snapshot(step=4_227, lr=7.1e-4, loss=1.479), state, 80, 24)) < 120


def test_changes_are_joined_when_near() -> None:
    old: Row = (("a" * 10, "text"), ("b" * 20, "text"))
    assert changes(old, (("a" * 9 + "x", "text"), ("b" * 4 + "y" + "b" * 15, "text"))) == [(9, 15)]
    assert changes(old, (("x" + "a" * 9, "text"), ("b" * 4 + "y" + "b" * 15, "text"))) == [(0, 1), (14, 15)]
    assert changes(old, old) == [] and changes(old, (("a" * 10, "bold"), ("b" * 20, "text"))) == [(0, 10)]
    assert width_of(cut(old, 3, 15)) == 12 and set(COLOUR) >= {"text", "select"}
