"""What is shown, as blocks, and figures as text. HTML, text and screens are rendered from the same blocks.

Texts are as recorded; the renderers escape them. x is always in seconds since the start of the run.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from ndd_engine.diagnose.view import LEAST_REST
from ndd_engine.text import MISSING, counted, duration, factor, finite, foreign, number, percent, size, times

# How values are formatted; "plain" values carry a unit of their own.
Kind = Literal["plain", "share", "bytes", "seconds"]


def ns(value: object) -> str:
    known = finite(value)
    return MISSING if known is None else duration(known * 1e-9)


def small(value: float | None, digits: int = 3) -> str:
    """A number that may be tiny: 0.832, 0.0001, 3e-06."""
    if value is None or value == 0 or not abs(value) < 1e-3:
        return number(value, digits)
    return f"{value:.3g}"


def whole_percent(share: float | None) -> str:
    """A share where there is little room: "57 %"; small ones: "<1 %"."""
    share = finite(share)
    if share is None:
        return MISSING
    return "<1 %" if 0 < share < 0.005 else f"{share * 100:.0f} %"


def formatter(kind: Kind, unit: str = "") -> Callable[[float | None], str]:
    """A function that formats one value with its unit."""
    if kind == "plain":
        return lambda value: small(value, 4) + (f" {unit}" if unit and value is not None else "")
    return {"share": percent, "bytes": size, "seconds": duration}[kind]


def at_most(ceiling: float) -> str:
    """ "at most 1.42x", "at most 2.3x": an upper bound needs no more digits. Ceilings end at 100."""
    if ceiling >= 1 / LEAST_REST:
        return f"{ceiling:.0f}x or more"
    return f"at most {ceiling:.1f}x" if ceiling >= 2 else f"at most {times(ceiling)}"


def interval_text(ratio: float | None, low: float | None, high: float | None) -> str:
    """ "1.42x (1.35 to 1.49)"; "" without a ratio."""
    if ratio is None:
        return ""
    if low is None or high is None:
        return times(ratio)
    return f"{times(ratio)} ({factor(low)} to {factor(high)})"


def moment(t: float | None) -> str:
    """Local date and time: "2026-03-14 15:09"."""
    with contextlib.suppress(ValueError, OverflowError, OSError):  # not a time
        return MISSING if t is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(t))
    return MISSING


Tone = Literal["", "note", "good", "warn", "bad"]
Point = tuple[float, float]
# Bound of one recorded text: enough for any message a person reads.
LONGEST = 2000
TONES: dict[str, Tone] = {"good": "good", "warn": "warn", "bad": "bad"}  # styles of the screens
# Labels of rows whose text is a command, and a place in a file.
COMMAND = "measure with"
PLACE = "in"


def safe(text: object) -> str:
    """The text on one line, without control characters, up to LONGEST characters."""
    return clip(foreign(text), LONGEST)


def clip(text: str, length: int) -> str:
    """The first `length` characters, with "…" where the text was cut."""
    return text if len(text) <= length else text[: length - 1] + "…"


class Text(NamedTuple):
    """A paragraph."""

    text: str
    tone: Tone = ""


class Diff(NamedTuple):
    """The lines of a unified diff, without those of its end that are `more`."""

    lines: tuple[str, ...]
    more: int = 0

    @property
    def toned(self) -> list[tuple[str, Tone]]:
        """(line, tone) of each line, and how many are left out."""
        tones: dict[str, Tone] = {"+": "good", "-": "bad", "@": "note"}
        shown: list[tuple[str, Tone]] = [(line, tones.get(line[:1], "")) for line in self.lines]
        return [*shown, (f"… {counted(self.more, 'more line')}", "note")] if self.more else shown


class NamedValues(NamedTuple):
    """Names and values; a row without a name continues the one above. warn: names that need attention."""

    rows: tuple[tuple[str, str], ...]
    title: str = ""
    warn: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls, *rows: tuple[str, str | None], title: str = "", warn: frozenset[str] = frozenset()
    ) -> NamedValues:
        """Without the rows that have no text."""
        return cls(tuple((name, text) for name, text in rows if text), title, warn)


class Table(NamedTuple):
    """A table. right: indices of right-aligned columns. wide: index of the column that takes the spare width.

    warn: indices of rows that need attention.

    Where there is little room, the columns after `wide` are left out first. older: rows before these, which a page
    shows when it is asked to.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: frozenset[int] = frozenset()
    note: str = ""
    wide: int = -1
    warn: frozenset[int] = frozenset()
    older: tuple[tuple[str, ...], ...] = ()

    def newest(self, limit: int) -> Table:
        """The table with its last `limit` rows and a note if there were more, which are the older ones."""
        note = f"The newest {limit} of {len(self.rows):,}." if len(self.rows) > limit else ""
        return self._replace(rows=self.rows[-limit:], note=note, older=self.rows[:-limit])


class Verdict(NamedTuple):
    """A finding. ceiling: "at most 1.42x" or "". main: whether it is the bottleneck. rows: (label, text).

    badges: the cause, how certain it is, and its cost.
    """

    title: str
    badges: tuple[str, ...]
    ceiling: str
    rows: tuple[tuple[str, str], ...]
    tone: Tone
    main: bool = False


class Bars(NamedTuple):
    """Horizontal bars: (label, share 0..1, text, colour)."""

    title: str
    rows: tuple[tuple[str, float, str, str], ...]
    note: str = ""


class Time(NamedTuple):
    """The time axis that plots share. steps: (x, optimizer step), rising in x. paused: (begin, end) pairs."""

    length_s: float
    steps: tuple[Point, ...] = ()
    paused: tuple[Point, ...] = ()


class Series(NamedTuple):
    """A row of a plot's legend. points: (x, value), for the plot in text."""

    name: str
    colour: str
    figures: tuple[str, ...]
    points: Sequence[Point]


class Line(NamedTuple):
    """A line in pieces of (x, y). bands: pieces of (x, low, high) where a point is the mean of several values."""

    name: str
    colour: str
    pieces: tuple[tuple[Point, ...], ...]
    bands: tuple[tuple[tuple[float, float, float], ...], ...] = ()
    dots: bool = False
    mean: float | None = None

    @property
    def points(self) -> list[Point]:
        return [point for piece in self.pieces for point in piece]

    @property
    def values(self) -> list[float]:
        """All values, with the ends of the bands."""
        ends = [value for band in self.bands for _, *pair in band for value in pair]
        return [value for _, value in self.points] + ends


@dataclass(frozen=True, slots=True)
class Curves:
    """Values over time. zero: the axis starts at 0. log: a logarithmic axis."""

    columns: ClassVar[tuple[str, ...]] = ("first", "lowest", "mean", "highest", "last")
    title: str
    kind: Kind
    unit: str
    lines: tuple[Line, ...]
    time: Time
    zero: bool = False
    log: bool = False
    note: str = ""
    height: int = 190

    @property
    def legend(self) -> list[Series]:
        """Every line with its figures."""
        form = formatter(self.kind)
        unit = f" ({self.unit})" if self.unit else ""
        out = []
        for line in self.lines:
            if points := line.points:
                figures = (points[0][1], min(line.values), line.mean, max(line.values), points[-1][1])
                out.append(Series(line.name + unit, line.colour, tuple(map(form, figures)), points))
        return out


class Layer(NamedTuple):
    """A layer of a stack. values: share (0..1) by column. share: over the whole run."""

    name: str
    colour: str
    values: dict[int, float]
    share: float

    def mean(self, columns: Sequence[int]) -> float | None:
        return sum(self.values.get(column, 0.0) for column in columns) / len(columns) if columns else None


@dataclass(frozen=True, slots=True)
class Stack:
    """Shares of time as stacked areas. slots: the measured columns, each `width_s` wide. top: end of the axis."""

    columns: ClassVar[tuple[str, ...]] = ("whole run", "first quarter", "last quarter")
    title: str
    layers: tuple[Layer, ...]
    slots: tuple[int, ...]
    width_s: float
    time: Time
    top: float = 1.0
    note: str = ""

    @property
    def legend(self) -> list[Series]:
        """Every layer with its figures."""
        quarter = max(len(self.slots) // 4, 1)
        form = formatter("share")
        out = []
        for layer in self.layers:
            figures = (layer.share, layer.mean(self.slots[:quarter]), layer.mean(self.slots[-quarter:]))
            points = [((slot + 0.5) * self.width_s, layer.values.get(slot, 0.0)) for slot in self.slots]
            out.append(Series(layer.name, layer.colour, tuple(map(form, figures)), points))
        return out


class SpanRow(NamedTuple):
    """Events of one kind: (begin, end, text); begin equals end for a moment."""

    name: str
    colour: str
    spans: tuple[tuple[float, float, str], ...]


class Spans(NamedTuple):
    """Events on the time axis, one row per kind."""

    title: str
    rows: tuple[SpanRow, ...]
    time: Time
    note: str = ""


class NamedInterval(NamedTuple):
    """A ratio with its confidence interval."""

    name: str
    ratio: float
    low: float
    high: float
    verdict: str
    tone: Tone


class Intervals(NamedTuple):
    """Ratios with their confidence intervals around 1."""

    title: str
    rows: tuple[NamedInterval, ...]
    note: str = ""


Block = Text | Diff | NamedValues | Table | Verdict | Bars | Curves | Stack | Spans | Intervals


class ReportSection(NamedTuple):
    """A section of the report. key: its anchor."""

    key: str
    title: str
    blocks: tuple[Block, ...]


class Page(NamedTuple):
    """A report. status: (word, tone). subtitle: one line under the name. made: time and source."""

    name: str
    subtitle: str
    status: tuple[str, Tone]
    summary: Text
    made: str
    sections: tuple[ReportSection, ...]
