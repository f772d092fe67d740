"""The wizard's pages: machine, workload, goal, probing, trade-offs, verification and file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ndd_engine.text import MISSING, duration, foreign, number, printable, size

from .bars import progress_bar
from .frame import Entry
from .home import StartRow
from .rows import BLANK, cells, column, ends, fit, lines_of, rule, shorten, wrap
from .style import Row, Span
from .tradeoffs import BEST, BY_SPEED, MARKED, heading_row, ordered, plot_rows, proposal_row, shown_columns

if TYPE_CHECKING:
    from ndd_engine.wizard.proposals import Proposal

PAGES = ("machine", "workload", "goal", "probing", "trade-offs", "verify", "file")
MACHINE, WORKLOAD, GOAL, PROBING, TABLE, VERIFY, FILE = range(len(PAGES))
_PLOT = 10
_LABEL = 22


@dataclass(frozen=True, slots=True)
class Field:
    """One question of the goal page, its current answer, and an explanation."""

    name: str
    value: str
    meaning: str


@dataclass(frozen=True, slots=True)
class Preview:
    """A file before it is written. there: it already exists; diff: the lines that would change in it."""

    text: tuple[str, ...]
    path: str
    there: bool = False
    diff: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WizardView:
    """State of the wizard's screen.

    machine: lines, None during detection. facts: about the data of the chosen workload. fields: questions of the goal.
    rows, best: all proposals and the Pareto front; column: sort column; marked:
    proposals to verify. stage, share: current work and its progress, None if idle. verified: measured proposals.
    advice: the recommendation from the measurements, or why there is none; recommended: its proposal. file:
    what would be written; saved: where it was written.
    """

    page: int = MACHINE
    machine: tuple[str, ...] | None = None
    workloads: tuple[StartRow, ...] = ()
    facts: tuple[str, ...] = ()
    fields: tuple[Field, ...] = ()
    rows: tuple[Proposal, ...] = ()
    best: tuple[Proposal, ...] = ()
    marked: tuple[Proposal, ...] = ()
    verified: tuple[Proposal, ...] = ()
    advice: str = ""
    recommended: Proposal | None = None
    notes: tuple[str, ...] = ()
    column: int = BY_SPEED
    plot: bool = True
    stage: str = ""
    share: float | None = None
    left_s: float | None = None
    file: Preview = Preview((), "")
    show_diff: bool = False
    saved: str = ""
    can_train: bool = True

    @property
    def lines(self) -> tuple[str, ...]:
        """Lines of the file or of its diff."""
        return self.file.diff if self.show_diff else self.file.text


def trail(page: int, width: int) -> Row:
    """The names of all pages with the current one highlighted; only the current one if they do not fit."""
    spans: list[Span] = []
    for place, name in enumerate(PAGES):
        look = "accent" if place == page else "text" if place < page else "dim"
        spans += [(f"{place + 1} {name}", look), ("  ", "text")]
    if sum(cells(text) for text, _ in spans) <= width:
        return fit(tuple(spans), width)
    return ends(((PAGES[page], "accent"),), ((f"{page + 1} of {len(PAGES)}", "dim"),), width)


def machine_page(view: WizardView, width: int) -> list[Row]:
    """The detected hardware."""
    if view.machine is None:
        return [(("detecting the hardware…", "dim"),)]
    rows = [rule("this machine", width)]
    for line in map(printable, view.machine):
        in_columns = "  " in line.strip()  # do not wrap
        parts = [shorten(line, width)] if in_columns else wrap(line, width) or [""]
        rows += [((part, "text"),) for part in parts]
    return rows


def workload_entries(view: WizardView, width: int) -> list[Entry]:
    """The workloads with what they train."""
    names = max((cells(foreign(row.name)) for row in view.workloads), default=0) + 2
    names = min(names, max(width // 2, 1))
    shown = []
    for row in view.workloads:
        about = foreign(row.title if not row.text else f"{row.title}: {row.text}")
        name = (column(foreign(row.name), names), "bold")
        shown.append(Entry(row, ((name, (shorten(about, width - names), "text")),)))
    return shown


def data_rows(view: WizardView, width: int) -> list[Row]:
    """Facts about the data of the chosen workload, if known."""
    facts = [row for text in view.facts for row in lines_of(text, width)]
    return [BLANK, rule("data", width), *facts] if facts else []


def field_entries(view: WizardView) -> list[Entry]:
    """The questions of the goal with their answers."""
    return [
        Entry(field, (((field.name.ljust(_LABEL), "bold"), (foreign(field.value), "accent")),))
        for field in view.fields
    ]


def probing_page(view: WizardView, width: int, room: int) -> list[Row]:
    """The progress, and the best proposals so far."""
    rows = [rule("probing", width), *progress_rows(view, width), BLANK]
    rows += [row for note in view.notes for row in lines_of(note, width)]
    if view.rows:
        columns = shown_columns(view.rows, width, view.column)
        rows += [BLANK, heading_row(columns, width, view.column)]
        best = ordered(view.best, view.column)[: max(room - len(rows), 0)]
        rows += [proposal_row(one, columns, width, BEST) for one in best]
    return rows


def progress_rows(view: WizardView, width: int) -> list[Row]:
    """The stage of the work, and its progress."""
    if view.share is None:
        return [((foreign(view.stage) or "starting…", "accent"),)]
    end = f" {view.share:.0%}" + (f", {duration(view.left_s)} left" if view.left_s is not None else "")
    line = (*progress_bar(view.share, max(width - cells(end), 1)), (end, "text"))
    return [((shorten(foreign(view.stage), width), "accent"),), line]


def table_heading(view: WizardView, width: int) -> Row:
    """The names of the columns."""
    return heading_row(shown_columns(view.rows, width, view.column), width, view.column)


def table_entries(view: WizardView, width: int) -> list[Entry]:
    """The proposals, sorted."""
    columns = shown_columns(view.rows, width, view.column)
    best, marked = {one.key for one in view.best}, {one.key for one in view.marked}
    shown = []
    for one in ordered(view.rows, view.column):
        lead = MARKED if one.key in marked else BEST if one.key in best else ""
        shown.append(Entry(one, (proposal_row(one, columns, width, lead),)))
    return shown


def table_below(view: WizardView, chosen: Proposal | None, width: int, room: int) -> list[Row]:
    """Details of the selected proposal, and the plot where there is room."""
    rows = ordered(view.rows, view.column)
    plot = plot_rows(rows, view.best, chosen, width, _PLOT) if view.plot and room >= _PLOT + 8 else []
    return [*([] if chosen is None else _about(chosen, width)), *plot]


def _about(one: Proposal, width: int) -> list[Row]:
    """Details of the chosen proposal."""
    memory = "present configuration: " if one.present else ""
    memory += f"predicted peak {size(one.memory_bytes)} of {size(one.free_bytes)}"
    if one.missing_bytes:
        memory += f": does not fit, over the limit by {size(one.missing_bytes)}"
    elif one.doubt:
        memory += f" (low confidence: {one.doubt}; measure it with v)"
    most = "at most " if one.lower_bound else ""
    text = f"{memory}; {most}{number(one.items_per_s)} items/s, {most}{number(one.tokens_per_s)} tokens/s"
    text += f"; {number(one.parameters)} parameters"
    if one.lower_bound:
        text += "; times are lower bounds from the GPU's peak FLOP/s"
    if one.placement == "device":
        text += "; data on the GPU"
    cost = f"disadvantages: {one.cost}" if one.cost else ""
    return [*lines_of(text, width, "dim"), *lines_of(cost, width, "warn")]


def _verified_widths(view: WizardView, width: int) -> tuple[int, ...]:
    longest = max((cells(_name(one)) for one in view.verified), default=0)
    return min(max(longest + 4, 12), max(width - 55, 12)), 10, 10, 9, 9, 9, 8


def verify_heading(view: WizardView, width: int) -> list[Row]:
    """The title, the progress, and the names of the columns."""
    done = view.share is None and any(one.measured is not None for one in view.verified)
    title = "predicted and measured" + (", best for the goal first" if done and view.recommended else "")
    rows: list[Row] = [rule(title, width)]
    if view.share is not None:
        rows += [*progress_rows(view, width), BLANK]
    head = ("", "memory", "measured", "error", "step", "measured", "error")
    widths = _verified_widths(view, width)
    return [*rows, (("".join(text.ljust(cell) for text, cell in zip(head, widths, strict=True)), "dim"),)]


def verify_entries(view: WizardView, width: int) -> list[Entry]:
    """The predictions of the marked proposals beside their measurements."""
    first, *others = _verified_widths(view, width)
    shown = []
    for one in view.verified:
        known = one.measured
        best = view.recommended is not None and one.key == view.recommended.key
        name: Span = (column(("● " if best else "  ") + _name(one), first), "text")
        if known is None or known.step_s is None:
            text, look = ("not measured yet", "dim") if known is None else (foreign(known.verdict), "bad")
            shown.append(Entry(one, ((name, (shorten(text, max(width - first, 1)), look)),)))
            continue
        texts = (
            size(one.memory_bytes), size(known.memory_bytes), _error(one.memory_bytes, known.memory_bytes),
            duration(one.step_s), duration(known.step_s), _error(one.step_s, known.step_s),
        )  # fmt: skip
        figures = "".join(shorten(text, cell).ljust(cell) for text, cell in zip(texts, others, strict=True))
        shown.append(Entry(one, ((name, (figures, "text")),)))
    return shown


def verify_below(view: WizardView, width: int) -> list[Row]:
    """The recommendation, and how much repeated measurements vary."""
    rows: list[Row] = []
    if view.advice:
        rows += [BLANK, *lines_of(view.advice, width, "warn" if view.recommended is None else "good")]
    spread = max(
        (one.measured.spread or 0.0 for one in view.verified if one.measured is not None), default=0.0
    )
    if spread:
        text = f"repeated measurements vary by up to {spread:.0%}; smaller errors are noise"
        rows += [BLANK, *lines_of(text, width, "dim")]
    return rows


def _name(one: Proposal) -> str:
    kind = "" if one.model.amp == "off" else f" {one.model.amp}"
    times = f" x {one.batch.accumulation}" if one.batch.accumulation > 1 else ""
    if one.present:
        kind += ", present"
    model = one.model.size or "model"
    if one.tokens_per_item:
        model += f" {one.model.sequence}"
    return f"{model}, {one.batch.micro}{times}{kind}"


def _error(predicted: float | None, measured: float | None) -> str:
    """Signed relative error of the prediction."""
    if not predicted or not measured:
        return MISSING
    return f"{(predicted / measured - 1) * 100:+.1f} %"


def file_title(view: WizardView) -> str:
    """What the page of the file shows."""
    what = "changes to" if view.show_diff else "complete file" if view.file.there else "new file"
    return f"{what} {foreign(view.file.path)}"


def file_page(view: WizardView, width: int) -> list[Row]:
    """The file, or its changes."""
    rows: list[Row] = []
    for line in view.lines:
        indent = line[: len(line) - len(line.lstrip(" "))]
        rows.append(((shorten(indent + foreign(line), width), _look(line, view.show_diff)),))
    return rows or [(("no changes", "dim"),)]


def _look(line: str, diff: bool) -> str:
    if diff:
        return "good" if line.startswith("+") else "bad" if line.startswith("-") else "dim"
    return "dim" if line.lstrip().startswith("#") else "bold" if line.startswith("[") else "text"
