"""Writes what a terminal showed as one animated SVG file, without scripts, fonts or anything else from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby

import pyte

# Size of a character, and the margin around the terminal, in user units.
CELL, LINE, MARGIN = 8.4, 18, 12
FONT = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"
FOREGROUND, BACKGROUND = "#d8dee9", "#161b22"
# pyte's names of the terminal's colours.
COLOURS = {
    "black": "#484f58", "red": "#ff7b72", "green": "#56d364", "brown": "#e3b341", "blue": "#79c0ff",
    "magenta": "#d2a8ff", "cyan": "#56d4dd", "white": "#b1bac4", "brightblack": "#6e7681",
    "brightred": "#ffa198", "brightgreen": "#7ee787", "brightbrown": "#f2cc60", "brightblue": "#a5d6ff",
    "brightmagenta": "#e2c5ff", "brightcyan": "#b3f0ff", "brightwhite": "#f0f6fc",
}  # fmt: skip

Style = tuple[str, str, bool]  # foreground, background or "", bold
Rows = tuple[tuple[tuple[str, Style], ...], ...]


@dataclass(frozen=True, slots=True)
class Frame:
    """The screen at a moment. t: seconds since the start."""

    t: float
    rows: Rows


def rows_of(screen: pyte.Screen) -> Rows:
    """The rows of the screen, each as runs of text in one style; without spaces at the end."""
    rows = []
    for y in range(screen.lines):
        line = screen.buffer[y]
        cells = [(line[x].data, _style(line[x])) for x in range(screen.columns)]
        if y == screen.cursor.y and not screen.cursor.hidden:
            text, (foreground, _, bold) = cells[min(screen.cursor.x, screen.columns - 1)]
            cells[min(screen.cursor.x, screen.columns - 1)] = (text, (BACKGROUND, foreground, bold))
        runs = [
            ("".join(text for text, _ in group), style)
            for style, group in groupby(cells, lambda cell: cell[1])
        ]
        while runs and not runs[-1][0].strip() and not runs[-1][1][1]:
            runs.pop()
        rows.append(tuple(runs))
    return tuple(rows)


def _style(cell: pyte.screens.Char) -> Style:
    foreground = _colour(cell.fg, FOREGROUND)
    background = _colour(cell.bg, "")
    if cell.reverse:
        foreground, background = background or BACKGROUND, foreground
    return foreground, background, cell.bold


def _colour(name: str, default: str) -> str:
    return default if name == "default" else COLOURS.get(name, f"#{name}")


def animated(frames: Sequence[Frame], hold_s: float, title: str) -> str:
    """The frames as SVG that plays for ever. hold_s: how long the last one is shown."""
    columns = max(sum(len(text) for text, _ in row) for frame in frames for row in frame.rows)
    width, height = columns * CELL, len(frames[0].rows) * LINE
    length = frames[-1].t - frames[0].t + hold_s
    distinct = list(dict.fromkeys(row for frame in frames for row in frame.rows if row))
    numbers = {row: number for number, row in enumerate(distinct)}
    styles = list(dict.fromkeys(style for row in distinct for _, style in row))
    starts = [
        f"{100 * (frame.t - frames[0].t) / length:.3f}%{{transform:translateY({-place * height}px)}}"
        for place, frame in enumerate(frames)
    ]
    css = [
        f"text{{font:14px {FONT}}}",
        *(
            f".s{place}{{fill:{fg}{';font-weight:bold' if bold else ''}}}"
            for place, (fg, _, bold) in enumerate(styles)
        ),
        # Where nothing moves, the last frame is shown.
        f".film{{transform:translateY({(1 - len(frames)) * height}px)}}",
        f".film{{animation:play {length:.2f}s steps(1,end) infinite}}",
        "@media(prefers-reduced-motion:reduce){.film{animation:none}}",
        f"@keyframes play{{{''.join(starts)}}}",
    ]
    rows = (_row(row, number, styles) for row, number in numbers.items())
    film = (
        "".join(
            f'<use href="#r{numbers[row]}" y="{place * height + y * LINE}"/>'
            for y, row in enumerate(frame.rows)
            if row
        )
        for place, frame in enumerate(frames)
    )
    whole = (width + 2 * MARGIN, height + 2 * MARGIN)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" xml:space="preserve" '
        f'viewBox="0 0 {whole[0]:g} {whole[1]:g}" width="{whole[0]:g}">'
        f"<title>{escape(title)}</title><style>{''.join(css)}</style><defs>{''.join(rows)}</defs>"
        f'<rect width="100%" height="100%" rx="8" fill="{BACKGROUND}"/>'
        f'<svg x="{MARGIN}" y="{MARGIN}" width="{width:g}" height="{height:g}">'
        f'<g class="film">{"".join(film)}</g></svg></svg>\n'
    )


def _row(row: tuple[tuple[str, Style], ...], number: int, styles: Sequence[Style]) -> str:
    parts, x = [], 0
    for text, style in row:
        place, width = f"{x * CELL:g}", f"{len(text) * CELL:g}"
        if style[1]:
            parts.append(f'<rect x="{place}" width="{width}" height="{LINE}" fill="{style[1]}"/>')
        if text.strip():
            parts.append(
                f'<text class="s{styles.index(style)}" x="{place}" y="{LINE - 5}" textLength="{width}" '
                f'lengthAdjust="spacingAndGlyphs">{escape(text, quote=False)}</text>'
            )
        x += len(text)
    return f'<g id="r{number}">{"".join(parts)}</g>'
