"""A question in a box over the live screen."""

from __future__ import annotations

from collections.abc import Sequence

from .frame import Keys
from .rows import cells, cut, fit, width_of, wrap
from .style import Row


def box(title: str, choices: Keys, width: int) -> list[Row]:
    """A framed box at most `width` wide: the title, and a row for each (key, what it does)."""
    lead = max((cells(key) for key, _ in choices), default=1) + 2
    longest = max([cells(title), *(lead + cells(text) for _, text in choices)])
    inner = max(min(longest, width - 6), 1)
    body: list[Row] = [((line, "bold"),) for line in wrap(title, inner)]
    body.append(())
    for key, text in choices:
        for index, line in enumerate(wrap(text, max(inner - lead, 1))):
            body.append((((key if index == 0 else "").ljust(lead), "key"), (line, "text")))
    edge = "─" * (inner + 2)
    framed: list[Row] = [(("╭" + edge + "╮", "accent"),)]
    framed += [(("│ ", "accent"), *fit(row, inner), (" │", "accent")) for row in body]
    framed.append((("╰" + edge + "╯", "accent"),))
    return framed


def overlay(rows: Sequence[Row], box_rows: Sequence[Row], width: int) -> list[Row]:
    """The rows with the box in the middle; narrow strips next to it are blanked."""
    out = list(rows)
    if not box_rows or not rows:
        return out
    box_width = min(width_of(box_rows[0]), width)
    x = (width - box_width) // 2
    y = max((len(out) - len(box_rows)) // 2, 0)
    for index, line in enumerate(box_rows[: len(out)]):
        row = out[y + index]
        left = cut(row, 0, x) if box_width * 4 < width * 3 else ()
        right = cut(row, x + box_width, width) if left else ()
        out[y + index] = (*fit(left, x), *fit(line, box_width), *right)
    return [fit(row, width) for row in out]
