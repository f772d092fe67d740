"""Rows of styled text by terminal cells: measure, cut, pad, join and wrap them; the frame of every screen."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len

from ndd_engine.text import foreign, printable

from .style import Row, Span

BLANK: Row = ()
_NARROW = 48  # below this width a label stands above its text
_GAP = 2  # cells between two columns
_TITLE = 28  # cells that a title needs beside a text at the end of its row
_LEAST = 18  # cells that a column keeps that can be cut

# (key, what it does).
Keys = tuple[tuple[str, str], ...]
MARGIN_FROM = 40  # narrower screens have no margin


def cells(text: str) -> int:
    return len(text) if text.isascii() else cell_len(text)


def width_of(row: Row) -> int:
    return sum(len(text) if text.isascii() else cell_len(text) for text, _ in row)


def cut(row: Row, start: int, end: int) -> Row:
    """Cells start..end of a row. Half of a wide character becomes blank."""
    out: list[Span] = []
    x = 0
    for text, style in row:
        width = cells(text)
        stop = x + width
        if stop > start and x < end:
            if x < start or stop > end:
                text = _slice(text, max(start - x, 0), min(end, stop) - x)
            out.append((text, style))
        x = stop
        if x >= end:
            break
    return tuple(out)


def _slice(text: str, start: int, end: int) -> str:
    if text.isascii():
        return text[start:end]
    out, x = "", 0
    for char in text:
        before, x = x, x + cells(char)
        if before >= start and x <= end:
            out += char
        else:  # half of a wide character stays blank
            out += " " * (min(x, end) - max(before, start))
        if x > end:
            break
    return out


def fit(row: Row, width: int) -> Row:
    """The row, cut or padded to exactly `width` cells, with control characters escaped."""
    row = _escaped(row)
    have = width_of(row)
    if have > width:
        row = cut(row, 0, width)
        have = width_of(row)
    return row if have == width else (*row, (" " * (width - have), "text"))


def _escaped(row: Row) -> Row:
    for text, _ in row:
        if printable(text) is not text:
            return tuple((printable(text), style) for text, style in row)
    return row


def ends(left: Row, right: Row, width: int) -> Row:
    """One row aligned left, one aligned right; the left one is cut where there is no room."""
    room = width - width_of(right)
    if room <= 0:
        return fit(right, width)
    return (*fit(left, room), *right)


def side_by_side(
    left: Sequence[Row], right: Sequence[Row], left_width: int, gap: int, right_width: int
) -> list[Row]:
    out: list[Row] = []
    for index in range(max(len(left), len(right))):
        first = left[index] if index < len(left) else BLANK
        second = right[index] if index < len(right) else BLANK
        out.append((*fit(first, left_width), (" " * gap, "text"), *fit(second, right_width)))
    return out


def rule(title: str, width: int, style: str = "bold", labels: str = "") -> Row:
    """A heading: the title on a horizontal line, with column labels at its right end."""
    line = width - cells(title) - 4 - cells(labels)
    if line < 0:
        return fit((("── ", "dim"), (title, style)), width)
    return (("── ", "dim"), (title, style), (" " + "─" * line, "dim"), (labels, "dim"))


def titled(title: str, width: int, style: str = "bold", end: str = "") -> list[Row]:
    """An untrusted title as a heading, and what does not fit into its row below it. end: text at the end of the row."""
    if width < cells(end) + _TITLE:
        end = ""
    room = max(width - 4 - (cells(end) + 2 if end else 0), 1)
    text = foreign(title).strip()
    first = (wrap(text, room) or [""])[0]
    further = text[len(first) :].strip()
    row = rule(first, width, style)
    if end:
        line = width - cells(first) - cells(end) - 5
        tail = " ──" if line >= 4 else ""  # left out if the title needs the room
        space = " " + "─" * (line - len(tail)) + " "
        row = (("── ", "dim"), (first, style), (space, "dim"), (end, "bold"), (tail, "dim"))
    return [row, *((("   ", "dim"), (line, style)) for line in (wrap(further, width - 3) if further else ()))]


def fields(items: Sequence[Span], width: int, columns: int) -> Row:
    """Spans in columns of equal width; a long span uses the blank space of the next column."""
    step = max(width // max(columns, 1), 1)
    out: list[Span] = []
    x = 0
    for index, (text, style) in enumerate(items):
        target = index * step
        if index:
            blank = max(target - x, 2)
            out.append((" " * blank, "text"))
            x += blank
        out.append((text, style))
        x += cells(text)
    return tuple(out)


_WORDS = re.compile(r"\S+(?:\s%(?=\W|$)\S*)?")


def wrap(text: str, width: int) -> list[str]:
    """Wrap words to lines of at most `width` cells; longer words are cut. A number stays with its "%"."""
    width = max(width, 1)
    lines: list[str] = []
    line = ""
    for word in _WORDS.findall(text):
        while cells(word) > width:
            room = width - cells(line) - (1 if line else 0)
            if room < min(8, width):
                lines.append(line)
                line, room = "", width
            head = take(word, room)
            if not head:  # a wide character in a column of one cell
                return [*lines, "?"]
            lines.append(f"{line} {head}" if line else head)
            word, line = word[len(head) :], ""
        if not word:
            continue
        joined = f"{line} {word}" if line else word
        if cells(joined) <= width:
            line = joined
        else:
            lines.append(line)
            line = word
    if line:
        lines.append(line)
    return lines


def take(text: str, width: int) -> str:
    """The longest prefix that fits into `width` cells."""
    used = 0
    for index, char in enumerate(text):
        used += cells(char)
        if used > width:
            return text[:index]
    return text


def shorten(text: str, width: int) -> str:
    """The text in at most `width` cells, ending in "…" if it was cut."""
    if cells(text) <= width:
        return text
    return take(text, width - 1) + "…" if width > 0 else ""


_FOLDERS = re.compile(r"(?<![^\s(])((?:[^\s/(]*/)+)[^\s/]+:\d")
_INNER = 40  # folders of a place that may be kept


def short_places(text: str, width: int) -> str:
    """The text without inner folders of its places in code, so that it fits: "net/…/clips.py:41 in load"."""
    spare = cells(text) - width
    places = dict.fromkeys(place[1] for place in _FOLDERS.finditer(text)) if spare > 0 else {}
    for folders in sorted(places, key=len, reverse=True):
        names, shorter = folders[:-1].split("/"), folders
        for kept in range(min(len(names) - 1, _INNER), -1, -1):
            shorter = "/".join([*names[: kept // 2], "…", *names[len(names) - kept + kept // 2 :], ""])
            if cells(folders) - cells(shorter) >= spare:
                break
        text = text.replace(folders, shorter)
        spare = cells(text) - width
        if spare <= 0:
            break
    return text


def column(text: str, width: int) -> str:
    """The text in exactly `width` cells, ending in a blank."""
    shown = shorten(text, max(width - 1, 0))
    return shown + " " * (width - cells(shown))


def aligned(
    grid: Sequence[Sequence[Span]], width: int, wide: int = -1, drop: Sequence[int] = ()
) -> list[Row]:
    """Untrusted texts in columns. The last text of a row with fewer texts takes the rest of its row.

    wide: the column that is cut where there is little room, besides the last one. drop: columns that are left out, in
    this order, until the others have room.
    """
    count = max(map(len, grid), default=0)
    grid = [[(foreign(text), style) for text, style in row] for row in grid]
    widths = [0] * count
    for row in grid:
        for place, (text, _) in enumerate(row if len(row) == count else row[:-1]):
            widths[place] = max(widths[place], cells(text) + _GAP * (place < count - 1))
    cut_places = {wide % count, count - 1} if count else set()
    for place in {*range(count)} - cut_places:
        widths[place] = min(widths[place], max(width // 2, _GAP + 1))
    shown = list(range(count))

    def needed() -> int:
        return sum(min(widths[place], _LEAST) if place in cut_places else widths[place] for place in shown)

    for place in drop:
        if needed() > width:
            shown.remove(place)
    spare = max(width - needed(), 0)
    for place in sorted(cut_places & {*shown}):
        least = min(widths[place], _LEAST)
        widths[place] = least + min(widths[place] - least, spare)
        spare -= widths[place] - least
    rows: list[Row] = []
    for row in grid:
        room, spans = width, list[Span]()
        for place in shown[: len(row)]:
            text, style = row[place]
            last = place == shown[-1] or place == len(row) - 1
            spans.append((shorten(text, room) if last else column(text, widths[place]), style))
            room = max(room - widths[place], 0)
        rows.append(tuple(spans))
    return rows


def paragraph(text: str, width: int, style: str = "text", limit: int | None = None) -> list[Row]:
    """Untrusted text, wrapped; line breaks are kept. If it has more than `limit` lines, the last one ends in "…"."""
    lines = [line for part in text.splitlines() for line in wrap(foreign(part), width)]
    if limit is not None and len(lines) > limit:
        lines = [*lines[: limit - 1], take(lines[limit - 1], width - 1) + "…"] if limit > 0 else []
    return [((line, style),) for line in lines]


def as_it_is(line: str, width: int) -> list[str]:
    """An untrusted line with its blanks, in pieces of at most `width` cells."""
    rest, pieces = printable(line), list[str]()
    while cells(rest) > width and (first := take(rest, width)):
        pieces.append(first)
        rest = rest[len(first) :]
    return [*pieces, rest]


def labelled(
    label: str, text: str, width: int, indent: int, style: str = "text", label_style: str = "accent"
) -> list[Row]:
    """Wrapped untrusted text in a column after the label; below it for long labels and on narrow screens."""
    rows: list[Row] = []
    indent = indent if width >= _NARROW else 2
    if cells(label) >= indent:
        rows, label = [((label, label_style),)], ""
    for line in wrap(foreign(text), max(width - indent, 1)):
        rows.append(((label.ljust(indent), label_style), (line, style)))
        label = ""
    return rows


@dataclass(frozen=True)
class Entry:
    """An entry of a list: its value, and its rows. Without a value it is a heading, which cannot be selected."""

    value: Any
    rows: tuple[Row, ...]


def inner_width(width: int) -> int:
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
