"""Names of styles and what they look like in colour and without; and the way from Unicode to ASCII."""

from __future__ import annotations

from functools import lru_cache

from rich.style import Style

# A row is a line of the screen: spans of (text, style name).
Span = tuple[str, str]
Row = tuple[Span, ...]

# Only the terminal's own 16 colours: the user's theme holds, and the escape sequences are short.
COLOUR: dict[str, Style] = {
    "text": Style(),
    "bold": Style(bold=True),
    "dim": Style(dim=True),
    "accent": Style(color="cyan"),
    "good": Style(color="green"),
    "warn": Style(color="yellow"),
    "bad": Style(color="red", bold=True),
    "compute": Style(color="cyan"),  # time in which the model is computed
    "wait": Style(color="yellow"),  # time in which it waits for data
    "overhead": Style(color="blue"),  # copying, logging, saving, and what is left over
    "used": Style(color="cyan"),
    "others": Style(color="magenta"),
    "trend": Style(color="cyan"),
    "key": Style(bold=True),
    "select": Style(reverse=True),
}

MONOCHROME: dict[str, Style] = {
    **{name: Style() for name in COLOUR},
    "bold": Style(bold=True),
    "dim": Style(dim=True),
    "good": Style(bold=True),
    "warn": Style(bold=True),
    "bad": Style(bold=True, reverse=True),
    "key": Style(bold=True),
    "select": Style(reverse=True),
}

# status: (symbol, style). A status is always symbol, word and colour together.
STATUS: dict[str, tuple[str, str]] = {
    "preparing": ("◐", "accent"),
    "training": ("●", "good"),
    "evaluating": ("●", "accent"),
    "checkpointing": ("●", "accent"),
    "paused": ("‖", "warn"),
    "stopping": ("◐", "warn"),
    "done": ("✔", "good"),
    "stopped": ("■", "warn"),
    "failed": ("✖", "bad"),
    "interrupted": ("■", "warn"),
    "terminated": ("■", "warn"),
    "lost": ("?", "bad"),
}


def status_span(status: str) -> Span:
    """The symbol and the word of a status."""
    symbol, style = STATUS.get(status, ("?", "text"))
    return f"{symbol} {status}", style


_ASCII = str.maketrans(
    {
        **dict(zip("●◐‖■✔✖▸", "*o=#+x>", strict=True)),
        **dict(zip("━╸─│╭╮╰╯├┤┼", "=>-|++++[]+", strict=True)),
        **dict(zip("█▉▊▋▌▍▎▏▒░", "#####   x.", strict=True)),
        **dict(zip("▁▂▃▄▅▆▇", "_.-=+*%", strict=True)),
        **dict(zip("°…·↑↓→’“”", ' ~-^v>\'""', strict=True)),
    }
)
_BRAILLE = range(0x2800, 0x2900)
_BRAILLE_TOP = 0b00011011  # the dots of the two upper rows
_BRAILLE_BOTTOM = 0b11100100


@lru_cache(maxsize=1024)
def to_ascii(text: str) -> str:
    """The same text in ASCII, cell for cell."""
    if text.isascii():
        return text
    text = text.translate(_ASCII)
    return text if text.isascii() else "".join(_ascii_char(char) for char in text)


def _ascii_char(char: str) -> str:
    code = ord(char)
    if code < 128:
        return char
    if code in _BRAILLE:
        dots = code - _BRAILLE.start
        top, bottom = dots & _BRAILLE_TOP, dots & _BRAILLE_BOTTOM
        return (":" if bottom else "'") if top else ("." if bottom else " ")
    from .rows import cells

    return "?" * cells(char)


def ascii_rows(rows: list[Row]) -> list[Row]:
    """Every row in ASCII."""
    return [tuple((to_ascii(text), style) for text, style in row) for row in rows]
