"""What a page is made of. Both forms, HTML and text, render the same blocks, so they say the same.

Texts are as recorded: whoever renders them makes them safe. x is always in seconds of the run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# How the values of an axis are written; "plain" has its unit in `unit`.
Kind = Literal["plain", "share", "bytes", "seconds", "ratio"]
Tone = Literal["", "note", "good", "warn", "bad"]


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph."""

    text: str
    tone: Tone = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """Names and values."""

    rows: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Table:
    """A table. right: columns of figures. wide: the column that takes what room there is, the last one by default."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: frozenset[int] = frozenset()
    note: str = ""
    wide: int = -1


@dataclass(frozen=True, slots=True)
class Card:
    """A finding: its title, what stands beside it, and lines of (label, text)."""

    title: str
    badges: tuple[str, ...]
    rows: tuple[tuple[str, str], ...]
    tone: Tone
    verdict: bool = False


@dataclass(frozen=True, slots=True)
class Bars:
    """Shares (0..1) beside each other: (label, share, text, colour)."""

    title: str
    rows: tuple[tuple[str, float, str, str], ...]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a plot: pieces of (x, y), and where it is a mean of several values the pieces (x, low, high)."""

    name: str
    colour: str
    pieces: tuple[tuple[tuple[float, float], ...], ...]
    bands: tuple[tuple[tuple[float, float, float], ...], ...] = ()
    dots: bool = False
    mean: float | None = None
    dashed: bool = False

    @property
    def points(self) -> list[tuple[float, float]]:
        return [point for piece in self.pieces for point in piece]


@dataclass(frozen=True, slots=True)
class Time:
    """The axis that all plots over time share. steps: (x, optimizer step), rising in x. quiet: paused stretches."""

    length_s: float
    steps: tuple[tuple[float, float], ...] = ()
    quiet: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Lines:
    """Values over time. zero: the axis begins at 0. log: a logarithmic axis."""

    title: str
    kind: Kind
    unit: str
    lines: tuple[Line, ...]
    time: Time
    zero: bool = False
    log: bool = False
    note: str = ""
    height: int = 190


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of a stack: its share (0..1) by the number of the column; share: of the whole run."""

    name: str
    colour: str
    values: dict[int, float]
    share: float


@dataclass(frozen=True, slots=True)
class Stack:
    """Shares of time on top of each other, `width_s` seconds a column; a column that is missing was not measured."""

    title: str
    layers: tuple[Layer, ...]
    columns: tuple[int, ...]
    width_s: float
    time: Time
    top: float = 1.0
    note: str = ""


@dataclass(frozen=True, slots=True)
class SpanRow:
    """What happened of one kind: (begin, end, what) each; end equals begin for a moment."""

    name: str
    colour: str
    spans: tuple[tuple[float, float, str], ...]


@dataclass(frozen=True, slots=True)
class Spans:
    """Rows of moments and stretches on the time axis."""

    title: str
    rows: tuple[SpanRow, ...]
    time: Time


@dataclass(frozen=True, slots=True)
class IntervalRow:
    """A ratio with its interval, and what it led to."""

    name: str
    ratio: float
    low: float
    high: float
    verdict: str
    tone: Tone


@dataclass(frozen=True, slots=True)
class Intervals:
    """Ratios with their intervals; the line is at 1."""

    title: str
    rows: tuple[IntervalRow, ...]
    note: str = ""


Block = Text | Facts | Table | Card | Bars | Lines | Stack | Spans | Intervals


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page. key: its anchor."""

    key: str
    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Page:
    """The whole. status: (word, tone); subtitle: one line under the name; made: when and of what."""

    name: str
    subtitle: str
    status: tuple[str, Tone]
    made: str
    sections: tuple[Section, ...]
