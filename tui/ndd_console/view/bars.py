"""Bars, sparklines and line graphs drawn with characters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from ndd_engine.text import finite

from .rows import cells
from .style import Row

_EIGHTHS = " ▏▎▍▌▋▊▉"
_LEVELS = "▁▂▃▄▅▆▇█"
# Bits of a Braille character from top to bottom, for its left and right column.
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_BRAILLE = 0x2800

Points = Sequence[tuple[int, float]]


def within(share: object) -> float:
    """A share limited to 0..1; 0 if it is no number."""
    return min(max(finite(share) or 0.0, 0.0), 1.0)


def bar(share: float, width: int) -> str:
    """A bar of `share` (0..1), padded to `width` cells; resolution: an eighth of a cell."""
    eighths = round(within(share) * width * 8)
    if eighths == 0 and share > 0 and width > 0:
        eighths = 1  # a small share is still visible
    full, part = divmod(eighths, 8)
    text = "█" * full + (_EIGHTHS[part] if part else "")
    return text.ljust(width)


def progress_bar(share: float, width: int) -> Row:
    """A thick line for the completed share, a thin one for the rest."""
    halves = round(within(share) * width * 2)
    full, half = divmod(halves, 2)
    done = "━" * full + ("╸" if half else "")
    return ((done, "accent"), ("─" * (width - len(done)), "dim"))


def progress_line(share: float, text: str, width: int) -> Row:
    """A progress bar with its figures after it."""
    return (*progress_bar(share, max(width - cells(text) - 1, 1)), (f" {text}", "text"))


def stacked_bar(parts: Sequence[tuple[float, str, str]], width: int) -> Row:
    """One bar of several parts (share, character, style); the shares add up to at most 1."""
    out: list[tuple[str, str]] = []
    edge = 0.0
    used = 0
    for share, char, style in parts:
        edge += within(share)
        count = min(max(round(edge * width), used + (1 if share > 0 else 0)), width) - used
        out.append((char * count, style))
        used += count
    return (*out, (" " * (width - used), "text"))


def finite_values(points: Points) -> list[float]:
    """The finite values of the points."""
    return [value for _, value in points if math.isfinite(value)]


def bucket(values: Sequence[float], count: int) -> list[float]:
    """Downsample to at most `count` values, each the mean of its neighbours."""
    size = len(values)
    if count < 1:
        return []
    if size <= count:
        return list(values)
    edges = [index * size // count for index in range(count + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]


def sparkline(values: Sequence[float], width: int) -> str:
    """The values as one line of blocks, scaled to their range and padded to `width`."""
    shown = bucket(values, max(width, 0))
    if not shown:
        return " " * max(width, 0)
    low, high = min(shown), max(shown)
    scale = (len(_LEVELS) - 1) / (high - low) if high > low else 0.0
    middle = 0.0 if scale else 3.0
    return "".join(_LEVELS[int((value - low) * scale + middle + 0.5)] for value in shown).ljust(width)


def levels(shares: Sequence[float], width: int) -> str:
    """One block for each share (0..1), such as the load of each core."""
    top = len(_LEVELS) - 1
    return "".join(_LEVELS[round(within(share) * top)] for share in shares[: max(width, 0)])


def graph(values: Sequence[float], width: int, height: int) -> list[str]:
    """The values as a Braille line graph of `height` rows, top row first."""
    if not values or width < 1 or height < 1:
        return [" " * max(width, 0)] * max(height, 0)
    columns, dots = width * 2, height * 4
    shown = bucket(values, columns)
    low, high = min(shown), max(shown)
    scale = (dots - 1) / (high - low) if high > low else 0.0
    grid = [[0] * width for _ in range(height)]
    stretch = (len(shown) - 1) / (columns - 1)
    last: int | None = None
    for column in range(columns):
        place = column * stretch
        index = int(place)
        value = shown[index]
        if index + 1 < len(shown):
            value += (shown[index + 1] - value) * (place - index)
        y = dots - 1 - round((value - low) * scale) if scale else dots // 2
        # Fill the gap to the previous dot so that steep lines stay connected.
        start = y if last is None else (last + 1 if y > last else last - 1 if y < last else y)
        for dot in range(min(start, y), max(start, y) + 1):
            grid[dot // 4][column // 2] |= _DOTS[column % 2][dot % 4]
        last = y
    return ["".join(chr(_BRAILLE + cell) if cell else " " for cell in line) for line in grid]
