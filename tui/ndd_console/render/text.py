"""Blocks as text: tables in columns, plots as sparklines."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Column
from rich.table import Table as Grid
from rich.text import Text as Words

from ndd_console.view.bars import bar, interval_rows, sparkline
from ndd_console.view.rows import cells, short_places
from ndd_console.view.style import to_ascii
from ndd_console.words.blocks import (
    Bars,
    Block,
    Curves,
    Diff,
    Intervals,
    NamedValues,
    Page,
    Point,
    Spans,
    Stack,
    Table,
    Text,
    Verdict,
    interval_text,
    safe,
)
from ndd_engine.text import duration, printable

WIDTH = 100
_UNLIMITED = 10_000  # no line of a command is longer
_STYLES = {"": "", "note": "dim", "good": "green", "warn": "yellow", "bad": "red"}
_SPAN = 68  # cells of a row of spans
_SPARK = (14, 40)  # minimum and maximum cells of a sparkline


def page_text(page: Page, ascii_only: bool = False) -> str:
    """A whole page, 100 columns wide, ending in a newline."""
    head = (f"{page.name}: {page.status[0]}", page.subtitle, page.made)
    parts: list[RenderableType] = [*map(_words, head), *_block(page.summary, WIDTH)]
    for section in page.sections:
        parts += ["", Rule(_words(section.title), characters="═", align="left")]
        for block in section.blocks:
            parts += ["", *_block(block, WIDTH)]
    shown = _lines(parts, WIDTH)
    return "\n".join(map(to_ascii, shown) if ascii_only else shown) + "\n"


def lines(blocks: Iterable[Block], width: int | None = None, colour: bool = False) -> list[str]:
    """Blocks as lines for a command's output. width: of the terminal; None wraps nothing."""
    parts: list[RenderableType] = []
    before: Block | None = None
    for block in blocks:
        if before is not None and not (isinstance(before, Text) and isinstance(block, Text)):
            parts.append("")
        parts += _block(block, width or _UNLIMITED)
        before = block
    return _lines(parts, width or _UNLIMITED, colour)


def _lines(parts: Iterable[RenderableType], width: int, colour: bool = False) -> list[str]:
    out = io.StringIO()
    console = Console(
        file=out, width=width, color_system="standard" if colour else None, force_terminal=colour,
        legacy_windows=False, markup=False, highlight=False, emoji=False,
    )  # fmt: skip
    for part in parts:
        console.print(part)
    shown = [line.rstrip() for line in out.getvalue().split("\n")[:-1]]
    # Each text is escaped where it is used; this catches one that was missed.
    return shown if colour else [printable(line) for line in shown]


def _words(text: object, style: str = "") -> Words:
    """The text with its indentation."""
    shown = str(text)
    return Words(" " * (len(shown) - len(shown.lstrip(" "))) + safe(shown), style)


def _block(block: Block, width: int) -> Iterator[RenderableType]:
    match block:
        case Text():
            yield _words(("! " if block.tone in ("warn", "bad") else "") + block.text, _STYLES[block.tone])
        case Diff():
            for line, tone in block.toned:
                yield Words(printable(line), _STYLES[tone], no_wrap=True, overflow="ignore")
        case Verdict():
            yield Words((">> " if block.main else " > ") + safe(block.title), "bold")
            badges = [f"gain: {block.ceiling}"] if block.ceiling else []
            yield Padding(_words(" | ".join([*badges, *block.badges])), (0, 0, 0, 3))
            yield Padding(_pairs(block.rows), (0, 0, 0, 3))
        case NamedValues():
            if block.title:
                yield _words(f"-- {block.title}", "bold")
            yield _pairs(block.rows)
        case _:
            if block.title:
                yield _words(f"-- {block.title}", "bold")
            yield from _figure(block, width)
            if block.note:
                yield Padding(_words(block.note, "dim"), (0, 0, 0, 3))


def _figure(block: Table | Bars | Curves | Stack | Spans | Intervals, width: int) -> Iterator[RenderableType]:
    match block:
        case Table():
            if block.rows:
                yield _table(block, width)
        case Bars():
            grid = _grid(_column(25), Column(width=50), Column(justify="right"))
            bars = _filled(grid, [(name, bar(share, 50), text) for name, share, text, _ in block.rows])
            yield Padding(bars, (0, 0, 0, 3))
        case Curves() | Stack():
            yield _plot(block)
        case Spans():
            yield f"{'':24}0 to {duration(block.time.length_s)}"
            grid = _grid(_column(22), Column(width=_SPAN), Column(justify="right"))
            for line in block.rows:
                marks = _marks(line.spans, block.time.length_s or 1.0)
                _filled(grid, [(line.name, marks, str(len(line.spans)))])
            yield grid
        case Intervals():
            for row in block.rows:
                yield _words(f"{row.name}: {row.verdict}, {interval_text(row.ratio, row.low, row.high)}")
                for parts in interval_rows(row.ratio, row.low, row.high, 70):
                    yield Words("   " + "".join(text for text, _ in parts))


def _table(table: Table, width: int) -> Grid:
    """Aligned columns, whose texts wrap; places in the wide one fit into it, without folders if need be."""
    grid, wide = _grid(head=any(table.columns)), table.wide % len(table.columns)
    for index, name in enumerate(table.columns):
        right = index in table.right
        grid.add_column(_words(name), justify="right" if right else "left", no_wrap=right, overflow="fold")
    columns = enumerate(zip(table.columns, *table.rows, strict=True))
    room = width - sum(max(map(cells, texts)) + 2 for index, texts in columns if index != wide)
    return _filled(
        grid, [(*row[:wide], short_places(row[wide], room), *row[wide + 1 :]) for row in table.rows]
    )


def _column(width: int, header: str = "") -> Column:
    return Column(header, width=width, no_wrap=True, overflow="ellipsis")


def _grid(*columns: Column | str, head: bool = False) -> Grid:
    return Grid(*columns, box=None, show_header=head, pad_edge=False, padding=(0, 2, 0, 0))


def _filled(grid: Grid, rows: Sequence[Sequence[str | Words]]) -> Grid:
    for row in rows:
        grid.add_row(*(cell if isinstance(cell, Words) else _words(cell) for cell in row))
    return grid


def _pairs(rows: Sequence[tuple[str, str]]) -> Grid:
    """Names and values; a name that repeats is left out."""
    before = ["", *(label for label, _ in rows)]
    return _filled(
        _grid(Column(max_width=30, overflow="fold"), Column(overflow="fold")),
        [("" if label == last else label, text) for (label, text), last in zip(rows, before, strict=False)],
    )


def _spark(points: Sequence[Point], length_s: float, width: int) -> Words:
    """Values over the time of the run in `width` cells, blank where there are none."""
    columns: dict[int, list[float]] = {}
    for x, value in points:
        columns.setdefault(min(int(x / length_s * width), width - 1) if length_s > 0 else 0, []).append(value)
    order = sorted(columns)
    # Rounded: noise in the last digits of a constant would look like ups and downs.
    means = [float(f"{sum(columns[index]) / len(columns[index]):.6g}") for index in order]
    levels = dict(zip(order, sparkline(means, len(means)), strict=True))
    return Words("".join(levels.get(index, " ") for index in range(width)))


def _plot(block: Curves | Stack) -> Grid:
    """Each line as a sparkline from its lowest to its highest value, with name and figures."""
    legend = block.legend
    columns = zip(block.columns, *(series.figures for series in legend), strict=True)
    figures = sum(max(map(len, column)) + 2 for column in columns)
    names = max((cells(safe(series.name)) for series in legend), default=0)
    width = min(max(WIDTH - 4 - figures - names, _SPARK[0]), _SPARK[1])
    log = isinstance(block, Curves) and block.log
    length_s = block.time.length_s
    rest = (Column(name, justify="right", no_wrap=True) for name in block.columns)
    first = _column(max(min(names, WIDTH - 4 - figures - width), 6))
    grid = _grid(first, _column(width, f"over {duration(length_s)}"), *rest, head=True)
    for series in legend:
        points = [(x, math.log(y)) if log and y > 0 else (x, y) for x, y in series.points]
        _filled(grid, [(series.name, _spark(points, length_s, width), *series.figures)])
    return grid


def _marks(spans: Sequence[tuple[float, float, str]], length_s: float) -> str:
    line = ["·"] * _SPAN
    for begin, end, _ in spans:
        if (end - begin) * _SPAN < length_s:  # less than a cell
            begin = end
        first, last = (min(int(x / length_s * _SPAN), _SPAN - 1) for x in (begin, end))
        line[first : last + 1] = ("█" if last > first else "│") * (last + 1 - first)
    return "".join(line)
