"""What a refresh of the same 24 rows costs with the canvas, with Textual's line API, and with two kinds of widgets.

`python -m benchmarks.painters NAME RESULT` is the program in the terminal: it shows the live screen of a simulated run,
refreshes it, and writes the times of the refreshes and the CPU time of each to RESULT.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from qa.ranks.simulated import Planted, beside
from rich.text import Text
from textual.app import App, ComposeResult
from textual.coordinate import Coordinate
from textual.geometry import Region
from textual.screen import Screen
from textual.strip import Strip
from textual.widget import Widget
from textual.widgets import DataTable, Label, Sparkline, Static

from ndd_console.view.live import LiveState, live_rows
from ndd_console.view.style import PLAIN, Row
from ndd_console.widgets.canvas import Canvas
from ndd_console.widgets.lines import segments
from ndd_console.widgets.textual_private import paint_changes
from ndd_engine.record.state import RunState

from .common import STATISTICS, Options, Table, as_count, as_ms, say, statistics_cells
from .terminal import Chunk, Terminal

TITLE = "painters: bytes and CPU time of a refresh of the live screen at 80x24"
_SIZE = (80, 24)
_PERIOD_S = 0.1
_WARM_UP = 5  # refreshes


class LinePainter(Widget):
    """Textual's line API: the changed rows are drawn again."""

    DEFAULT_CSS = "LinePainter { width: 1fr; height: 1fr; }"
    shown: Sequence[Row] = ()

    def show(self, rows: list[Row]) -> None:
        before, self.shown = self.shown, rows
        changed = [y for y, row in enumerate(rows) if y >= len(before) or row != before[y]]
        self.refresh(*(Region(0, y, _SIZE[0], 1) for y in changed))

    def render_line(self, y: int) -> Strip:
        return Strip(segments(self.shown[y], PLAIN)) if y < len(self.shown) else Strip.blank(_SIZE[0])


class StaticPainter(Widget):
    """A widget of Textual for each row; the changed ones are updated."""

    DEFAULT_CSS = "StaticPainter { width: 1fr; height: 1fr; } Static { height: 1; }"
    shown: Sequence[Row] = ()

    def compose(self) -> ComposeResult:
        self.lines = [Static(markup=False) for _ in range(_SIZE[1])]
        yield from self.lines

    def show(self, rows: list[Row]) -> None:
        before, self.shown = self.shown, rows
        for y, (widget, row) in enumerate(zip(self.lines, rows, strict=True)):
            if y >= len(before) or row != before[y]:
                widget.update(Text.assemble(*((text, PLAIN.styles[style]) for text, style in row)))


class WidgetPainter(Widget):
    """Stock widgets: labels above and below a table, whose changed cells are updated, and a sparkline."""

    DEFAULT_CSS = """
        WidgetPainter { width: 1fr; height: 1fr; } Label { height: 1; } DataTable { height: 1fr; }
        Sparkline { height: 1; }
    """
    shown: Sequence[Row] = ()

    def compose(self) -> ComposeResult:
        self.above, self.below = ([Label(markup=False) for _ in range(count)] for count in (8, 6))
        self.table: DataTable[Text] = DataTable(show_header=False, show_cursor=False, cell_padding=0)
        self.trend = Sparkline([])
        yield from (*self.above, self.table, self.trend, *self.below)

    def on_mount(self) -> None:
        self.table.add_column("", width=_SIZE[0])
        self.table.add_rows([Text()] for _ in range(_SIZE[1] - len(self.above) - len(self.below) - 1))

    def show(self, rows: list[Row]) -> None:
        before, self.shown = self.shown, rows
        changed = [y for y, row in enumerate(rows) if y >= len(before) or row != before[y]]
        head, foot = len(self.above), len(rows) - len(self.below)
        for y in changed:
            text = Text.assemble(*((part, PLAIN.styles[style]) for part, style in rows[y]))
            if y < head:
                self.above[y].update(text)
            elif y >= foot:
                self.below[y - foot].update(text)
            elif self.table.is_valid_row_index(y - head):
                self.table.update_cell_at(Coordinate(y - head, 0), text)
        # The row of the sparkline is one that the others use for text.
        self.trend.data = [*(self.trend.data or []), float(len(changed))][-_SIZE[0] :]


PAINTERS: dict[str, Callable[[], Any]] = {
    "canvas": Canvas,
    "line API": LinePainter,
    "one-row Statics": StaticPainter,
    "DataTable, Labels, Sparkline": WidgetPainter,
}


def frames(count: int) -> Iterator[list[Row]]:
    """The live screen of a simulated run of two ranks."""
    state = RunState()
    keys = (("t", "try"), ("d", "diagnosis"), ("p", "pause"), ("q", "quit"))
    for index, event in enumerate(Planted(2, noise=(0.02, 0.02)).events(count)):
        state.fold(1e9 + index, beside(event))
        state.fold(1e9 + index, event)
        yield live_rows(state.snapshot(), LiveState("simulated", "training", keys), *_SIZE)


class Stage(App[None]):
    """Shows the frames with one painter."""

    CSS = "Screen { background: ansi_default; color: ansi_default; overflow: hidden; }"

    def __init__(self, name: str, result: Path, count: int) -> None:
        super().__init__(ansi_color=True)
        self.painter = PAINTERS[name]()
        self._result, self._frames = result, frames(count + _WARM_UP)
        self._ticks: list[tuple[float, float]] = []

    def get_default_screen(self) -> Screen[None]:
        screen: Screen[None] = Screen()
        if isinstance(self.painter, Canvas):
            paint_changes(screen, self.painter)
        return screen

    def on_mount(self) -> None:
        self.screen.mount(self.painter)
        self.set_interval(_PERIOD_S, self._refresh)

    def _refresh(self) -> None:
        rows = next(self._frames, None)
        self._ticks.append((time.time(), time.process_time()))
        if rows is None:
            self._result.write_text(json.dumps(self._ticks[_WARM_UP:]), "utf-8")
            self.exit()
        else:
            self.painter.show(rows)


def measure(options: Options) -> Table:
    """Bytes and CPU milliseconds of a refresh with each painter."""
    table = Table(TITLE, ("painter", *STATISTICS))
    for name in options.cases(PAINTERS):
        say(f"painters: {name}")
        sizes, cpu_ms = _watch(name, options.repeats(100, 20, 2))
        table.add(f"{name}: bytes", *statistics_cells(sizes, as_count))
        table.add(f"{name}: CPU ms", *statistics_cells(cpu_ms, as_ms))
    table.note("CPU: all threads, between two refreshes")
    return table


def _watch(name: str, count: int) -> tuple[list[float], list[float]]:
    with tempfile.TemporaryDirectory(prefix="ndd-bench-") as folder:
        result = Path(folder) / "result.json"
        chunks: list[Chunk] = []
        with Terminal(
            [sys.executable, "-m", "benchmarks.painters", name, str(result), str(count)]
        ) as terminal:
            deadline = time.monotonic() + 60 + 4 * count * _PERIOD_S
            while not terminal.ended and time.monotonic() < deadline:
                chunk = terminal.read(1.0)
                chunks += [chunk] if chunk is not None else []
        ticks = json.loads(result.read_text("utf-8"))
    sizes, cpu_ms = [], []
    for (begin, cpu), (end, later) in itertools.pairwise(ticks):
        sizes.append(float(sum(len(chunk.data) for chunk in chunks if begin <= chunk.t < end)))
        cpu_ms.append((later - cpu) * 1e3)
    return sizes, cpu_ms


if __name__ == "__main__":
    Stage(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])).run()
