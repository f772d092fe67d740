"""The home screen: this machine, the workloads and the runs."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import Literal

from ndd_engine.text import MISSING, foreign, printable

from .frame import Entry
from .rows import BLANK, cells, column, ends, rule, shorten
from .style import Row, Span, status_span

DEFAULT_EPOCHS = 1
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
    """machine, workloads and runs are None while they are loaded."""

    machine: tuple[str, ...] | None = None
    workloads: tuple[StartRow, ...] | None = None
    runs: tuple[RunRow, ...] | None = None


def heading(state: HomeState, width: int, room: int) -> list[Row]:
    """The title and the machine, in at most `room` rows: the list has priority over the machine."""
    rows: list[Row] = [ends((("ndd-console", "bold"),), ((SLOGAN, "dim"),), width)]
    machine = (DETECTING,) if state.machine is None else state.machine
    style = "dim" if state.machine is None else "text"
    if room > 3:
        rows += [BLANK, rule("this machine", width)]
        rows += [((shorten(printable(line), width), style),) for line in machine]
    return rows[: max(room, 1)]


def entries(state: HomeState, width: int) -> list[Entry]:
    """The list: what can be trained, then the runs, in groups with headings."""
    workloads, runs = state.workloads or (), state.runs or ()
    names = max((cells(foreign(row.name)) for row in workloads), default=0)
    titles = max((cells(foreign(row.title)) for row in workloads), default=0)
    shown: list[Entry] = []
    kind = None
    for row in workloads:
        group = "built-in workloads" if row.kind == "workload" else "this folder"
        if group != kind:
            shown.append(Entry(None, (BLANK, rule(group, width))))
            kind = group
        shown.append(Entry(row, (_start_row(row, names, titles, width),)))
    if state.workloads is None:
        shown.append(Entry(None, (BLANK, rule("built-in workloads", width), _LOADING)))
    none: Row = () if runs else _LOADING if state.runs is None else (("no runs yet", "dim"),)
    shown.append(Entry(None, (BLANK, rule("runs", width), *([none] if none else []))))
    names = max((cells(foreign(row.name)) for row in runs), default=0)
    kinds = max((cells(foreign(row.workload)) for row in runs), default=0)
    return [*shown, *(Entry(run, (_run_row(run, names, kinds, width),)) for run in runs)]


def _start_row(row: StartRow, names: int, titles: int, width: int) -> Row:
    names = min(names, max(width - 20, 8))
    lead: Span = (column(foreign(row.name), names + 2), "bold")
    room = width - names - 2
    title, text = foreign(row.title), foreign(row.text)
    if titles + 3 + 12 > room or not text:
        return (lead, (shorten(title, room), "text"))
    return (lead, (column(title, titles + 3), "text"), (shorten(text, room - titles - 3), "dim"))


def _run_row(row: RunRow, names: int, kinds: int, width: int) -> Row:
    names = min(names, max(width - 18, 8), 32)
    symbol, style = status_span(row.status)
    spans: list[Span] = [(column(foreign(row.name), names + 2), "bold"), (symbol.ljust(16), style)]
    room = width - names - 18
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
