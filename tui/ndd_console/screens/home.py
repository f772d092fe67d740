"""The home screen: shown immediately, while threads detect the hardware and read the runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ndd_console.jobs.folder import StartRow
from ndd_console.jobs.run_sources import RUN_COLUMNS, HomeFolder, RunRow
from ndd_console.render.rows import block_rows
from ndd_console.view.keys import HOME_KEYS
from ndd_console.view.rows import BLANK, Entry, aligned, ends, rule
from ndd_console.view.style import Look, Row, Span, status_span
from ndd_console.widgets.lines import RowList
from ndd_console.words.blocks import Block, Text
from ndd_console.words.machine import DETECTING
from ndd_console.words.runs import NO_RUNS
from ndd_engine.text import MISSING, foreign

from .base import TextQuestion, WidgetScreen
from .pages import ComparisonScreen, StartScreen

DEFAULT_EPOCHS = 1
SLOGAN = "train PyTorch models and see where the time goes"
_LOADING: Row = (("loading…", "dim"),)
# From one look at the runs to the next.
REFRESH_S = 2.0
_LIST = 15  # rows of the list that have priority over the machine
_MOST_DIGITS = 6
_COLUMNS: list[Span] = [(name, "dim") for name in RUN_COLUMNS]


def heading(machine: Sequence[Block] | None, width: int, room: int) -> list[Row]:
    """The title and the machine, in at most `room` rows. machine: None while it is detected."""
    name = "ndd-console"
    slogan = SLOGAN if len(name) + len(SLOGAN) + 2 <= width else ""
    rows: list[Row] = [ends(((name, "bold"),), ((slogan, "dim"),), width)]
    if room > 3:
        shown = [Text(DETECTING, "note")] if machine is None else machine
        rows += [BLANK, rule("this machine", width), *block_rows(shown, width)]
    return rows[: max(room, 1)]


def entries(workloads: Sequence[StartRow] | None, runs: Sequence[RunRow] | None, width: int) -> list[Entry]:
    """The list: what can be trained, then the runs, in groups with headings, and the columns of runs with theirs.

    None: not read yet.
    """
    # No DataTable: its cursor stops at rows that are headings, and no text spans its columns.
    shown: list[Entry] = []
    group = None
    startable = [[(row.name, "bold"), (row.title, "text"), (row.text, "dim")] for row in workloads or ()]
    lines = aligned(startable, width, 1, (2,))
    for row, line in zip(workloads or (), lines, strict=True):
        before, group = group, "built-in workloads" if row.kind == "workload" else "this folder"
        if group != before:
            shown.append(Entry(None, (BLANK, rule(group, width))))
        shown.append(Entry(row, (line,)))
    if workloads is None:
        shown.append(Entry(None, (BLANK, rule("built-in workloads", width), _LOADING)))
    none: Row = () if runs else _LOADING if runs is None else ((NO_RUNS, "dim"),)
    columns, *lines = aligned([_COLUMNS, *map(_run_cells, runs or ())], width, 0, (5, 4, 3, 2))
    shown.append(Entry(None, (BLANK, rule("runs", width), none or columns)))
    return [*shown, *(Entry(run, (line,)) for run, line in zip(runs or (), lines, strict=True))]


def _run_cells(row: RunRow) -> list[Span]:
    name, status, *figures, workload = row.texts
    spans = [(text, "text" if text != MISSING else "dim") for text in figures]
    return [(name, "bold"), status_span(status), *spans, (workload, "dim")]


class HomeScreen(WidgetScreen):
    """Lists what can be trained, and the runs."""

    keys = HOME_KEYS
    selects = "open"
    every_s = REFRESH_S
    body: RowList

    def __init__(self, home: HomeFolder, look: Look, on_painted: Callable[[], None] | None = None) -> None:
        super().__init__(look, RowList(look), on_painted)
        # None while they are read.
        self.machine: Sequence[Block] | None = None
        self.workloads: Sequence[StartRow] | None = None
        self.runs: Sequence[RunRow] | None = None
        self._home = home
        self._compared = ""  # the first run of a comparison

    def on_mount(self) -> None:
        self.beside(
            self._home.machine,
            self._detected,
            lambda text: self._detected([Text(f"hardware detection failed: {text}", "bad")]),
        )
        self.refresh_runs()

    def look_again(self) -> None:
        if self.is_current:
            self.refresh_runs()

    def refresh_runs(self) -> None:
        self.beside(lambda: (self._home.workloads(), self._home.runs()), self._listed, self._not_listed)

    def _detected(self, blocks: Sequence[Block]) -> None:
        self.machine = blocks
        self.paint_if_current()

    def _listed(self, rows: tuple[Sequence[StartRow], Sequence[RunRow]]) -> None:
        self.workloads, self.runs = rows
        self.paint_if_current()

    def _not_listed(self, text: str) -> None:
        self.workloads, self.runs = (), ()
        self.say(f"cannot read the runs folder: {text}", "bad")

    def sections(self, width: int, height: int) -> tuple[list[Row], list[Row]]:
        shown = entries(self.workloads, self.runs, width)
        self.body.show(shown)
        return heading(self.machine, width, height - min(len(shown) + 2, _LIST)), []

    # Keys.

    def has(self, need: str) -> bool:
        if need == "not opening":
            return not self.console.opening
        if need == "wizard":
            return self.console.new_wizard is not None
        return isinstance(self.body.chosen, RunRow if need == "run" else StartRow)

    def action_open(self) -> None:
        chosen = self.body.chosen
        if isinstance(chosen, RunRow):
            self.console.open_run(chosen)
        elif chosen is not None:
            self.app.push_screen(StartScreen(self.look, chosen, self._start))

    def action_start(self) -> None:
        self._start(self.body.chosen)

    def action_wizard(self) -> None:
        self.console.open_wizard(None, self.body.chosen if isinstance(self.body.chosen, StartRow) else None)

    def action_report(self) -> None:
        name = self.body.chosen.name
        self.beside(
            lambda: self._home.report(name),
            lambda path: self.say(f"written: {path}"),
            lambda text: self.say(text, "bad"),
            daemon=False,
        )

    def action_compare(self) -> None:
        """Remember the selected run, or compare it with the one before."""
        name, before = self.body.chosen.name, self._compared
        self._compared = "" if before else name
        if before and before != name:
            self.app.push_screen(ComparisonScreen(self.look, self._home, before, name))
        self.say("" if before else f"compare {foreign(name)} with: select another run and press c")

    def action_reload(self) -> None:
        self.say("")
        self.refresh_runs()

    def action_close_message(self) -> None:
        self.say("")

    def action_quit(self) -> None:
        self.console.leave()

    def _start(self, row: StartRow) -> None:
        """Train an entry; ask for the length of the run first where nothing defines it."""
        if row.kind != "own":
            self.console.train(row)
            return
        title = f"epochs to train {foreign(row.name)} (default: {DEFAULT_EPOCHS})"
        # Zero epochs are no run.
        question = TextQuestion(self.look, title, r"([1-9][0-9]*)?", _MOST_DIGITS, str(DEFAULT_EPOCHS))

        def begin(epochs: str | None) -> None:
            if epochs:
                self.console.train(replace(row, epochs=int(epochs)))

        self.app.push_screen(question, begin)
