"""The layout of the live screen at any size."""

from __future__ import annotations

from dataclasses import dataclass

from ndd_console.words.diagnosis import DiagnosisResult
from ndd_console.words.ranks import late_words
from ndd_engine.diagnose import ENDINGS
from ndd_engine.record.event import Ranks
from ndd_engine.record.snapshot import Snapshot
from ndd_engine.text import size

from .blocks import StepTable, header, idle_heading, idle_rows, memory_heading, memory_rows, progress
from .findings import NOTHING, finding_rows, least_rows, wanted_rows
from .frame import Keys, footer_row, framed, inner_width
from .hardware import core_row, facts, machine_rows
from .learning import (
    end_rows,
    evaluation_row,
    figures_row,
    message_rows,
    newest_rows,
    throughput_rows,
    trend_graphs,
    trend_row,
)
from .ranks import panel
from .rows import BLANK, ends, rule, shorten, side_by_side, width_of
from .style import Row

_TWO_COLUMNS = 72  # narrower screens stack the blocks
_THREE_COLUMNS = 150
_SIDE = 48  # width of the third column
_TRENDS = (80, 24)  # smaller screens drop the trends first
_MAIN = 10  # rows of the step block with its heading
_GAP = 3
_RANKS = 28  # minimum width of the panel of ranks


@dataclass(frozen=True, slots=True)
class LiveState:
    """Everything that the live screen shows in addition to the snapshot.

    status: may be ahead of the snapshot ("stopping"). keys: available now; early: those that a narrow footer drops
    first. waited_s: seconds of setup so far.
    can_try: whether changes can be measured.
    """

    name: str
    status: str
    keys: Keys
    message: str | None = None
    waited_s: float | None = None
    diagnosis: DiagnosisResult = NOTHING
    can_try: bool = False
    early: Keys = ()


def live_rows(snapshot: Snapshot, state: LiveState, width: int, height: int) -> list[Row]:
    """Exactly `height` rows of exactly `width` cells."""
    inner = inner_width(width)
    bottom = [footer_row(state.keys, inner, state.early)] if height > 2 else []
    return framed(_body(snapshot, state, inner, height), bottom, width, height)


class _Room:
    """Rows that are free. Blocks take them in order of importance."""

    def __init__(self, left: int) -> None:
        self.left = left

    def take(self, wanted: int) -> int:
        """Up to so many rows."""
        taken = max(min(wanted, self.left), 0)
        self.left -= taken
        return taken

    def take_all(self, wanted: int) -> int:
        """So many rows, or none."""
        return self.take(wanted) if wanted <= self.left else 0


def _body(snapshot: Snapshot, state: LiveState, width: int, height: int) -> list[Row]:
    """Everything above the footer."""
    rows = [header(snapshot, state.name, state.status, width), progress(snapshot, width, state.waited_s)]
    room = _Room(height - 3)
    if room.left < 1:
        return rows
    ended, phases, tall = snapshot.final, snapshot.phases, height >= 28
    side = width >= _THREE_COLUMNS and bool(phases)  # the machine is next to the step block
    wanted = max(len(message_rows(state.message, width)), not ended)
    notes = room.take(min(wanted, room.left // 3))
    end = end_rows(snapshot, state.name, width, min(7, max(room.left * 2 // 3, 1))) if ended else []
    room.take(len(end))
    main = room.take(_MAIN if phases else 2)
    learning = room.take_all(3) if phases or ended else 0
    # Before the first step, only what may be the reason that there is none.
    findings = state.diagnosis.findings
    diagnosis = state.diagnosis if phases or (findings and findings[0].cause in ENDINGS) else NOTHING
    finding = room.take(least_rows(diagnosis))
    machine = _machine(snapshot, _SIDE if side else width) if not ended else []
    below = room.take_all(len(machine)) if not side else 0
    trends = 0
    if learning and (below or side or ended) and width + 2 >= _TRENDS[0] and height >= _TRENDS[1]:
        trends = room.take(1)
    # Optional rows: more findings, blank lines, cores, facts, graphs, more phases, more events.
    finding += room.take(wanted_rows(diagnosis, width, state.can_try) - finding) if tall else 0
    gaps = room.take(3 if tall else 2)
    speed = throughput_rows(snapshot, width, min(room.left, 2)) if learning else []
    room.take(len(speed))
    cores = core_row(snapshot, width) if below and room.left >= 2 else None
    room.take(1 if cores else 0)
    about = facts(snapshot, width) if room.left >= 9 else []
    room.take(len(about) + 1 if about else 0)
    main += room.take(min(room.left // 2, _wanted(snapshot, width) - main)) if phases else 0
    marks = min(room.left // 3, 8) if not ended else 0
    if trends and room.left - marks >= 3:
        trends += room.take(min(room.left - marks, 17))
    notes += room.take(8) if not ended else 0

    rows += [BLANK] if gaps > 1 and tall else []
    rows += _main_and_machine(snapshot, width, main, machine) if side else _main(snapshot, width, main)
    rows += [*speed, *finding_rows(diagnosis, width, finding, state.can_try), *end]
    if about:
        rows += [rule("run", width), *about]
    if below:
        rows += [*machine, *([cores] if cores else [])]
    if trends > 1:
        rows += trend_graphs(snapshot, width, trends)
    elif learning:
        rows.append(rule("metrics", width))
        rows += [trend_row(snapshot, width)] if trends else []
    if learning:
        rows += [figures_row(snapshot, width, bool(trends), not speed), evaluation_row(snapshot, width)]
    newest = newest_rows(snapshot, state.message, width, notes)
    if newest:
        rows += [BLANK] if gaps > 0 else []
        rows += newest
    return rows


def _machine(snapshot: Snapshot, width: int) -> list[Row]:
    """The machine block with its heading; [] before anything is known."""
    if snapshot.sample is None and snapshot.run is None:
        return []
    return [rule("machine", width), *machine_rows(snapshot, width)]


def _main_and_machine(snapshot: Snapshot, width: int, count: int, machine: list[Row]) -> list[Row]:
    """The step block with the machine as its third column."""
    room = width - _GAP - _SIDE
    main = _main(snapshot, room, count)
    if not machine:
        return _main(snapshot, width, count)
    cores = core_row(snapshot, _SIDE)
    if cores and len(machine) < count:
        machine = [*machine, cores]
    return side_by_side(main, machine[:count], room, _GAP, _SIDE)


def _right_width(width: int) -> int:
    return min(max(26, width * 3 // 10), 46)


def _wanted(snapshot: Snapshot, width: int) -> int:
    """Rows that the step block fills if there is room."""
    phases = len(StepTable(snapshot, width).phases)
    if snapshot.ranks is not None:
        return 1 + max(phases, min(snapshot.ranks.newest.world, _MAIN) + 7)
    right = len(snapshot.idle.causes) + 1 + len(memory_rows(snapshot, _right_width(width), 9)) + 1
    return 1 + max(phases, right)


def _main(snapshot: Snapshot, width: int, count: int) -> list[Row]:
    """The phases of a step, with idle time and memory next to or below them."""
    if count < 1:
        return []
    if width < _TWO_COLUMNS:
        return _stacked(snapshot, width, count)
    right_width = max(_right_width(width), _RANKS if snapshot.ranks is not None else 0)
    left_width = width - _GAP - right_width
    table = StepTable(snapshot, left_width)
    left = [table.heading(), *table.rows(count - 1)]
    if snapshot.ranks is not None:
        right = _ranks_and_memory(snapshot, snapshot.ranks, right_width, count)
        return side_by_side(left[:count], right[:count], left_width, _GAP, right_width)[:count]
    memory = memory_rows(snapshot, right_width, max(count - 3, 1))
    room = count - 1
    idle = idle_rows(snapshot, right_width, max(room - len(memory) - 1, 1))
    right = [rule(idle_heading(snapshot, right_width), right_width), *idle]
    # Memory stays at the bottom of the block, so that changing idle causes do not move it.
    space = max(count - len(right) - len(memory) - 1, 0)
    right += [*[BLANK] * space, rule(memory_heading(snapshot), right_width), *memory]
    return side_by_side(left[:count], right[:count], left_width, _GAP, right_width)[:count]


def _ranks_and_memory(snapshot: Snapshot, ranks: Ranks, width: int, count: int) -> list[Row]:
    """The ranks; below them idle time and memory as far as there is room."""
    out = panel(ranks, width, count)
    spare = count - len(out)
    idle = idle_rows(snapshot, width, max(spare - 4, 0))
    if spare >= 4:
        memory = memory_rows(snapshot, width, 2)
        blank = max(spare - len(idle) - len(memory) - 2, 0)
        out += [rule(idle_heading(snapshot, width), width), *idle, *[BLANK] * blank]
        out += [rule(memory_heading(snapshot), width), *memory]
    elif spare >= 1:
        free: Row = ((f"{size(snapshot.headroom.free_bytes)} free", "text"),)
        title: Row = (("memory" if snapshot.headroom.kind == "gpu" else "host memory", "bold"),)
        out += [*[BLANK] * (spare - 1), ends(title, free, width)]
    return out


def _stacked(snapshot: Snapshot, width: int, count: int) -> list[Row]:
    table = StepTable(snapshot, width)
    below: list[Row] = []
    if snapshot.ranks is not None and count >= 5:
        below.append(((shorten(late_words(snapshot), width), "bold"),))
    elif count >= 5:
        below.append(((idle_heading(snapshot, width), "bold"),))
    if count >= 6:
        free = memory_rows(snapshot, width, 1)[0]
        title: Row = ((memory_heading(snapshot) + "  ", "bold"),)
        rest = width - width_of(title)
        below.append(ends(title, memory_rows(snapshot, rest, 1)[0], width) if rest >= 24 else free)
    return [table.heading(), *table.rows(count - 1 - len(below)), *below][:count]
