"""The report as plain text of 100 columns: tables in columns, plots as sparklines."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ndd_console.view.bars import bar, sparkline
from ndd_console.view.interval import interval_rows, interval_text
from ndd_console.view.rows import cells, shorten, wrap
from ndd_console.view.style import to_ascii
from ndd_engine.text import duration, printable

from .blocks import Bars, Block, Facts, Intervals, Lines, Page, Point, Spans, Stack, Table, Text, Verdict
from .safe import safe

WIDTH = 100
_LABEL = 22
_SPARK = (14, 40)  # minimum and maximum cells of a sparkline


def render(page: Page, ascii_only: bool = False) -> str:
    """The whole text, ending in a newline."""
    lines = [
        *_wrapped(f"{page.name}: {page.status[0]}"),
        *_wrapped(page.subtitle),
        page.made,
        *_block(page.summary),
    ]
    for section in page.sections:
        title = f"══ {section.title} "
        lines += ["", title + "═" * (WIDTH - cells(title))]
        for block in section.blocks:
            lines += ["", *_block(block)]
    # Each text is escaped where it is used; this catches one that was missed.
    out = (printable(line.rstrip()) for line in lines)
    return "\n".join(map(to_ascii, out) if ascii_only else out) + "\n"


def _block(block: Block) -> list[str]:
    match block:
        case Text():
            return _wrapped(("! " if block.tone in ("warn", "bad") else "") + block.text)
        case Facts():
            return _pairs(block.rows)
        case Verdict():
            return _verdict(block)
        case Table():
            body = _table(block)
        case Bars():
            body = [
                f"   {_fit(name, 24)} {bar(share, 50)} {safe(text):>6}" for name, share, text, _ in block.rows
            ]
        case Lines() | Stack():
            body = _plot(block)
        case Spans():
            body = _spans(block)
        case Intervals():
            body = _intervals(block)
    title = ["-- " + shorten(safe(block.title), WIDTH - 3)] if block.title else []
    return [*title, *body, *(_wrapped(block.note, 3) if block.note else [])]


def _wrapped(text: str, indent: int = 0) -> list[str]:
    return [" " * indent + line for line in wrap(safe(text), WIDTH - indent)]


def _pad(text: str, width: int, right: bool = False) -> str:
    blank = " " * (width - cells(text))
    return blank + text if right else text + blank


def _fit(text: str, width: int) -> str:
    return _pad(shorten(safe(text), width), width)


def _pairs(rows: Sequence[tuple[str, str]], indent: int = 0) -> list[str]:
    out: list[str] = []
    for name, text in rows:
        lines = wrap(safe(text), WIDTH - _LABEL - indent) or [""]
        label = safe(name)
        if cells(label) > _LABEL - 2:  # a line of its own
            out += wrap(label, WIDTH - indent)
            label = ""
        for index, line in enumerate(lines):
            out.append(" " * indent + _pad("" if index else label, _LABEL) + line)
    return out


def _verdict(block: Verdict) -> list[str]:
    lead = ">> " if block.main else " > "
    title = wrap(safe(block.title), WIDTH - 3)
    badges = [f"potential gain: {block.ceiling}"] if block.ceiling else []
    return [
        *(("   " if index else lead) + line for index, line in enumerate(title)),
        *_wrapped(" | ".join([*badges, *block.badges]), 3),
        *_pairs(block.rows, 3),
    ]


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(cells, column)) for column in zip(*rows, strict=True)]


def _table(block: Table) -> list[str]:
    """Columns as wide as their content; if they do not fit, the widest ones wrap."""
    rows = [[safe(cell) for cell in row] for row in (block.columns, *block.rows)]
    widths = _widths(rows)
    room = WIDTH - 2 * (len(widths) - 1)
    least = [min(width, 10) for width in widths]
    while sum(widths) > room and widths != least:
        free = [i for i in range(len(widths)) if widths[i] > least[i]]
        index = max(free, key=lambda i: widths[i])
        rest = max((widths[i] for i in free if i != index), default=least[index])
        widths[index] = max(widths[index] - (sum(widths) - room), min(rest, widths[index] - 1), least[index])
    lines: list[str] = []
    for number, row in enumerate(rows):
        wrapped = [wrap(cell, width) or [""] for cell, width in zip(row, widths, strict=True)]
        for level in range(max(map(len, wrapped))):
            parts = [cell[level] if level < len(cell) else "" for cell in wrapped]
            lines.append("  ".join(_pad(part, widths[i], i in block.right) for i, part in enumerate(parts)))
        if number == 0:
            lines.append("  ".join("─" * width for width in widths))
    return lines


def _spark(points: Sequence[Point], length_s: float, width: int) -> str:
    """Values over the time of the run in `width` cells, blank where there are none."""
    found: dict[int, list[float]] = {}
    for x, value in points:
        found.setdefault(min(int(x / length_s * width), width - 1) if length_s > 0 else 0, []).append(value)
    order = sorted(found)
    # Rounded: noise in the last digits of a constant would look like ups and downs.
    means = [float(f"{sum(found[index]) / len(found[index]):.6g}") for index in order]
    levels = dict(zip(order, sparkline(means, len(means)), strict=True))
    return "".join(levels.get(index, " ") for index in range(width))


def _plot(block: Lines | Stack) -> list[str]:
    """Each line as a sparkline from its lowest to its highest value, with name and figures."""
    legend = block.legend
    rows = [block.columns, *(series.figures for series in legend)]
    widths = _widths(rows)
    table = [
        "  ".join(_pad(cell, width, True) for cell, width in zip(row, widths, strict=True)) for row in rows
    ]
    names = max([0, *(cells(safe(series.name)) for series in legend)])
    room = WIDTH - 4 - cells(table[0])
    spark = min(max(room - names, _SPARK[0]), _SPARK[1])
    width = max(min(names, room - spark), 6)
    length_s = block.time.length_s
    lines = [f"{'':<{width}}  {f'over {duration(length_s)}':<{spark}}  {table[0]}"]
    log = isinstance(block, Lines) and block.log
    for series, figures in zip(legend, table[1:], strict=True):
        points = [(x, math.log(y)) if log and y > 0 else (x, y) for x, y in series.points]
        lines.append(f"{_fit(series.name, width)}  {_spark(points, length_s, spark)}  {figures}")
    return lines


def _spans(block: Spans) -> list[str]:
    room = WIDTH - _LABEL - 8
    length = block.time.length_s or 1.0
    out = [_pad("", _LABEL + 2) + f"0 to {duration(block.time.length_s)}"]
    for row in block.rows:
        line = ["·"] * room
        for begin, end, _ in row.spans:
            if (end - begin) * room < length:  # less than a cell
                begin = end
            first, last = (min(int(x / length * room), room - 1) for x in (begin, end))
            line[first : last + 1] = ("█" if last > first else "│") * (last + 1 - first)
        out.append(f"{_fit(row.name, _LABEL)}  {''.join(line)} {len(row.spans):>5}")
    return out


def _intervals(block: Intervals) -> list[str]:
    out: list[str] = []
    for row in block.rows:
        out += _wrapped(f"{row.name}: {row.verdict}, {interval_text(row.ratio, row.low, row.high)}")
        for line in interval_rows(row.ratio, row.low, row.high, 70):
            out.append("   " + "".join(text for text, _ in line))
    return out
