"""Blocks as rows of a screen."""

from __future__ import annotations

from collections.abc import Iterable

from ndd_console.view.bars import bar
from ndd_console.view.rows import (
    BLANK,
    as_it_is,
    cells,
    column,
    cut,
    labelled,
    paragraph,
    short_places,
    shorten,
    titled,
    width_of,
    wrap,
)
from ndd_console.view.style import Row
from ndd_console.words.blocks import COMMAND, PLACE, Bars, Block, Diff, NamedValues, Table, Text, Verdict
from ndd_engine.text import foreign

_LABEL = 14
_STYLES = {"": "text", "note": "dim", "good": "good", "warn": "warn", "bad": "bad"}
_GLUE = "\x00"  # keeps an option and its value on one line
_NARROW = 48
_LEAST = 32  # cells that the wide column of a table keeps before other columns are left out
_LONG = 2  # lines of a long text in a table
_NAME = 25  # largest width of the names of bars


def block_rows(blocks: Iterable[Block], width: int) -> list[Row]:
    """The blocks below each other, with a blank row between them. Raises TypeError for a plot."""
    rows: list[Row] = []
    for block in blocks:
        rows += [BLANK] if rows else []
        rows += _block(block, width)
    return [row if width_of(row) <= width else cut(row, 0, width) for row in rows]


def _block(block: Block, width: int) -> list[Row]:
    match block:
        case Text():
            return paragraph(block.text, width, _STYLES[block.tone])
        case Diff():
            return [((part, _STYLES[tone]),) for line, tone in block.toned for part in as_it_is(line, width)]
        case Verdict():
            style = _STYLES[block.tone] if block.tone else "dim"
            facts = _facts([("cause", ", ".join(block.badges)), *block.rows], width)
            return [*titled(block.title, width, style, block.ceiling), *facts]
        case NamedValues():
            return [*_title(block.title, width), *_facts(block.rows, width, block.warn)]
        case Table():
            return [*_title(block.title, width), *_table(block, width), *paragraph(block.note, width, "dim")]
        case Bars():
            return [*_title(block.title, width), *_bars(block, width), *paragraph(block.note, width, "dim")]
    raise TypeError(f"a screen shows no {type(block).__name__}")


def _title(title: str, width: int) -> list[Row]:
    return titled(title, width) if title else []


def _facts(facts: Iterable[tuple[str, str]], width: int, warn: frozenset[str] = frozenset()) -> list[Row]:
    rows: list[Row] = []
    before = ""
    for label, text in facts:
        if label == COMMAND:
            rows += _command(foreign(text), width)
        else:
            shown = "" if label in (before, PLACE) else foreign(label)
            style = "bold" if label == PLACE else "warn" if label in warn else "text"
            rows += labelled(shown, text, width, _LABEL, style)
        before = label
    return rows


def _command(command: str, width: int) -> list[Row]:
    """A command that can be copied: continued lines end in a backslash."""
    indent = _LABEL if width >= _NARROW else 2
    lines = wrap(command.replace("--set ", f"--set{_GLUE}"), max(width - indent - 2, 1))
    lines = " \\\n".join(lines).replace(_GLUE, " ").splitlines()
    return [((" " * indent, "text"), (line, "bold")) for line in lines]


def _table(table: Table, width: int) -> list[Row]:
    """Aligned columns. Where there is little room, the wide one stands below, or those after it are left out."""
    if not table.rows:
        return []
    count = len(table.columns)
    wide = table.wide % count
    grid = [[foreign(text) for text in row] for row in (table.columns, *table.rows)]
    widths = [max(map(cells, texts)) for texts in zip(*grid, strict=True)]
    shown = list(range(count))

    def room() -> int:
        return width - sum(widths[index] + 2 for index in shown if index != wide)

    while shown[-1] != wide and room() < min(widths[wide], _LEAST):
        shown.pop()
    below = shown[-1] == wide and len(shown) > 1 and room() < min(widths[wide], _LEAST)
    if below:
        shown.pop()
        while len(shown) > 2 and room() + 2 < 0:
            shown.pop()
    else:
        while shown[0] != wide and room() < min(widths[wide], 8):
            shown.pop(0)
        widths[wide] = max(min(widths[wide], room()), 1)
    indent, room_below = (4, max(width - 4, 1)) if below else (0, widths[wide])
    indent = indent or sum(widths[index] + 2 for index in shown[: shown.index(wide)])
    rows: list[Row] = []
    for number, texts in enumerate(grid, -1):
        long = paragraph(short_places(texts[wide], room_below), room_below, "dim", _LONG)
        parts = []
        for index in shown:
            text = shorten(texts[index], widths[index])
            if index == wide:
                text = long.pop(0)[0][0] if long else ""
            blank = " " * (widths[index] - cells(text))
            parts.append(blank + text if index in table.right else text + blank)
        style = "dim" if number < 0 else "warn" if number in table.warn else "text"
        rows.append(((shorten("  ".join(parts).rstrip(), width), style),))
        if number >= 0 or not below:
            rows += [((" " * indent, "dim"), *row) for row in long]
    return rows


def _bars(block: Bars, width: int) -> list[Row]:
    names = min(max((cells(foreign(name)) for name, *_ in block.rows), default=0) + 1, _NAME)
    figures = max((cells(text) for _, _, text, _ in block.rows), default=0) + 2
    room = min(width - names - figures, 40)
    return [
        (
            (column(foreign(name), names), "accent"),
            (bar(share, room) if room > 0 else "", "compute"),
            (text.rjust(figures), "text"),
        )
        for name, share, text, _ in block.rows
    ]
