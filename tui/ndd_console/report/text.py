"""The page as plain text of 100 columns: the same parts, tables in columns, plots as lines of blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ndd_console.view.bars import bar, sparkline
from ndd_console.view.interval import interval_rows
from ndd_console.view.rows import cells, foreign, shorten, wrap
from ndd_console.view.style import to_ascii
from ndd_engine.text import duration, printable

from .blocks import Bars, Block, Card, Facts, Intervals, Lines, Page, Section, Spans, Stack, Table, Text
from .html import LINE_COLUMNS, STACK_COLUMNS, line_figures, stack_figures
from .plots import interval_words
from .safe import LONGEST, clip

WIDTH = 100
Points = Sequence[tuple[float, float]]
_LABEL = 22
_SPARK = (14, 40)  # cells of a line of blocks: at least, at most


def render(page: Page, ascii_only: bool = False) -> str:
    """The whole text, with a newline at its end."""
    lines = [*_wrapped(f"{page.name}: {page.status[0]}"), *_wrapped(page.subtitle), page.made]
    for section in page.sections:
        lines += ["", *_section(section)]
    # Every text was made safe where it came in; this holds for the one that was forgotten too.
    out = "\n".join(printable(line.rstrip()) for line in lines) + "\n"
    return "\n".join(map(to_ascii, out.split("\n"))) if ascii_only else out


def _section(section: Section) -> list[str]:
    title = f"══ {section.title} "
    lines = [title + "═" * (WIDTH - cells(title))]
    for block in section.blocks:
        lines += ["", *_block(block)]
    return lines


def _block(block: Block) -> list[str]:
    if isinstance(block, Text):
        return _wrapped(("! " if block.tone in ("warn", "bad") else "") + block.text)
    if isinstance(block, Facts):
        return _pairs(block.rows)
    if isinstance(block, Card):
        return _card(block)
    if isinstance(block, Table):
        return _titled(block.title, _table(block.columns, block.rows, block.right, block.wide), block.note)
    if isinstance(block, Bars):
        return _bars(block)
    if isinstance(block, Lines):
        return _lines(block)
    if isinstance(block, Stack):
        return _stack(block)
    if isinstance(block, Spans):
        return _spans(block)
    assert isinstance(block, Intervals)
    return _intervals(block)


def _safe(text: object) -> str:
    return clip(foreign(text), LONGEST)


def _wrapped(text: str, indent: int = 0) -> list[str]:
    return [" " * indent + line for line in wrap(_safe(text), WIDTH - indent)]


def _titled(title: str, body: list[str], note: str = "") -> list[str]:
    return [
        *(["-- " + shorten(_safe(title), WIDTH - 3)] if title else []),
        *body,
        *(_wrapped(note, 3) if note else []),
    ]


def _pairs(rows: Sequence[tuple[str, str]], indent: int = 0) -> list[str]:
    out: list[str] = []
    for name, text in rows:
        lines = wrap(_safe(text), WIDTH - _LABEL - indent) or [""]
        label = _safe(name)
        if cells(label) > _LABEL - 2:  # it takes a line of its own
            out += wrap(label, WIDTH - indent)
            label = ""
        for index, line in enumerate(lines):
            lead = label if index == 0 else ""
            out.append(" " * indent + lead + " " * (_LABEL - cells(lead)) + line)
    return out


def _card(block: Card) -> list[str]:
    lead = ">> " if block.verdict else " > "
    title = wrap(_safe(block.title), WIDTH - 3)
    badges = " | ".join(_safe(badge) for badge in block.badges)
    return [
        *(("   " if index else lead) + line for index, line in enumerate(title)),
        *_wrapped(badges, 3),
        *_pairs(block.rows, 3),
    ]


def _table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], right: frozenset[int], wide: int = -1
) -> list[str]:
    """Columns as wide as what is in them; where they do not fit, the widest ones yield and wrap."""
    body = [[_safe(cell) for cell in row] for row in rows]
    head = [_safe(name) for name in columns]
    widths = [max(map(cells, (head[i], *(row[i] for row in body)))) for i in range(len(head))]
    room = WIDTH - 2 * (len(head) - 1)
    least = [min(width, 10) for width in widths]
    while sum(widths) > room and any(w > low for w, low in zip(widths, least, strict=True)):
        free = [i for i in range(len(widths)) if widths[i] > least[i]]
        index = max(free, key=lambda i: widths[i])
        rest = max((widths[i] for i in free if i != index), default=least[index])
        widths[index] = max(widths[index] - (sum(widths) - room), min(rest, widths[index] - 1), least[index])
    lines: list[str] = []
    for row in [head, *body]:
        wrapped = [wrap(cell, width) or [""] for cell, width in zip(row, widths, strict=True)]
        for level in range(max(map(len, wrapped))):
            parts = []
            for index, cell in enumerate(wrapped):
                text = cell[level] if level < len(cell) else ""
                blank = " " * (widths[index] - cells(text))
                parts.append(blank + text if index in right else text + blank)
            lines.append("  ".join(parts))
        if row is head:
            lines.append("  ".join("─" * width for width in widths))
    return lines


def _bars(block: Bars) -> list[str]:
    body = [
        f"   {shorten(_safe(name), 24):<24} {bar(share, 50)} {_safe(text):>6}"
        for name, share, text, _ in block.rows
    ]
    return _titled(block.title, body, block.note)


def _spark(points: Points, length_s: float, width: int) -> str:
    """Values over the time of the run in as many cells; blank where there are none."""
    held: dict[int, list[float]] = {}
    for x, value in points:
        held.setdefault(min(int(x / length_s * width), width - 1) if length_s > 0 else 0, []).append(value)
    order = sorted(held)
    # Without the noise of the last digits, which would look like ups and downs of what is constant.
    means = [float(f"{sum(held[index]) / len(held[index]):.6g}") for index in order]
    levels = dict(zip(order, sparkline(means, len(means)), strict=True))
    return "".join(levels.get(index, " ") for index in range(width))


def _lines(block: Lines) -> list[str]:
    shown = [item for item in block.lines if item.points]
    rows = []
    for line, (_, name, figures) in zip(shown, line_figures(block), strict=True):
        points = [(x, math.log(y)) if block.log and y > 0 else (x, y) for x, y in line.points]
        rows.append((name, points, figures))
    return _plot(block.title, LINE_COLUMNS, rows, block.note, block.time.length_s)


def _stack(block: Stack) -> list[str]:
    rows = []
    for layer, (_, name, figures) in zip(block.layers, stack_figures(block), strict=True):
        points = [((column + 0.5) * block.width_s, layer.values.get(column, 0.0)) for column in block.columns]
        rows.append((name, points, figures))
    return _plot(block.title, STACK_COLUMNS, rows, block.note, block.time.length_s)


def _plot(
    title: str,
    columns: Sequence[str],
    rows: Sequence[tuple[str, Points, Sequence[str]]],
    note: str,
    length_s: float,
) -> list[str]:
    """Each line as blocks between its own lowest and highest value, with its name and its figures."""
    table = _columns(columns, [figures for _, _, figures in rows])
    names = max([0, *(cells(_safe(name)) for name, _, _ in rows)])
    room = WIDTH - 4 - cells(table[0])
    spark = min(max(room - names, _SPARK[0]), _SPARK[1])
    width = max(min(names, room - spark), 6)
    heading = f"over {duration(length_s)}"
    lines = [f"{'':<{width}}  {heading:<{spark}}  {table[0]}"]
    for (name, points, _), shown in zip(rows, table[1:], strict=True):
        label = shorten(_safe(name), width)
        blank = " " * (width - cells(label))
        lines.append(f"{label}{blank}  {_spark(points, length_s, spark)}  {shown}")
    return _titled(title, lines, note)


def _columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(cells, (head[i], *(row[i] for row in rows)))) for i in range(len(head))]
    return [
        "  ".join(" " * (w - cells(c)) + c for c, w in zip(row, widths, strict=True)) for row in (head, *rows)
    ]


def _spans(block: Spans) -> list[str]:
    room = WIDTH - _LABEL - 8
    length = block.time.length_s or 1.0
    out = []
    for row in block.rows:
        line = ["·"] * room
        for begin, end, _ in row.spans:
            if (end - begin) * room < length:  # less than a cell
                begin = end
            first, last = (min(int(x / length * room), room - 1) for x in (begin, end))
            for index in range(first, last + 1):
                line[index] = "█" if last > first else "│"
        name = shorten(_safe(row.name), _LABEL)
        out.append(f"{name}{' ' * (_LABEL - cells(name))}  {''.join(line)} {len(row.spans):>5}")
    return _titled(f"{block.title} (0 to {duration(block.time.length_s)})", out)


def _intervals(block: Intervals) -> list[str]:
    out: list[str] = []
    for row in block.rows:
        out += wrap(
            f"{_safe(row.name)}: {_safe(row.verdict)}, {interval_words(row.ratio, row.low, row.high)}", WIDTH
        )
        out += [
            "   " + "".join(text for text, _ in line)
            for line in interval_rows(row.ratio, row.low, row.high, 70)
        ]
    return _titled(block.title, out, block.note)
