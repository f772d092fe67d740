"""The wizard's screen: asks the questions and shows the progress and results of the work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from textual.widget import Widget

from ndd_console.screens.interfaces import StartRow
from ndd_console.view import wizard as pages
from ndd_console.view.keys import WIZARD_KEYS, Key
from ndd_console.view.rows import BLANK, paragraph, rule
from ndd_console.view.style import Look, Row
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
    trail,
)  # fmt: skip
from ndd_console.widgets.lines import Lines, RowList
from ndd_console.words.wizard import COLUMNS
from ndd_engine.errors import NddError

from .base import ViewScreen
from .pages import HelpScreen

if TYPE_CHECKING:
    from ndd_engine.wizard.proposals import Proposal

_LOOK_S = 0.2
_STOPPING = "stopping…"
_BEFORE = {WORKLOAD: MACHINE, GOAL: WORKLOAD, PROBING: GOAL, TABLE: GOAL, VERIFY: TABLE, FILE: TABLE}


# Pages whose body is a list; the others are text.
_LISTS = (WORKLOAD, GOAL, TABLE, VERIFY)


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

    keys = WIZARD_KEYS
    body: RowList

    def __init__(
        self, look: Look, source: WizardSource, leave: Callable[[str], None], *, can_train: bool = True
    ) -> None:
        super().__init__(look, WizardView(can_train=can_train), RowList(look))
        self.page = Lines(look, scrolls=True)
        self._source = source
        self._leave = leave
        self._proposal: Proposal | None = None  # of the file

    def parts(self) -> tuple[Widget, ...]:
        return self.top, self.body, self.page, self.below

    def text(self) -> Lines:
        return self.page

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
            if self.message[0] == _STOPPING:
                self._set()
            if failed:
                self.message = (failed, "bad")
            elif view.page == PROBING and view.rows:
                view = replace(view, page=TABLE, marked=source.suggested())
        self.show_view(view)

    def show_view(self, view: WizardView) -> None:
        if view.page != self.view.page:
            self.body.show(())  # the first entry of the new page is selected
        super().show_view(view)

    def _set(self, message: str = "", bad: bool = False, **changes: Any) -> None:
        self.message = (message, "bad" if bad else "accent")
        self.show(**changes)
        self.paint()

    def sections(self, width: int, height: int) -> tuple[list[Row], list[Row]]:
        view = self.view
        self.swap(listed=view.page in _LISTS)
        top = [trail(view.page, width), BLANK] if height >= 12 else [trail(view.page, width)]
        room = height - len(top)
        match view.page:
            case 0:
                self.page.show(pages.machine_page(view, width))
            case 1:
                self.body.show(pages.workload_entries(view, width))
                return [*top, rule("workload", width)], pages.data_rows(view, width)
            case 2:
                self.body.show(pages.field_entries(view))
                field = self.body.chosen
                meaning = [] if field is None else [BLANK, *paragraph(field.meaning, width, "dim")]
                return [*top, rule("goal and limits", width)], [*meaning, *pages.data_rows(view, width)]
            case 3:
                self.page.show(pages.probing_page(view, width, room))
            case 4:
                self.body.show(pages.table_entries(view, width))
                below = pages.table_below(view, self.body.chosen, width, room)
                return [*top, pages.table_heading(view, width)], below
            case 5:
                self.body.show(pages.verify_entries(view, width))
                return [*top, *pages.verify_heading(view, width)], pages.verify_below(view, width)
            case _:
                self.page.show(pages.file_page(view, width))
                return [*top, rule(pages.file_title(view), width)], []
        return top, []

    # Keys.

    def _working(self) -> bool:
        return self.view.page in (PROBING, VERIFY) and self._source.working()

    def has(self, need: str) -> bool:
        view = self.view
        return {
            "idle": not self._working(),
            "further page": view.page != FILE,
            "table page": view.page == TABLE,
            "goal page": view.page == GOAL,
            "file page": view.page == FILE,
            "marked": bool(view.marked),
            "existing file": view.file.there,
            "training here": view.can_train,
        }[need]

    def word(self, key: Key) -> str:
        view = self.view
        match key.action:
            case "next":
                return {GOAL: "probe", PROBING: "retry", TABLE: "file", VERIFY: "file"}.get(view.page, "next")
            case "measure":
                return f"measure {len(view.marked)}"
            case "back":
                return "stop" if self._working() else "back"
            case "diff":
                return "complete file" if view.show_diff else "changes"
        return key.word

    def on_option_list_option_highlighted(self) -> None:
        self.paint()

    def on_option_list_option_selected(self) -> None:
        self.action_use("next")

    def action_close(self) -> None:
        self._source.stop()
        self._leave("")

    def action_help(self) -> None:
        self.app.push_screen(HelpScreen(self.look, WIZARD_KEYS))

    def action_back(self) -> None:
        """Stop running work; else the page before."""
        if self._working():
            self._source.stop()
            self._set(_STOPPING)
        elif self.view.page == MACHINE:
            self._leave("")
        else:
            self._set(page=_BEFORE[self.view.page])

    def action_next(self) -> None:
        """What enter does on this page."""
        view, source = self.view, self._source
        if view.page == MACHINE:
            self._set(page=WORKLOAD, workloads=source.workloads())
        elif view.page == WORKLOAD and self.body.highlighted is not None:
            facts = source.choose(self.body.highlighted)
            trouble = source.problem()
            if trouble:
                self._set(trouble, bad=True, facts=facts)
            else:
                self._set(page=GOAL, facts=facts, fields=source.fields())
        elif view.page in (GOAL, PROBING):
            trouble = source.problem() if view.page == GOAL else ""
            if trouble:
                self._set(trouble, bad=True)
            else:
                source.probe()
                self._set(page=PROBING, rows=(), best=())
        elif self.body.chosen is not None:
            self._open_file(self.body.chosen)

    def action_more(self) -> None:
        self._change(1)

    def action_less(self) -> None:
        self._change(-1)

    def _change(self, by: int) -> None:
        """Change the selected answer."""
        trouble = self._source.change(self.body.highlighted or 0, by)
        self._set(trouble, bad=bool(trouble), fields=self._source.fields())

    def action_sort(self) -> None:
        self.show(column=(self.view.column + 1) % len(COLUMNS))

    def action_plot(self) -> None:
        self.show(plot=not self.view.plot)

    def action_mark(self) -> None:
        """Mark the selected proposal for measurement, or take the mark away."""
        one, marked = self.body.chosen, self.view.marked
        if one is None:
            return
        if one.layout.ranks > 1:
            self._set("proposals for several ranks cannot be measured here", bad=True)
            return
        others = tuple(other for other in marked if other.key != one.key)
        self._set(marked=others if len(others) < len(marked) else (*marked, one))

    def action_measure(self) -> None:
        """Measure the marked proposals."""
        marked = self.view.marked
        self._source.verify(marked)
        self._set(page=VERIFY, verified=marked)

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
        self._proposal = one
        self._set(page=FILE, file=file, show_diff=file.there, saved="")

    def action_diff(self) -> None:
        self.show(show_diff=not self.view.show_diff)

    def action_write(self) -> None:
        """Write the file. If it was changed meanwhile, show the new diff, and write when asked again."""
        self._write()

    def action_train(self) -> None:
        """Write the file, and train it."""
        if self._write():
            self._leave(self.view.saved)

    def _write(self) -> bool:
        """Write the file once. Returns whether it is written."""
        assert self._proposal is not None
        if not self.view.saved:
            try:
                if self._source.changed():
                    file = self._source.preview(self._proposal)
                    text = f"{file.path} was changed after it was read; this is its new diff: press w to write it"
                    self._set(text, bad=True, file=file, show_diff=file.there)
                    return False
                self.show(saved=self._source.save(self._proposal))
            except NddError as error:
                self._set(str(error), bad=True)
                return False
        self._set(f"wrote {self.view.saved}")
        return True
