"""The home screen: this machine, the workloads and the runs."""

from __future__ import annotations

import time
from dataclasses import dataclass

from ndd_engine.text import MISSING, printable

from .entries import RunRow, StartRow
from .frame import Keys, footer_row, framed, inner_width
from .rows import BLANK, ends, foreign, paragraph, rule, shorten
from .style import Row, Span, status_span

KEYS: Keys = (
    ("enter", "open"),
    ("↑↓", "select"),
    ("w", "wizard"),
    ("r", "refresh"),
    ("?", "help"),
    ("q", "quit"),
)
DETECTING = "detecting hardware…"
SLOGAN = "train PyTorch models and see where the time goes"
_LOADING: Row = (("loading…", "dim"),)


@dataclass(frozen=True, slots=True)
class HomeState:
    """machine, workloads and runs are None while they are loaded. chosen: index over workloads, then runs."""

    machine: tuple[str, ...] | None = None
    workloads: tuple[StartRow, ...] | None = None
    runs: tuple[RunRow, ...] | None = None
    chosen: int = 0
    message: str | None = None
    bad: bool = False

    @property
    def entries(self) -> list[StartRow | RunRow]:
        """The workloads, then the runs."""
        return [*(self.workloads or ()), *(self.runs or ())]


def home_rows(state: HomeState, width: int, height: int) -> list[Row]:
    """Exactly `height` rows of exactly `width` cells; the selected entry is always visible."""
    inner = inner_width(width)
    bottom: list[Row] = [footer_row(KEYS, inner)]
    if state.message:
        style = "bad" if state.bad else "accent"
        bottom = [*paragraph(state.message, inner, style, max(height // 2, 1)), *bottom]
    top: list[Row] = [ends((("ndd-console", "bold"),), ((SLOGAN, "dim"),), inner)]
    machine = (DETECTING,) if state.machine is None else state.machine
    entries, chosen = _entries(state, inner)
    room = height - len(bottom) - len(top)
    # The list of entries has priority over the machine.
    shown = min(len(machine), max(room - min(len(entries), 8) - 2, 0))
    if shown:
        style = "dim" if state.machine is None else "text"
        top += [BLANK, rule("this machine", inner)]
        top += [((shorten(printable(line), inner), style),) for line in machine[:shown]]
        room -= shown + 2
        if room > len(entries) and height >= 20:
            top.append(BLANK)
            room -= 1
    start = _window(chosen, len(entries), max(room, 1))
    return framed([*top, *entries[start : start + max(room, 0)]], bottom, width, height)


def _window(chosen: int, count: int, room: int) -> int:
    """The first visible line of the list, such that the selected one is visible."""
    return min(max(chosen - room + 2, 0), max(count - room, 0), max(chosen, 0))


def _entries(state: HomeState, width: int) -> tuple[list[Row], int]:
    """All lines of the list, and the index of the selected one."""
    lines: list[Row] = [rule("start", width)]
    at = 0
    if state.workloads is None:
        lines.append(_LOADING)
    names = max((len(row.name) for row in state.workloads or ()), default=0)
    titles = max((len(row.title) for row in state.workloads or ()), default=0)
    for index, start in enumerate(state.workloads or ()):
        if index == state.chosen:
            at = len(lines)
        lines.append(_start_row(start, names, titles, index == state.chosen, width))
    lines += [BLANK, rule("runs", width)]
    if state.runs is None:
        lines.append(_LOADING)
    elif not state.runs:
        lines.append((("no runs yet", "dim"),))
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
    """Local date and time: "03-14 15:09"."""
    return MISSING if t is None else time.strftime("%m-%d %H:%M", time.localtime(t))
