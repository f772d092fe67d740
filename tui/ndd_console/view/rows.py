"""Rows of styled text: measured, cut, padded, joined and wrapped, by terminal cells."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size

from ndd_engine.text import printable

from .style import Row, Span

BLANK: Row = ()


def cells(text: str) -> int:
    """The width of a text on the terminal."""
    return len(text) if text.isascii() else cell_len(text)


def width_of(row: Row) -> int:
    """The width of a row."""
    return sum(len(text) if text.isascii() else cell_len(text) for text, _ in row)


def cut(row: Row, start: int, end: int) -> Row:
    """The cells start..end of a row. A wide character that is cut in half becomes blank."""
    out: list[Span] = []
    x = 0
    for text, style in row:
        width = cells(text)
        stop = x + width
        if stop > start and x < end:
            if x < start or stop > end:
                text = _slice(text, width, max(start - x, 0), min(end, stop) - x)
            out.append((text, style))
        x = stop
        if x >= end:
            break
    return tuple(out)


def _slice(text: str, width: int, start: int, end: int) -> str:
    if len(text) == width:  # one cell a character
        return text[start:end]
    if start:
        head = set_cell_size(text, start)
        # set_cell_size pads where it cut a wide character in half: that half stays blank on this side too.
        kept = text[: len(head)] == head
        rest = text[len(head) :] if kept else " " + text[len(head.rstrip()) + 1 :]
        return set_cell_size(rest, end - start)
    return set_cell_size(text, end)


def fit(row: Row, width: int) -> Row:
    """The row, cut or padded to exactly `width` cells."""
    have = width_of(row)
    if have > width:
        row = cut(row, 0, width)
        have = width_of(row)
    return row if have == width else (*row, (" " * (width - have), "text"))


def ends(left: Row, right: Row, width: int) -> Row:
    """One row at the left edge, one at the right; the left one yields where there is no room."""
    room = width - width_of(right)
    if room <= 0:
        return fit(right, width)
    return (*fit(left, room), *right)


def beside(
    left: Sequence[Row], right: Sequence[Row], left_width: int, gap: int, right_width: int
) -> list[Row]:
    """Two columns of rows."""
    out: list[Row] = []
    for index in range(max(len(left), len(right))):
        first = left[index] if index < len(left) else BLANK
        second = right[index] if index < len(right) else BLANK
        out.append((*fit(first, left_width), (" " * gap, "text"), *fit(second, right_width)))
    return out


def rule(title: str, width: int, style: str = "bold", labels: str = "") -> Row:
    """A heading: its title in a line, and labels of columns at the line's right end."""
    line = width - cells(title) - 4 - cells(labels)
    if line < 0:
        return fit((("── ", "dim"), (title, style)), width)
    return (("── ", "dim"), (title, style), (" " + "─" * line, "dim"), (labels, "dim"))


def fields(items: Sequence[Span], width: int, columns: int) -> Row:
    """Spans in columns of equal width; one that is too long takes part of the next column's blank."""
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


def wrap(text: str, width: int, limit: int | None = None) -> list[str]:
    """Words over lines of at most `width` cells; a longer word is cut. A limit makes the last end in "…"."""
    width = max(width, 1)
    lines: list[str] = []
    line = ""
    for word in text.split():
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
    if limit is not None and len(lines) > limit:
        last = lines[limit - 1]
        lines = [*lines[: limit - 1], take(last, max(width - 1, 0)) + "…"] if limit > 0 else []
    return lines


def take(text: str, width: int) -> str:
    """The beginning of a text that fits."""
    used = 0
    for index, char in enumerate(text):
        used += cells(char)
        if used > width:
            return text[:index]
    return text


def shorten(text: str, width: int) -> str:
    """The text in at most `width` cells, with "…" where it was cut."""
    if cells(text) <= width:
        return text
    return take(text, width - 1) + "…" if width > 0 else ""


def foreign(text: object) -> str:
    """Text from outside, on one line and unable to steer the terminal."""
    return printable(" ".join(str(text).split()))
