"""The frame of every screen: a margin, the content, and a footer with the available keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .rows import BLANK, cells, fit
from .style import Row, Span

# (key, what it does).
Keys = tuple[tuple[str, str], ...]

MARGIN_FROM = 40  # narrower screens have no margin


@dataclass(frozen=True)
class Entry:
    """An entry of a list: its value, and its rows. Without a value it is a heading, which cannot be selected."""

    value: Any
    rows: tuple[Row, ...]


def inner_width(width: int) -> int:
    """Cells between the margins."""
    return max(width - 2, 1) if width >= MARGIN_FROM else max(width, 1)


def framed(body: Sequence[Row], bottom: Sequence[Row], width: int, height: int) -> list[Row]:
    """Exactly `height` rows of `width` cells: the body at the top, `bottom` on the last rows.

    Both are drawn for `inner_width(width)`. The body is cut first where there is not enough room.
    """
    room = max(height - len(bottom), 0)
    rows = [*body[:room], *[BLANK] * (room - len(body)), *bottom]
    rows = rows[len(rows) - height :]
    if width >= MARGIN_FROM:
        rows = [((" ", "text"), *row) for row in rows]
    return [fit(row, width) for row in rows]


def footer_row(keys: Keys, width: int, yielding: Keys = ()) -> Row:
    """The available keys. Without enough room the `yielding` keys are dropped first and the last three stay."""
    shown, first = list(keys), list(yielding)
    while len(shown) > 1 and sum(len(key) + len(word) + 4 for key, word in shown) - 3 > width:
        if first:
            shown.remove(first.pop(0))
        else:
            del shown[max(len(shown) - 4, 0)]
    spans: list[Span] = []
    for index, (key, word) in enumerate(shown):
        spans += [(("   " if index else "") + key, "key"), (" " + word, "dim")]
    return tuple(spans)


def key_at(footer: Row, x: int) -> str | None:
    """The key at this cell of a footer."""
    start, last = 0, None
    for text, style in footer:
        last = text.strip() if style == "key" else last
        start += cells(text)
        if x < start:
            return last
    return None
