"""The wizard's screen: asks the questions and shows the progress and results of the work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from textual import events

from ndd_console.screens.interfaces import StartRow
from ndd_console.view.pager import WIZARD_KEYS
from ndd_console.view.style import Look
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
    wizard_rows,
)
from ndd_engine.errors import NddError

from .base import ViewScreen, bounded, key_of, moved
from .pages import HelpScreen

if TYPE_CHECKING:
    from ndd_engine.wizard.proposals import Proposal

_LOOK_S = 0.2
_PAGE = 10
_STOPPING = "stopping…"
_BEFORE = {WORKLOAD: MACHINE, GOAL: WORKLOAD, PROBING: GOAL, TABLE: GOAL, VERIFY: TABLE, FILE: TABLE}


class WizardSource(Protocol):
    """The wizard's work. Long work runs in a thread; `look` returns its progress."""

    def machine_lines(self) -> tuple[str, ...] | None: ...  # the detected hardware; None during detection
    def workloads(self) -> tuple[StartRow, ...]: ...  # the requested one first

    # Choose a workload. Returns facts about its data; () if it has a problem.
    def choose(self, place: int) -> tuple[str, ...]: ...
    def fields(self) -> tuple[Field, ...]: ...  # the questions of the goal page

    # Change an answer to the next (by 1) or previous choice. Returns the problem with the answers, or "".
    def change(self, place: int, by: int) -> str: ...
    def problem(self) -> str: ...  # with the answers, or ""
    def probe(self) -> None: ...  # starts probing
    def verify(self, chosen: tuple[Proposal, ...]) -> None: ...  # starts measuring
    def look(self, view: WizardView) -> WizardView: ...  # the view, updated with the current results
    def working(self) -> bool: ...  # whether work is running
    def failed(self) -> str: ...  # why the last work failed, or ""
    def suggested(self) -> tuple[Proposal, ...]: ...  # proposals recommended for measurement
    def preview(self, chosen: Proposal) -> Preview: ...  # the file to write; raises NddError
    def changed(self) -> bool: ...  # whether the file differs from what `preview` read
    def save(self, chosen: Proposal) -> str: ...  # writes the file and returns its name; raises NddError
    def stop(self) -> None: ...  # cancels running work


class WizardScreen(ViewScreen[WizardView]):
    """leave: called with a file to train, or "" to close. can_train: whether training on this machine is possible."""

    def __init__(
        self, look: Look, source: WizardSource, leave: Callable[[str], None], *, can_train: bool = True
    ) -> None:
        super().__init__(look, WizardView(can_train=can_train), wizard_rows)
        self._source = source
        self._leave = leave
        self._chosen: Proposal | None = None

    def on_mount(self) -> None:
        self.set_interval(_LOOK_S, self.look_again)

    def look_again(self) -> None:
        """Show the current results of the work."""
        source, view = self._source, self.view
        view = source.look(replace(view, machine=source.machine_lines()))
        # Marked proposals may have been measured since.
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
        self.show_view(view)

    def _set(self, message: str = "", bad: bool = False, **changes: Any) -> None:
        self.show(message=message, bad=bad, **changes)

    def on_key(self, event: events.Key) -> None:
        event.stop()
        key = "space" if event.character == " " else key_of(event)
        step = moved(key, _PAGE)
        if key in ("q", "ctrl+q", "ctrl+c"):
            self._source.stop()
            self._leave("")
        elif key == "?":
            self.app.push_screen(HelpScreen(self.look, WIZARD_KEYS))
        elif key in ("escape", "backspace", "b"):
            self._back()
        elif step is not None and self.view.page != MACHINE:
            self._move(step)
        else:
            pages = {
                MACHINE: self._machine, WORKLOAD: self._workload, GOAL: self._goal, PROBING: self._probing,
                TABLE: self._table, VERIFY: self._verify, FILE: self._file,
            }  # fmt: skip
            pages[self.view.page](key)

    def _back(self) -> None:
        view = self.view
        if view.page in (PROBING, VERIFY) and self._source.working():
            self._source.stop()
            self._set(_STOPPING)
            return
        if view.page == MACHINE:
            self._leave("")
        else:
            self._set(page=_BEFORE[view.page], chosen=0, top=0)

    def _move(self, by: int) -> None:
        view = self.view
        if view.page == FILE:
            self.show(top=bounded(view.top + by, len(view.lines)))
            return
        rows: tuple[object, ...] = {
            WORKLOAD: view.workloads, GOAL: view.fields, TABLE: view.rows, VERIFY: view.verified,
        }.get(view.page, ())  # fmt: skip
        self.show(chosen=bounded(view.chosen + by, len(rows)))

    def _machine(self, key: str) -> None:
        if key in ("enter", "right", "space"):
            self.show(page=WORKLOAD, workloads=self._source.workloads(), chosen=0)

    def _workload(self, key: str) -> None:
        if key in ("enter", "right", "space"):
            facts = self._source.choose(self.view.chosen)
            trouble = self._source.problem()
            if trouble:
                self._set(trouble, bad=True, facts=facts)
            else:
                self._set(page=GOAL, facts=facts, fields=self._source.fields(), chosen=0)

    def _goal(self, key: str) -> None:
        steps = {"right": 1, "l": 1, "+": 1, "space": 1, "left": -1, "h": -1, "-": -1}
        if key in steps:
            trouble = self._source.change(self.view.chosen, steps[key])
            self._set(trouble, bad=bool(trouble), fields=self._source.fields())
        elif key == "enter":
            trouble = self._source.problem()
            if trouble:
                self._set(trouble, bad=True)
            else:
                self._begin()

    def _probing(self, key: str) -> None:
        if key == "enter" and not self._source.working():
            self._begin()

    def _begin(self) -> None:
        self._source.probe()
        self._set(page=PROBING, rows=(), best=())

    def _table(self, key: str) -> None:
        view = self.view
        rows = ordered(view.rows, view.column)
        if key == "s":
            self.show(column=(view.column + 1) % len(COLUMNS))
        elif key == "p":
            self.show(plot=not view.plot)
        elif key == "space" and rows and rows[view.chosen].layout.ranks > 1:
            self._set("proposals for several ranks cannot be measured here", bad=True)
        elif key == "space" and rows:
            one = rows[view.chosen]
            marked = tuple(other for other in view.marked if other.key != one.key)
            self.show(marked=marked if len(marked) < len(view.marked) else (*marked, one))
        elif key == "v" and view.marked:
            self._source.verify(view.marked)
            self._set(page=VERIFY, verified=view.marked, chosen=0)
        elif key == "enter" and rows:
            self._open_file(rows[view.chosen])

    def _verify(self, key: str) -> None:
        if key == "enter" and self.view.verified and not self._source.working():
            self._open_file(self.view.verified[self.view.chosen])

    def _open_file(self, one: Proposal) -> None:
        trouble = one.failed or ("" if one.fits or one.measured is not None else "this proposal does not fit")
        if trouble:
            self._set(f"{trouble}; choose another one", bad=True)
            return
        try:
            file = self._source.preview(one)
        except NddError as error:
            self._set(str(error), bad=True)
            return
        self._chosen = one
        self._set(page=FILE, file=file, top=0, show_diff=file.there, saved="")

    def _file(self, key: str) -> None:
        view = self.view
        if key == "d" and view.file.there:
            self.show(show_diff=not view.show_diff, top=0)
        elif key in ("w", *("t" * view.can_train)) and self._chosen is not None:
            saved = view.saved
            if not saved:
                try:
                    if self._source.changed():
                        self._ask_again()
                        return
                    saved = self._source.save(self._chosen)
                except NddError as error:
                    self._set(str(error), bad=True)
                    return
            self._set(f"wrote {saved}", saved=saved)
            if key == "t":
                self._leave(saved)
        elif key == "enter" and not view.saved:
            self._set(f"press w to write {view.file.path}")

    def _ask_again(self) -> None:
        """The file changed since its diff was shown: show the new diff, and write on the next key. Raises NddError."""
        assert self._chosen is not None
        file = self._source.preview(self._chosen)
        text = f"{file.path} was changed after it was read; this is its new diff: press w to write it"
        self._set(text, bad=True, file=file, top=0, show_diff=file.there)
