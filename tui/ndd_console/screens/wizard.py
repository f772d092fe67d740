"""The wizard's screen: asks its questions, and shows what the work in its thread finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from textual import events

from ndd_console.screens.interfaces import StartRow
from ndd_console.view.frame import Keys
from ndd_console.view.pager import WIZARD_KEYS
from ndd_console.view.style import Row
from ndd_console.view.tradeoffs import COLUMNS, ordered
from ndd_console.view.wizard import (
    FILE,
    GOAL,
    MACHINE,
    PROBING,
    TABLE,
    VERIFY,
    WORKLOAD,
    Field,
    Preview,
    WizardView,
    bounded,
    shown_lines,
    wizard_rows,
)
from ndd_engine.errors import NddError

from .base import CanvasScreen, Look
from .pages import HelpScreen

if TYPE_CHECKING:
    from ndd_engine.wizard.proposals import Proposal

_LOOK_S = 0.2
_PAGE = 10
_STOPPING = "stopping…"
_MOVES = {
    "up": -1, "k": -1, "down": 1, "j": 1, "pageup": -_PAGE, "pagedown": _PAGE, "home": -9999, "end": 9999,
}  # fmt: skip
_BACK = ("escape", "backspace", "b")
_CLOSE = ("q", "ctrl+q", "ctrl+c")


class WizardSource(Protocol):
    """The wizard's work. What takes long goes on in a thread; `look` tells how far it is."""

    def machine_lines(self) -> tuple[str, ...] | None:
        """What was detected; None while it is looked at."""

    def workloads(self) -> tuple[StartRow, ...]:
        """What can be chosen, the one that was asked for first."""

    def choose(self, place: int) -> tuple[str, ...]:
        """Take a workload. Returns the facts of its data, or what is wrong with it."""

    def fields(self) -> tuple[Field, ...]:
        """The questions of the goal."""

    def change(self, place: int, by: int) -> str:
        """The next answer of a question (by 1) or the one before. What is wrong with it, "" for nothing."""

    def problem(self) -> str:
        """What is wrong with the answers together, "" for nothing."""

    def probe(self) -> None:
        """Begin to probe."""

    def verify(self, chosen: tuple[Proposal, ...]) -> None:
        """Begin to measure."""

    def look(self, view: WizardView) -> WizardView:
        """The view with what is known now."""

    def working(self) -> bool:
        """Whether something goes on."""

    def failed(self) -> str:
        """Why the work that went on last ended without a result; ""."""

    def suggested(self) -> tuple[Proposal, ...]:
        """Proposals that are worth a measurement."""

    def preview(self, chosen: Proposal) -> Preview:
        """The file. Raises NddError."""

    def save(self, chosen: Proposal) -> str:
        """Write the file; its name. Raises NddError."""

    def stop(self) -> None:
        """End what goes on, soon."""


class WizardScreen(CanvasScreen):
    """`leave` is called with the name of a file to train, or "" to close. can_train: whether that may be asked for."""

    def __init__(
        self,
        look: Look,
        source: WizardSource,
        leave: Callable[[str], None],
        on_painted: Callable[[], None] | None = None,
        *,
        can_train: bool = True,
    ) -> None:
        super().__init__(look, on_painted)
        self._source = source
        self._can_train = can_train
        self._leave = leave
        self._chosen: Proposal | None = None
        self.view = WizardView(keys=_keys(WizardView(), can_train))

    def on_mount(self) -> None:
        self.set_interval(_LOOK_S, self.look_again)

    def look_again(self) -> None:
        """Take up what the work has found."""
        source, view = self._source, self.view
        view = source.look(replace(view, machine=source.machine_lines()))
        # What was marked may have been measured since.
        rows = {one.key: one for one in view.rows}
        view = replace(view, marked=tuple(rows[one.key] for one in view.marked if one.key in rows))
        if view.page in (PROBING, VERIFY) and not source.working():
            failed = source.failed()
            view = replace(view, share=None, left_s=None)
            if view.message == _STOPPING:
                view = replace(view, message="")
            if failed and failed != view.message:
                view = replace(view, message=failed, bad=True)
            elif view.page == PROBING and view.rows and not failed:
                view = replace(view, page=TABLE, chosen=0, marked=source.suggested())
        self.show(view)

    def show(self, view: WizardView) -> None:
        """Take a new view and draw it."""
        view = replace(view, keys=_keys(view, self._can_train))
        if view != self.view:
            self.view = view
            self.paint()

    def draw(self, width: int, height: int) -> list[Row]:
        return wizard_rows(self.view, width, height)

    def on_key(self, event: events.Key) -> None:
        event.stop()
        key = event.character if event.is_printable and event.character else event.key
        key = "space" if key == " " else key
        if key in _CLOSE:
            self._source.stop()
            self._leave("")
        elif key == "?":
            self.app.push_screen(HelpScreen(self.look, WIZARD_KEYS))
        elif key in _BACK:
            self._back()
        elif key in _MOVES and self.view.page != MACHINE:
            self._move(_MOVES[key])
        else:
            pages = {
                MACHINE: self._machine, WORKLOAD: self._workload, GOAL: self._goal, PROBING: self._probing,
                TABLE: self._table, VERIFY: self._verify, FILE: self._file,
            }  # fmt: skip
            if self.view.page in pages:
                pages[self.view.page](key)

    def _back(self) -> None:
        view = self.view
        if view.page in (PROBING, VERIFY) and self._source.working():
            self._source.stop()
            self.show(replace(view, message=_STOPPING, bad=False))
            return
        before = {WORKLOAD: MACHINE, GOAL: WORKLOAD, PROBING: GOAL, TABLE: GOAL, VERIFY: TABLE, FILE: TABLE}
        if view.page == MACHINE:
            self._leave("")
        else:
            self.show(replace(view, page=before[view.page], chosen=0, top=0, message="", bad=False))

    def _move(self, by: int) -> None:
        view = self.view
        if view.page == FILE:
            self.show(replace(view, top=bounded(view.top + by, shown_lines(view))))
            return
        rows: tuple[object, ...] = {
            WORKLOAD: view.workloads, GOAL: view.fields, TABLE: view.rows, VERIFY: view.verified,
        }.get(view.page, ())  # fmt: skip
        self.show(replace(view, chosen=bounded(view.chosen + by, rows)))

    def _machine(self, key: str) -> None:
        if key in ("enter", "right", "space"):
            self.show(replace(self.view, page=WORKLOAD, workloads=self._source.workloads(), chosen=0))

    def _workload(self, key: str) -> None:
        if key in ("enter", "right", "space"):
            facts = self._source.choose(self.view.chosen)
            trouble = self._source.problem()
            if trouble:
                self.show(replace(self.view, facts=facts, message=trouble, bad=True))
            else:
                fields = self._source.fields()
                view = replace(
                    self.view, page=GOAL, facts=facts, fields=fields, chosen=0, message="", bad=False
                )
                self.show(view)

    def _goal(self, key: str) -> None:
        steps = {"right": 1, "l": 1, "+": 1, "space": 1, "left": -1, "h": -1, "-": -1}
        if key in steps:
            trouble = self._source.change(self.view.chosen, steps[key])
            self.show(replace(self.view, fields=self._source.fields(), message=trouble, bad=bool(trouble)))
        elif key == "enter":
            trouble = self._source.problem()
            if trouble:
                self.show(replace(self.view, message=trouble, bad=True))
                return
            self._begin()

    def _probing(self, key: str) -> None:
        if key == "enter" and not self._source.working():
            self._begin()

    def _begin(self) -> None:
        self._source.probe()
        self.show(replace(self.view, page=PROBING, rows=(), best=(), message="", bad=False))

    def _table(self, key: str) -> None:
        view = self.view
        rows = ordered(view.rows, view.column)
        if key == "s":
            self.show(replace(view, column=(view.column + 1) % len(COLUMNS)))
        elif key == "p":
            self.show(replace(view, plot=not view.plot))
        elif key == "space" and rows:
            one = rows[view.chosen]
            marked = tuple(other for other in view.marked if other.key != one.key)
            self.show(replace(view, marked=marked if len(marked) < len(view.marked) else (*marked, one)))
        elif key == "v" and view.marked:
            self._source.verify(view.marked)
            self.show(replace(view, page=VERIFY, verified=view.marked, chosen=0, message="", bad=False))
        elif key == "enter" and rows:
            self._open_file(rows[view.chosen])

    def _verify(self, key: str) -> None:
        if key == "enter" and self.view.verified and not self._source.working():
            self._open_file(self.view.verified[self.view.chosen])

    def _open_file(self, one: Proposal) -> None:
        trouble = one.failed or ("" if one.fits or one.measured is not None else "this one does not fit")
        if trouble:
            self.show(replace(self.view, message=f"{trouble}; choose another", bad=True))
            return
        try:
            file = self._source.preview(one)
        except NddError as error:
            self.show(replace(self.view, message=str(error), bad=True))
            return
        self._chosen = one
        view = replace(self.view, page=FILE, file=file, top=0, show_diff=file.there, saved="")
        self.show(replace(view, message="", bad=False))

    def _file(self, key: str) -> None:
        view = self.view
        if key == "d" and view.file.there:
            self.show(replace(view, show_diff=not view.show_diff, top=0))
        elif key in ("w", "enter", *("t" * self._can_train)) and self._chosen is not None:
            saved = view.saved
            if not saved:
                try:
                    saved = self._source.save(self._chosen)
                except NddError as error:
                    self.show(replace(view, message=str(error), bad=True))
                    return
            self.show(replace(view, saved=saved, message=f"written: {saved}", bad=False))
            if key == "t":
                self._leave(saved)


def _keys(view: WizardView, can_train: bool) -> Keys:
    back, close = ("b", "back"), ("q", "close")
    move = ("↑↓", "choose")
    match view.page:
        case 0:
            return (("enter", "next"), ("?", "help"), close)
        case 1:
            return (("enter", "next"), move, back, close)
        case 2:
            return (("enter", "probe"), move, ("←→", "change"), back, close)
        case 3:
            return (("b", "stop"), close) if view.share is not None else (("enter", "again"), back, close)
        case 4:
            verify = (("v", f"measure {len(view.marked)}"),) if view.marked else ()
            keys = (("enter", "file"), *verify, ("space", "mark"), ("s", "sort"), ("p", "plot"))
            return (*keys, back, close)
        case 5:
            return (("enter", "file"), move, ("b", "back" if view.share is None else "stop"), close)
        case _:
            diff = (("d", "whole file" if view.show_diff else "difference"),) if view.file.there else ()
            train = (("t", "write and train"),) if can_train else ()
            return (("w", "write"), *train, *diff, ("↑↓", "scroll"), back, close)
