"""The page of what the user's own training code records: scalars by log(), and samples of the newest evaluation."""

from __future__ import annotations

from ndd_console.words.figures import small
from ndd_engine.record.snapshot import Snapshot
from ndd_engine.text import foreign, printable

from .bars import finite_values, sparkline
from .rows import cells, column, paragraph, rule, take
from .style import Row

_NAME = 28
_VALUE = 12
_NOTHING = "This run records no values of its own: see log() and samples in the guide to your own model."


def has_own_values(snapshot: Snapshot) -> bool:
    """Whether the page has anything to show."""
    return bool(snapshot.scalars) or snapshot.texts is not None


def own_values_lines(snapshot: Snapshot, width: int) -> list[Row]:
    """Each scalar with its latest value and trend, then the samples as they are, apart from control characters."""
    rows: list[Row] = []
    if snapshot.scalars:
        rows.append(rule("logged values", width))
    longest = max((cells(foreign(name)) for name, _ in snapshot.scalars), default=0) + 1
    room = min(longest, _NAME, max(width // 2, 1))
    for name, trend in snapshot.scalars:
        value = column(small(trend[-1][1], 4) if trend else "", _VALUE)
        line = sparkline(finite_values(trend), max(width - room - _VALUE, 0))
        rows.append(((column(foreign(name), room), "text"), (value, "accent"), (line, "trend")))
    if (texts := snapshot.texts) is not None:
        rows += [()] if rows else []
        rows.append(rule(f"samples at step {texts.step:,}", width))
        for index, text in enumerate(texts.texts, 1):
            rows += [((f"{index}", "dim"),), *_as_it_is(text, width)]
    return rows or paragraph(_NOTHING, width, "dim")


def _as_it_is(text: str, width: int) -> list[Row]:
    """Untrusted text with its line breaks and blanks; long lines continue on the next one."""
    rows: list[Row] = []
    for line in map(printable, text.split("\n")):
        rest = line
        while cells(rest) > width and (first := take(rest, width)):
            rows.append(((first, "text"),))
            rest = rest[len(first) :]
        rows.append(((rest, "text"),))
    return rows
