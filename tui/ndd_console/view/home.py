"""The home screen: this machine, what can be started, and the runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from ndd_console.screens.interfaces import RunRow, StartRow
from ndd_engine.text import MISSING

from .live import Keys, footer_row
from .rows import BLANK, ends, fit, foreign, rule, shorten, wrap
from .style import Row, Span, status_span

KEYS: Keys = (
    ("enter", "open"),
    ("↑↓", "choose"),
    ("w", "wizard"),
    ("r", "refresh"),
    ("?", "help"),
    ("q", "quit"),
)
LOOKING = "looking at the hardware…"


@dataclass(frozen=True, slots=True)
class HomeState:
    """card, runs and workloads are None while they are read. chosen: index over workloads, then runs."""

    card: tuple[str, ...] | None
    workloads: tuple[StartRow, ...] | None
    runs: tuple[RunRow, ...] | None
    chosen: int = 0
    message: str | None = None
    bad: bool = False


def home_rows(state: HomeState, width: int, height: int) -> list[Row]:
    """Exactly `height` rows of exactly `width` cells; the chosen entry is always among them."""
    margin = 1 if width >= 40 else 0
    inner = max(width - 2 * margin, 1)
    message: list[Row] = []
    if state.message:
        style = "bad" if state.bad else "accent"
        lines = [line for part in state.message.splitlines() for line in wrap(foreign(part), inner)]
        message = [((line, style),) for line in lines[: max(height // 2, 1)]]
    top: list[Row] = [
        ends((("ndd-console", "bold"),), (("train, and see where the time goes", "dim"),), inner)
    ]
    lines_of_gpu = [LOOKING] if state.card is None else [foreign(line) for line in state.card]
    entries, chosen = _entries(state, inner)
    room = height - 1 - len(message) - len(top)
    # The machine is described as far as the list leaves room for it.
    about = min(len(lines_of_gpu), max(room - min(len(entries), 8) - 2, 0))
    if about:
        top += [BLANK, rule("this machine", inner)]
        top += [
            ((shorten(line, inner), "dim" if state.card is None else "text"),)
            for line in lines_of_gpu[:about]
        ]
        room -= about + 2
        if room > len(entries) and height >= 20:
            top.append(BLANK)
            room -= 1
    start = _window(chosen, len(entries), max(room, 1))
    body = entries[start : start + max(room, 0)]
    rows = [*top, *body]
    rows += [BLANK] * (height - 1 - len(message) - len(rows))
    rows = [*rows[: max(height - 1 - len(message), 0)], *message, footer_row(KEYS, inner)]
    rows = rows[-height:] if height > 0 else []
    if margin:
        rows = [((" ", "text"), *row) for row in rows]
    return [fit(row, width) for row in rows]


def _window(chosen: int, count: int, room: int) -> int:
    """The first line to show so that the chosen one is seen."""
    return min(max(chosen - room + 2, 0), max(count - room, 0), max(chosen, 0))


def _entries(state: HomeState, width: int) -> tuple[list[Row], int]:
    """All lines of the list, and which of them is chosen."""
    lines: list[Row] = [rule("start", width)]
    at = 0
    if state.workloads is None:
        lines.append((("reading…", "dim"),))
    names = max((len(row.name) for row in state.workloads or ()), default=0)
    titles = max((len(row.title) for row in state.workloads or ()), default=0)
    for index, start in enumerate(state.workloads or ()):
        if index == state.chosen:
            at = len(lines)
        lines.append(_start_row(start, names, titles, index == state.chosen, width))
    lines += [BLANK, rule("runs", width)]
    if state.runs is None:
        lines.append((("reading…", "dim"),))
    elif not state.runs:
        lines.append((("no runs here yet", "dim"),))
    first = len(state.workloads or ())
    longest = max((len(row.name) for row in state.runs or ()), default=0)
    kinds = max((len(row.workload) for row in state.runs or ()), default=0)
    for index, run in enumerate(state.runs or ()):
        chosen = first + index == state.chosen
        if chosen:
            at = len(lines)
        lines.append(_run_row(run, longest, kinds, chosen, width))
    return lines, at


def _lead(name: str, chosen: bool) -> tuple[Span, ...]:
    return (("▸ " if chosen else "  ", "accent"), (name, "select" if chosen else "bold"), ("  ", "text"))


def _start_row(row: StartRow, names: int, titles: int, chosen: bool, width: int) -> Row:
    lead = _lead(foreign(row.name).ljust(names), chosen)
    room = width - names - 4
    title = foreign(row.title)
    text = foreign(row.text)
    if titles + 3 + 12 > room or not text:
        return (*lead, (shorten(title, room), "text"))
    return (*lead, (title.ljust(titles) + "   ", "text"), (shorten(text, room - titles - 3), "dim"))


def _run_row(row: RunRow, names: int, kinds: int, chosen: bool, width: int) -> Row:
    names = min(names, max(width - 20, 8), 32)
    symbol, style = status_span(row.status)
    spans: list[Span] = [*_lead(shorten(foreign(row.name), names).ljust(names), chosen)]
    spans.append((symbol.ljust(16), style))
    room = width - names - 20
    step = f"step {row.step:,}" + (f" of {row.total_steps:,}" if row.total_steps else "")
    for text, space in ((step, 24), (foreign(row.best) or MISSING, 20), (when(row.started_t), 14)):
        if room < space:
            break
        spans.append((text.ljust(space), "text" if text != MISSING else "dim"))
        room -= space
    if room >= kinds:
        spans.append((foreign(row.workload), "dim"))
    return tuple(spans)


def when(t: float | None) -> str:
    """A moment by the local clock: "03-14 15:09"."""
    return MISSING if t is None else time.strftime("%m-%d %H:%M", time.localtime(t))


def entry_count(workloads: Sequence[StartRow] | None, runs: Sequence[RunRow] | None) -> int:
    """How many entries can be chosen."""
    return len(workloads or ()) + len(runs or ())
