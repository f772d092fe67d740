"""Style names with their colour and monochrome definitions, and the fallback from Unicode to ASCII."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from rich.cells import cell_len
from rich.style import Style

# A row is a line of the screen: spans of (text, style name).
Span = tuple[str, str]
Row = tuple[Span, ...]

# Only the terminal's 16 colours, so that the user's theme applies and escape sequences stay short.
COLOUR: dict[str, Style] = {
    "text": Style(),
    "bold": Style(bold=True),
    "dim": Style(dim=True),
    "accent": Style(color="cyan"),
    "good": Style(color="green"),
    "warn": Style(color="yellow"),
    "bad": Style(color="red", bold=True),
    "compute": Style(color="cyan"),  # forward, backward, optimizer
    "wait": Style(color="yellow"),  # waiting for data
    "overhead": Style(color="blue"),  # copying, logging, evaluation, checkpoints, other
    "used": Style(color="cyan"),
    "others": Style(color="magenta"),
    "trend": Style(color="cyan"),
    "key": Style(bold=True),
}

MONOCHROME: dict[str, Style] = {
    **{name: Style() for name in COLOUR},
    "bold": Style(bold=True),
    "dim": Style(dim=True),
    "good": Style(bold=True),
    "warn": Style(bold=True),
    "bad": Style(bold=True, reverse=True),
    "key": Style(bold=True),
}


@dataclass(frozen=True, slots=True)
class Look:
    """Capabilities of the terminal.

    ssh: over a network connection, so updates are less frequent. links: it shows places in files as links (OSC 8).
    """

    ascii_only: bool = False
    monochrome: bool = False
    ssh: bool = False
    links: bool = False

    @property
    def styles(self) -> dict[str, Style]:
        return MONOCHROME if self.monochrome else COLOUR


PLAIN = Look()

# status: (symbol, style). A status is always shown as symbol, word and colour.
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
    symbol, style = STATUS.get(status, ("?", "text"))
    return f"{symbol} {status}", style


_ASCII = str.maketrans(
    {
        **dict(zip("●◐‖■✔✖", "*o=#+x", strict=True)),
        **dict(zip("━╸─│╭╮╰╯├┤┼", "=>-|++++[]+", strict=True)),
        **dict(zip("█▉▊▋▌▍▎▏▓▒░", "#####   Xx.", strict=True)),
        **dict(zip("▁▂▃▄▅▆▇▔", "_.-=+*%-", strict=True)),
        # Of the command palette, in two cells.
        "🔎": "> ",
        **dict(zip("═µ", "=u", strict=True)),
        **dict(zip("°…·↑↓→←▲▾≥≤’“”", ' ~-^v><^v><\'""', strict=True)),
    }
)
_BRAILLE = range(0x2800, 0x2900)
_BRAILLE_TOP = 0b00011011  # the dots of the two upper rows
_BRAILLE_BOTTOM = 0b11100100


@lru_cache(maxsize=1024)
def to_ascii(text: str) -> str:
    """The text in ASCII, with the same width in cells."""
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
    return "?" * cell_len(char)
