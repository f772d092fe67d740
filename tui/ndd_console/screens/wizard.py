"""The wizard's screen: its questions, the progress of its work, and the results to choose from."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partialmethod
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from ndd_console.jobs.wizard import Preview, WizardJob
from ndd_console.render.rows import block_rows
from ndd_console.view.bars import labelled_bar, plot_rows
from ndd_console.view.keys import WIZARD_KEYS, Key
from ndd_console.view.rows import BLANK, Entry, aligned, cells, ends, fit, paragraph, rule, shorten, wrap
from ndd_console.view.style import Look, Row, Span
from ndd_console.widgets.lines import Lines, RowList, RowTable
from ndd_console.words.blocks import Text
from ndd_console.words.machine import DETECTING
from ndd_console.words.stopping import STOPPING
from ndd_console.words.wizard import (
    ITEMS,
    PROPOSAL_COLUMNS,
    VERIFIED,
    Column,
    about_text,
    applicable,
    heading,
    label,
    remark,
    spread_text,
    verified_texts,
)
from ndd_engine.errors import NddError
from ndd_engine.text import duration, foreign

from .base import POLL_S, WidgetScreen

if TYPE_CHECKING:
    from ndd_console.jobs.folder import StartRow
    from ndd_engine.wizard.proposals import Proposal

WizardPage = Literal["machine", "workload", "goal", "probing", "trade-offs", "verify", "file"]
WIZARD_PAGES: tuple[WizardPage, ...] = get_args(WizardPage)
_BEFORE: dict[WizardPage, WizardPage] = {
    "workload": "machine", "goal": "workload", "probing": "goal", "trade-offs": "goal", "verify": "trade-offs",
    "file": "trade-offs",
}  # fmt: skip
_NEXT = {"goal": "probe", "probing": "retry", "trade-offs": "file", "verify": "file"}
_STOPPING = f"{STOPPING}…"
_PLOT = 10  # rows of the plot
_CONTINUED = "    "  # before what follows of a long line
MARKED, BEST = "✔", "●"  # marked for measurement; on the Pareto front
BY_SPEED = next(column for column in PROPOSAL_COLUMNS if column.name == ITEMS)
_VERIFIED: list[Span] = [(name, "dim") for name in ("", "", *VERIFIED)]
Rows: TypeAlias = "list[tuple[Proposal, list[Span]]]"


def trail(page: WizardPage, width: int) -> Row:
    """The names of all pages with the current one highlighted; only the current one if they do not fit."""
    here = WIZARD_PAGES.index(page)
    spans: list[Span] = []
    for place, name in enumerate(WIZARD_PAGES):
        look = "accent" if place == here else "text" if place < here else "dim"
        spans += [(f"{place + 1} {name}", look), ("  ", "text")]
    if sum(cells(text) for text, _ in spans) <= width:
        return fit(tuple(spans), width)
    return ends(((page, "accent"),), ((f"{here + 1} of {len(WIZARD_PAGES)}", "dim"),), width)


def data_rows(facts: Sequence[str], width: int) -> list[Row]:
    """Facts about the data of the chosen workload, if known."""
    lines = [row for text in facts for row in paragraph(text, width)]
    return [BLANK, rule("data", width), *lines] if lines else []


def ordered(rows: Sequence[Proposal], column: Column) -> list[Proposal]:
    """Sorted by a column; proposals that fit come first."""
    return sorted(rows, key=lambda one: (not one.fits, column.order(one)))


def columns_of(rows: Sequence[Proposal], sort: Column) -> list[Column]:
    """Those that tell the proposals apart, and the one they are sorted by."""
    names = applicable(rows, [one.name for one in PROPOSAL_COLUMNS])
    alike = len({one.placement for one in rows}) < 2
    return [
        one
        for one in PROPOSAL_COLUMNS
        if one is sort or (one.name in names and not (alike and one.name == "data"))
    ]


def proposal_table(
    rows: Sequence[Proposal], best: Sequence[Proposal], marked: Collection[Proposal], sort: Column
) -> tuple[list[Span], Rows]:
    """The names of the columns, and the proposals."""
    columns = columns_of(rows, sort)
    heads = [
        (f"{heading(one, rows)}▾", "accent") if one is sort else (heading(one, rows), "dim")
        for one in columns
    ]
    best_keys, marked_keys = {one.key for one in best}, {one.key for one in marked}
    grid: Rows = []
    for one in rows:
        style, note = ("text", "dim") if one.fits else ("bad", "bad")
        lead = (BEST, "accent") if one.key in best_keys else ("", "accent")
        lead = (MARKED, "good") if one.key in marked_keys else lead
        grid.append((one, [lead, *((known.text(one), style) for known in columns), (remark(one), note)]))
    return [("", "dim"), *heads, ("", "dim")], grid


def stage_rows(stage: str, share: float, left_s: float | None, width: int) -> list[Row]:
    text = f"{share * 100:.0f} %" + (f", {duration(left_s)} left" if left_s is not None else "")
    return [((shorten(foreign(stage), width), "accent"),), labelled_bar(share, text, width)]


def verified_table(verified: Sequence[Proposal], recommended: Proposal | None) -> Rows:
    """The predictions beside their measurements."""
    grid: Rows = []
    for one in verified:
        best = recommended is not None and one.key == recommended.key
        style = "dim" if one.measured is None else "text" if one.measured.step_s is not None else "bad"
        texts = [(text, style) for text in verified_texts(one)]
        grid.append((one, [(BEST if best else "", "text"), (label(one), "text"), *texts]))
    return grid


def advice_rows(verified: Sequence[Proposal], advice: str, style: str, width: int) -> list[Row]:
    """The recommendation, and how much repeated measurements vary."""
    rows = [BLANK, *paragraph(advice, width, style)] if advice else []
    spread = spread_text(verified)
    return [*rows, BLANK, *paragraph(spread, width, "dim")] if spread else rows


def file_rows(lines: Sequence[str], diff: bool, width: int) -> list[Row]:
    rows: list[Row] = []
    for line in lines:
        indent = line[: len(line) - len(line.lstrip(" "))]
        first, *more = wrap(foreign(line), width - len(indent) - len(_CONTINUED)) or [""]
        pieces = [first, *(_CONTINUED + piece for piece in more)]
        rows += [((indent + piece, _look(line, diff)),) for piece in pieces]
    return rows or [(("no changes", "dim"),)]


def _look(line: str, diff: bool) -> str:
    if diff:
        return "good" if line.startswith("+") else "bad" if line.startswith("-") else "dim"
    return "dim" if line.lstrip().startswith("#") else "bold" if line.startswith("[") else "text"


class WizardScreen(WidgetScreen):
    """leave: called with a file to train, or "" to close. can_train: whether training on this machine is possible."""

    keys = WIZARD_KEYS
    selects = "next"
    every_s = POLL_S
    body: RowList

    def __init__(
        self, look: Look, source: WizardJob, leave: Callable[[str], None], *, can_train: bool = True
    ) -> None:
        self.table, self.lines = RowTable(look, fixed=1), Lines(look, scrolls=True)
        super().__init__(look, RowList(look, one_click=False), others=(self.table, self.lines))
        self.source = source
        self._leave = leave
        self._can_train = can_train
        self.page: WizardPage = "machine"
        self._workloads: tuple[StartRow, ...] = ()
        self._facts: tuple[str, ...] = ()  # about the data of the chosen workload
        self.marked: tuple[Proposal, ...] = ()  # to be measured
        self.column = BY_SPEED  # by which the proposals are sorted
        self.plot = True
        self._proposal: Proposal | None = None  # of the file
        self._file = Preview((), "")
        self._show_diff = False
        self._saved = ""  # where the file was written

    def look_again(self) -> None:
        source = self.source
        # Marked proposals may have been measured since.
        rows = {one.key: one for one in source.rows}
        self.marked = tuple(rows[one.key] for one in self.marked if one.key in rows)
        if self.page in ("probing", "verify") and not source.working():
            failed = source.failed()
            if failed:
                self.message = (failed, "bad")
            elif self.message[0] == _STOPPING:
                self.message = ("", "text")
            if not failed and self.page == "probing" and source.rows:
                self.marked = source.suggested()
                self._turn("trade-offs")
        self.paint_if_current()

    def _turn(self, page: WizardPage) -> None:
        """Show this page. The first entry of its list is selected."""
        self.page = page
        self.body.show(())
        self.table.show((), ())
        self.say("")

    def _choices(self, choices: Sequence[tuple[str, str, str]], width: int) -> list[Row]:
        """List (name, value, meaning). Returns the meaning of the selected one, and facts about the data."""
        rows = aligned([((name, "bold"), (value, "accent")) for name, value, _ in choices], width)
        self.body.show([Entry(one[-1], (row,)) for one, row in zip(choices, rows, strict=True)])
        meaning = self.body.chosen or ""
        return [BLANK, *paragraph(meaning, width, "dim"), *data_rows(self._facts, width)]

    def sections(self, width: int, height: int) -> tuple[list[Row], list[Row]]:
        source = self.source
        tabled = self.page in ("trade-offs", "verify") or (self.page == "probing" and source.rows)
        self.swap(self.body if self.page in ("workload", "goal") else self.table if tabled else self.lines)
        top = [trail(self.page, width), BLANK] if height >= 12 else [trail(self.page, width)]
        room = height - len(top)
        below: list[Row] = []
        match self.page:
            case "machine":
                known = [Text(DETECTING, "note")] if source.machine is None else source.machine
                self.lines.show([rule("this machine", width), *block_rows(known, width)])
            case "workload":
                top.append(rule("workload", width))
                below = self._choices([(one.name, one.title, one.text) for one in self._workloads], width)
            case "goal":
                top.append(rule("goal and limits", width))
                below = self._choices([(one.name, one.value, one.meaning) for one in source.fields()], width)
            case "probing":
                idle: Row = ((foreign(source.stage) or "starting…", "accent"),)
                top += self._heading("probing", width, [idle, BLANK])
                top += [row for note in source.notes for row in paragraph(note, width)]
                self.lines.show(())
                best = ordered(source.best, self.column)
                self.table.show(*proposal_table(best, best, (), self.column) if best else ((), ()))
            case "trade-offs":
                rows = ordered(source.table, self.column)
                self.table.show(*proposal_table(rows, source.best, self.marked, self.column))
                chosen = self.table.chosen
                if chosen is not None:
                    below = paragraph(about_text(chosen), width, "dim")
                    below += paragraph(remark(chosen, details=True), width, "warn")
                if self.plot and room >= _PLOT + 8:
                    below += plot_rows(source.rows, source.best, chosen, width, _PLOT)
            case "verify":
                order = ", best for the goal first" if source.recommended and not source.working() else ""
                top += self._heading(f"predicted and measured{order}", width, [])
                self.table.show(_VERIFIED, verified_table(source.verified, source.recommended))
                style = "warn" if source.recommended is None else "good"
                below = advice_rows(source.verified, source.advice, style, width)
            case "file":
                kind = "complete file" if self._file.there else "new file"
                kind = "changes to" if self._show_diff else kind
                top.append(rule(f"{kind} {foreign(self._file.path)}", width))
                shown = self._file.diff if self._show_diff else self._file.text
                self.lines.show(file_rows(shown, self._show_diff, width))
        return top, below

    def _heading(self, title: str, width: int, idle: list[Row]) -> list[Row]:
        """A title, and below it the work that runs; idle: what is there without any."""
        source = self.source
        working = source.working()
        below = [*stage_rows(source.stage, *source.progress(), width), BLANK] if working else idle
        return [rule(title, width), *below]

    # Keys.

    def _working(self) -> bool:
        return self.page in ("probing", "verify") and self.source.working()

    def has(self, need: str) -> bool:
        return {
            "idle": not self._working(),
            "further page": self.page != "file",
            "table page": self.page == "trade-offs",
            "goal page": self.page == "goal",
            "file page": self.page == "file",
            "marked": bool(self.marked),
            "existing file": self._file.there,
            "training here": self._can_train,
        }[need]

    def word(self, key: Key) -> str:
        match key.action:
            case "next":
                return _NEXT.get(self.page, "next")
            case "measure":
                return f"measure {len(self.marked)}"
            case "back":
                return "stop" if self._working() else "back"
            case "diff":
                return "complete file" if self._show_diff else "changes"
        return key.word

    def action_close(self) -> None:
        self.source.stop()
        self._leave("")

    def action_back(self) -> None:
        """Stop running work; else the page before."""
        if self._working():
            self.source.stop()
            self.say(_STOPPING)
        elif self.page == "machine":
            self._leave("")
        else:
            self._turn(_BEFORE[self.page])

    def action_next(self) -> None:
        source = self.source
        match self.page:
            case "machine":
                self._workloads = source.workloads()
                self._turn("workload")
            case "workload" if self.body.highlighted is not None:
                self._facts = source.choose(self.body.highlighted)
                self._turn_unless(source.problem(), "goal")
            case "goal" | "probing":
                trouble = source.problem() if self.page == "goal" else ""
                if not trouble:
                    source.probe()
                self._turn_unless(trouble, "probing")
            case _ if self.table.chosen is not None:
                self._open_file(self.table.chosen)

    def _turn_unless(self, trouble: str, page: WizardPage) -> None:
        if trouble:
            self.say(trouble, "bad")
        else:
            self._turn(page)

    def _change(self, by: int) -> None:
        self.say(self.source.change(self.body.highlighted or 0, by), "bad")

    action_more = partialmethod(_change, 1)
    action_less = partialmethod(_change, -1)

    def action_sort(self) -> None:
        self._sort_by(columns_of(self.source.table, self.column).index(self.column) + 1)

    def on_data_table_header_selected(self, event: RowTable.HeaderSelected) -> None:
        if self.page == "trade-offs" and event.label.plain:
            self._sort_by(event.column_index - 1)  # the first column has the marks

    def _sort_by(self, place: int) -> None:
        """By this column of the table; by the first one after the last."""
        shown = columns_of(self.source.table, self.column)
        self.column = shown[place % len(shown)]
        self.paint()

    def action_plot(self) -> None:
        self.plot = not self.plot
        self.paint()

    def action_mark(self) -> None:
        """Mark the selected proposal for measurement, or take the mark away."""
        one = self.table.chosen
        if one is None:
            return
        if one.layout.ranks > 1:
            self.say("proposals for several ranks cannot be measured here", "bad")
            return
        others = tuple(other for other in self.marked if other.key != one.key)
        self.marked = others if len(others) < len(self.marked) else (*self.marked, one)
        self.say("")

    def action_measure(self) -> None:
        self.source.verify(self.marked)
        self._turn("verify")

    def _open_file(self, one: Proposal) -> None:
        trouble = one.failed or ("" if one.fits or one.measured is not None else "this proposal does not fit")
        if trouble:
            self.say(f"{trouble}; choose another one", "bad")
            return
        self._proposal, self._saved = one, ""
        if self._read_file():
            self._turn("file")

    def _read_file(self) -> bool:
        """What would be written. Returns whether there is such a file."""
        assert self._proposal is not None
        try:
            self._file = self.source.preview(self._proposal)
        except NddError as error:
            self.say(str(error), "bad")
            return False
        self._show_diff = self._file.there
        return True

    def action_diff(self) -> None:
        self._show_diff = not self._show_diff
        self.paint()

    def action_train(self) -> None:
        if self.action_write():
            self._leave(self._saved)

    def action_write(self) -> bool:
        """Write the file once. Returns whether it is written: one that was changed meanwhile is shown first."""
        assert self._proposal is not None
        try:
            if not self._saved and self.source.changed():
                if self._read_file():
                    path = self._file.path
                    text = f"{path} was changed after it was read; this is its new diff: press w to write it"
                    self.say(text, "bad")
                return False
            self._saved = self._saved or self.source.save(self._proposal)
        except NddError as error:
            self.say(str(error), "bad")
            return False
        self.say(f"wrote {self._saved}")
        return True
