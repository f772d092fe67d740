"""The home screen: this machine, the workloads and the runs."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import Literal

from ndd_engine.text import MISSING, printable

from .frame import Keys, footer_row, framed, inner_width
from .rows import BLANK, ends, entry, first_shown, foreign, paragraph, rule, shorten
from .style import Row, Span, status_span

KEYS: Keys = (
    ("enter", "open"),
    ("s", "start"),
    ("↑↓", "select"),
    ("w", "wizard"),
    ("r", "refresh"),
    ("?", "help"),
    ("q", "quit"),
)
DEFAULT_EPOCHS = 1
# While the number of epochs is asked for.
ASKING: Keys = (("0-9", "epochs"), ("enter", "start"), ("esc", "cancel"))
_CLOSE_MESSAGE: Keys = (("esc", "close message"),)
DETECTING = "detecting hardware…"
SLOGAN = "train PyTorch models and see where the time goes"
_LOADING: Row = (("loading…", "dim"),)


@dataclass(frozen=True, slots=True)
class RunRow:
    """One run. started_t: unix seconds. best: "loss 1.482", empty without an evaluation.

    training_s: seconds of training, evaluations and checkpoints included; None if unknown.
    """

    name: str
    workload: str
    status: str
    step: int
    total_steps: int
    started_t: float | None
    best: str
    live: bool
    training_s: float | None = None


@dataclass(frozen=True, slots=True)
class StartRow:
    """Something that can be trained: a built-in workload, or a configuration file or own workload of the folder.

    epochs: how long to train; None as configured, which an own workload is not.
    """

    name: str
    title: str
    text: str
    kind: Literal["workload", "file", "own"] = "workload"
    epochs: int | None = None


@dataclass(frozen=True, slots=True)
class HomeState:
    """machine, workloads and runs are None while they are loaded. chosen: index over workloads, then runs.

    asked: the entry whose number of epochs is asked for, None otherwise; typed: the digits so far.
    """

    machine: tuple[str, ...] | None = None
    workloads: tuple[StartRow, ...] | None = None
    runs: tuple[RunRow, ...] | None = None
    chosen: int = 0
    message: str | None = None
    bad: bool = False
    asked: StartRow | None = None
    typed: str = ""

    @property
    def entries(self) -> list[StartRow | RunRow]:
        """The workloads, then the runs."""
        return [*(self.workloads or ()), *(self.runs or ())]


def home_rows(state: HomeState, width: int, height: int) -> list[Row]:
    """Exactly `height` rows of exactly `width` cells; the selected entry is always visible."""
    inner = inner_width(width)
    bottom: list[Row] = [footer_row(KEYS, inner)]
    if state.asked is not None:
        name = foreign(state.asked.name)
        question = f"epochs to train {name} (default: {DEFAULT_EPOCHS}): {state.typed}_"
        bottom = [*paragraph(question, inner, "accent", max(height // 2, 1)), footer_row(ASKING, inner)]
    elif state.message:
        style = "bad" if state.bad else "accent"
        keys = (*_CLOSE_MESSAGE, *KEYS) if state.bad else KEYS
        bottom = [*paragraph(state.message, inner, style, max(height // 2, 1)), footer_row(keys, inner)]
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
    start = min(first_shown(chosen + 1, len(entries), max(room, 1)), chosen)
    return framed([*top, *entries[start : start + max(room, 0)]], bottom, width, height)


def _entries(state: HomeState, width: int) -> tuple[list[Row], int]:
    """All lines of the list, and the index of the selected one."""
    workloads, runs, chosen = state.workloads or (), state.runs or (), state.chosen
    names = max((len(row.name) for row in workloads), default=0)
    titles = max((len(row.title) for row in workloads), default=0)
    lines: list[Row] = []
    places: list[int] = []  # the line of each entry
    kind = None
    for at, row in enumerate(workloads):
        group = "built-in workloads" if row.kind == "workload" else "this folder"
        if group != kind:
            lines += [*([BLANK] if lines else []), rule(group, width)]
            kind = group
        places.append(len(lines))
        lines.append(_start_row(row, names, titles, at == chosen, width))
    if state.workloads is None:
        lines += [rule("built-in workloads", width), _LOADING]
    lines += [BLANK, rule("runs", width)]
    if not runs:
        lines.append(_LOADING if state.runs is None else (("no runs yet", "dim"),))
    names = max((len(row.name) for row in runs), default=0)
    kinds = max((len(row.workload) for row in runs), default=0)
    places += range(len(lines), len(lines) + len(runs))
    lines += [_run_row(run, names, kinds, at == chosen, width) for at, run in enumerate(runs, len(workloads))]
    return lines, places[chosen] if chosen < len(places) else 0


def _start_row(row: StartRow, names: int, titles: int, chosen: bool, width: int) -> Row:
    lead = (*entry(foreign(row.name).ljust(names), chosen), ("  ", "text"))
    room = width - names - 4
    title = foreign(row.title)
    text = foreign(row.text)
    if titles + 3 + 12 > room or not text:
        return (*lead, (shorten(title, room), "text"))
    return (*lead, (title.ljust(titles) + "   ", "text"), (shorten(text, room - titles - 3), "dim"))


def _run_row(row: RunRow, names: int, kinds: int, chosen: bool, width: int) -> Row:
    names = min(names, max(width - 20, 8), 32)
    symbol, style = status_span(row.status)
    name = shorten(foreign(row.name), names).ljust(names)
    spans: list[Span] = [*entry(name, chosen), ("  ", "text"), (symbol.ljust(16), style)]
    room = width - names - 20
    # A run that ended while it was prepared has no steps.
    step = f"step {row.step:,} of {row.total_steps:,}" if row.total_steps else "not started"
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
    with contextlib.suppress(ValueError, OverflowError, OSError):  # not a time
        return MISSING if t is None else time.strftime("%m-%d %H:%M", time.localtime(t))
    return MISSING
