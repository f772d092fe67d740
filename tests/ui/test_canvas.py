"""The canvas: partial updates leave the terminal as a full update would."""

from __future__ import annotations

import pyte
from hypothesis import given
from hypothesis import strategies as st

from ndd_console.view.live import LiveState, live_rows
from ndd_console.view.rows import cut, fit, width_of
from ndd_console.view.style import COLOUR, Row
from ndd_console.widgets.canvas import Canvas, changes

from .fakes import snapshot


def on_a_terminal(*sent: str) -> list[list[tuple[str, ...]]]:
    """Character, colour and weight of each cell, after this output; a blank has no style."""
    screen = pyte.Screen(80, 24)
    pyte.Stream(screen).feed("".join(sent))
    lines = (screen.buffer[y] for y in range(24))
    cells = ([line[x] for x in range(80)] for line in lines)
    return [
        [(cell.data, cell.fg, str(cell.bold)) if cell.data != " " else () for cell in line] for line in cells
    ]


def assert_painted(old: list[Row], new: list[Row]) -> int:
    """What is sent for the changes leaves what the whole frame would. Returns its bytes."""
    canvas = Canvas()

    def painted(rows: list[Row], spans: list[tuple[int, int, int]] | None = None) -> str:
        canvas._rows = rows
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
