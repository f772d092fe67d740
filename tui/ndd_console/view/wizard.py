"""The wizard's pages: machine, workload, goal, probing, trade-offs, verification and file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ndd_engine.text import MISSING, duration, number, printable, size

from .bars import progress_bar
from .frame import Keys, footer_row, framed, inner_width
from .home import StartRow
from .rows import (
    BLANK,
    cells,
    ends,
    entry,
    first_shown,
    fit,
    foreign,
    lines_of,
    paragraph,
    rule,
    shorten,
    wrap,
)
from .style import Row, Span
from .tradeoffs import BY_SPEED, heading_row, ordered, plot_rows, proposal_row, shown_columns

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
    chosen: selected line of the page. rows, best: all proposals and the Pareto front; column: sort column; marked:
    proposals to verify. stage, share: current work and its progress, None if idle. verified: measured proposals.
    advice: the recommendation from the measurements, or why there is none; recommended: its proposal. file:
    what would be written; saved: where it was written. message: for the user; bad: it is an error.
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
    chosen: int = 0
    top: int = 0
    stage: str = ""
    share: float | None = None
    left_s: float | None = None
    file: Preview = Preview((), "")
    show_diff: bool = False
    saved: str = ""
    message: str = ""
    bad: bool = False
    can_train: bool = True

    @property
    def lines(self) -> tuple[str, ...]:
        """Lines of the file or of its diff."""
        return self.file.diff if self.show_diff else self.file.text

    @property
    def keys(self) -> Keys:
        back, close = ("b", "back"), ("q", "close")
        move = ("↑↓", "choose")
        match self.page:
            case 0:
                return (("enter", "next"), ("?", "help"), close)
            case 1:
                return (("enter", "next"), move, back, close)
            case 2:
                return (("enter", "probe"), move, ("←→", "change"), back, close)
            case 3:
                return (("b", "stop"), close) if self.share is not None else (("enter", "retry"), back, close)
            case 4:
                verify = (("v", f"measure {len(self.marked)}"),) if self.marked else ()
                keys = (("enter", "file"), *verify, ("space", "mark"), ("s", "sort"), ("p", "plot"))
                return (*keys, back, close)
            case 5:
                return (("enter", "file"), move, ("b", "back" if self.share is None else "stop"), close)
            case _:
                diff = (("d", "complete file" if self.show_diff else "changes"),) if self.file.there else ()
                train = (("t", "write and train"),) if self.can_train else ()
                return (("w", "write"), *train, *diff, ("↑↓", "scroll"), back, close)


def wizard_rows(view: WizardView, width: int, height: int) -> list[Row]:
    """Exactly `height` rows of exactly `width` cells."""
    inner = inner_width(width)
    message = paragraph(view.message, inner, "bad" if view.bad else "accent")[: max(height // 2, 1)]
    top = [trail(view.page, inner), BLANK] if height >= 12 else [trail(view.page, inner)]
    room = max(height - len(top) - len(message) - 1, 0)
    page = (_machine, _workload, _goal, _probing, _table, _verify, _file)[view.page]
    body = page(view, inner, room)[:room]
    return framed([*top, *body], [*message, footer_row(view.keys, inner)], width, height)


def trail(page: int, width: int) -> Row:
    """The names of all pages with the current one highlighted; only the current one if they do not fit."""
    spans: list[Span] = []
    for place, name in enumerate(PAGES):
        look = "accent" if place == page else "text" if place < page else "dim"
        spans += [(f"{place + 1} {name}", look), ("  ", "text")]
    if sum(cells(text) for text, _ in spans) <= width:
        return fit(tuple(spans), width)
    return ends(((PAGES[page], "accent"),), ((f"{page + 1} of {len(PAGES)}", "dim"),), width)


def _machine(view: WizardView, width: int, room: int) -> list[Row]:
    if view.machine is None:
        return [(("detecting the hardware…", "dim"),)]
    rows = [rule("this machine", width)]
    for line in map(printable, view.machine):
        in_columns = "  " in line.strip()  # do not wrap
        parts = [shorten(line, width)] if in_columns else wrap(line, width) or [""]
        rows += [((part, "text"),) for part in parts]
    return rows


def _workload(view: WizardView, width: int, room: int) -> list[Row]:
    rows = [rule("workload", width)]
    data = _data(view, width)
    names = max((cells(foreign(row.name)) for row in view.workloads), default=0)
    space = max(room - 1 - len(data), 1)
    start = first_shown(view.chosen, len(view.workloads), space)
    for place, row in enumerate(view.workloads[start : start + space], start):
        name = foreign(row.name)
        about = foreign(row.title if not row.text else f"{row.title}: {row.text}")
        text = " " * (names - cells(name) + 2) + shorten(about, width - names - 4)
        rows.append((*entry(name, place == view.chosen), (text, "text")))
    return [*rows, *data]


def _data(view: WizardView, width: int) -> list[Row]:
    """Facts about the data of the chosen workload, if known."""
    facts = [row for text in view.facts for row in lines_of(text, width)]
    return [BLANK, rule("data", width), *facts] if facts else []


def _goal(view: WizardView, width: int, _room: int) -> list[Row]:
    rows = [rule("goal and limits", width)]
    for place, item in enumerate(view.fields):
        chosen = place == view.chosen
        name = (item.name.ljust(_LABEL), "bold" if chosen else "text")
        value = (f" {foreign(item.value)} ", "select" if chosen else "accent")
        rows.append((("▸ " if chosen else "  ", "accent"), name, value))
        if chosen:
            meaning = wrap(item.meaning, max(width - _LABEL - 3, 20))
            rows += [((" " * (_LABEL + 3) + line, "dim"),) for line in meaning]
    return [*rows, *_data(view, width)]


def _probing(view: WizardView, width: int, room: int) -> list[Row]:
    rows = [rule("probing", width), *_progress(view, width), BLANK]
    rows += [row for note in view.notes for row in lines_of(note, width)]
    if view.rows:
        columns = shown_columns(view.rows, width, view.column)
        rows += [BLANK, heading_row(columns, width, view.column)]
        for one in ordered(view.best, view.column)[: max(room - len(rows), 0)]:
            rows.append(proposal_row(one, columns, width, False, True))
    return rows


def _progress(view: WizardView, width: int) -> list[Row]:
    if view.share is None:
        return [((foreign(view.stage) or "starting…", "accent"),)]
    end = f" {view.share:.0%}" + (f", {duration(view.left_s)} left" if view.left_s is not None else "")
    line = (*progress_bar(view.share, max(width - cells(end), 1)), (end, "text"))
    return [((shorten(foreign(view.stage), width), "accent"),), line]


def _table(view: WizardView, width: int, room: int) -> list[Row]:
    rows = ordered(view.rows, view.column)
    chosen = rows[view.chosen] if view.chosen < len(rows) else None
    plot = plot_rows(rows, view.best, chosen, width, _PLOT) if view.plot and room >= _PLOT + 8 else []
    about = [] if chosen is None else _about(chosen, width)
    space = max(room - 1 - len(plot) - len(about), 1)
    start = first_shown(view.chosen, len(rows), space)
    columns = shown_columns(view.rows, width, view.column)
    out = [heading_row(columns, width, view.column)]
    best = {one.key for one in view.best}
    marks = {one.key for one in view.marked}
    for place, one in enumerate(rows[start : start + space], start):
        line = proposal_row(one, columns, width, place == view.chosen, one.key in best)
        marked = one.key in marks and place != view.chosen
        out.append((("✔ ", "good"), *line[1:]) if marked else line)
    out += [BLANK] * (space - (len(out) - 1))
    return [*out, *about, *plot]


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


def _verify(view: WizardView, width: int, _room: int) -> list[Row]:
    done = view.share is None and any(one.measured is not None for one in view.verified)
    title = "predicted and measured" + (", best for the goal first" if done and view.recommended else "")
    rows: list[Row] = [rule(title, width)]
    if view.share is not None:
        rows += [*_progress(view, width), BLANK]
    head = ("", "memory", "measured", "error", "step", "measured", "error")
    longest = max((cells(_name(one)) for one in view.verified), default=0)
    first = min(max(longest + 4, 12), max(width - 55, 12))
    shown = (first, 10, 10, 9, 9, 9, 8)
    rows.append((("".join(text.ljust(cell) for text, cell in zip(head, shown, strict=True)), "dim"),))
    for place, one in enumerate(view.verified):
        chosen, known = place == view.chosen, one.measured
        style = "bold" if chosen else "text"
        best = view.recommended is not None and one.key == view.recommended.key
        name = shorten(("▸ " if chosen else "● " if best else "  ") + _name(one), first - 1).ljust(first)
        if known is None or known.step_s is None:
            text, look = ("not measured yet", "dim") if known is None else (foreign(known.verdict), "bad")
            rows.append(((name, style), (shorten(text, max(width - first, 1)), look)))
            continue
        texts = (
            size(one.memory_bytes), size(known.memory_bytes), _error(one.memory_bytes, known.memory_bytes),
            duration(one.step_s), duration(known.step_s), _error(one.step_s, known.step_s),
        )  # fmt: skip
        figures = "".join(
            shorten(text, cell).ljust(cell) for text, cell in zip(texts, shown[1:], strict=True)
        )
        rows.append(fit(((name, style), (figures, "text")), width))
    spread = max(
        (one.measured.spread or 0.0 for one in view.verified if one.measured is not None), default=0.0
    )
    if view.advice:
        rows += [BLANK, *lines_of(view.advice, width, "warn" if view.recommended is None else "good")]
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


def _file(view: WizardView, width: int, room: int) -> list[Row]:
    file = view.file
    what = "changes to" if view.show_diff else "complete file" if file.there else "new file"
    lines = view.lines
    place = f" {min(view.top + room - 1, len(lines))}/{len(lines)} " if len(lines) > room - 1 else ""
    out = [rule(f"{what} {foreign(file.path)}", width, "bold", place)]
    for line in lines[view.top : view.top + max(room - 1, 0)]:
        indent = line[: len(line) - len(line.lstrip(" "))]
        out.append(((shorten(indent + foreign(line), width), _look(line, view.show_diff)),))
    return out if lines else [*out, (("no changes", "dim"),)]


def _look(line: str, diff: bool) -> str:
    if diff:
        return "good" if line.startswith("+") else "bad" if line.startswith("-") else "dim"
    return "dim" if line.lstrip().startswith("#") else "bold" if line.startswith("[") else "text"
