"""The wizard in a terminal: its work in a thread, its screen, and their shutdown."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ndd_console.app import WizardApp
from ndd_console.process.hosting import hosted
from ndd_console.process.launcher import Leash
from ndd_console.process.terminal import capabilities
from ndd_console.process.thread import ThreadJob
from ndd_console.view.wizard import Preview, WizardView
from ndd_console.words.wizard import lengths_line
from ndd_engine.config.parsing import text_of
from ndd_engine.errors import UsageError
from ndd_engine.files import replaces, write_text
from ndd_engine.record.rundir import all_runs
from ndd_engine.wizard.answers import Answers
from ndd_engine.wizard.proposals import Proposal

from .saving import new_path, save_new
from .wizard_questions import Questions

if TYPE_CHECKING:
    from ndd_console.screens.interfaces import StartRow
    from ndd_engine.wizard.choice import Choice
    from ndd_engine.wizard.session import ProposalSet

# Default file name.
_STEM = "wizard"


class WizardJob(ThreadJob, Questions):
    """See screens.wizard.WizardSource.

    answers: initial answers from the command line. path: the file to write, or to change if it exists; None for a new
    name. notes: additional lines about the machine. first: the entry of the home screen to begin with.
    """

    def __init__(
        self,
        answers: Answers,
        path: Path | None,
        budget_s: float,
        notes: tuple[str, ...] = (),
        first: StartRow | None = None,
    ) -> None:
        ThreadJob.__init__(self, "ndd-wizard")
        Questions.__init__(self, answers, notes, first)
        self._output, self._budget_s = path, budget_s
        self._proposed: ProposalSet | None = None
        self._verified: tuple[Proposal, ...] = ()
        self._choice: Choice | None = None
        self._stage, self._share, self._began = "", 0.0, 0.0
        # Contents of the file when its preview was made; None if there was none.
        self._seen: bytes | None = None

    @property
    def _path(self) -> Path | None:
        """The file to write: that of the command line, else the configuration that was chosen from the folder."""
        return self._output if self._output is not None or self._given else self.answers.config

    def probe(self) -> None:
        self._proposed, self._verified, self._choice = None, (), None
        self._start(self._plan)

    def verify(self, chosen: tuple[Proposal, ...]) -> None:
        from ndd_engine.wizard.session import with_present

        assert self._proposed is not None
        rows = self._verified = tuple(with_present(chosen, self._proposed))
        self._choice = None
        self._start(lambda: self._measure(rows))

    def look(self, view: WizardView) -> WizardView:
        from ndd_engine.wizard.planner import model_name

        proposed = self._proposed
        if proposed is not None:
            opened = proposed.situation.opened
            failed = (f"{model_name(probed.model)}: {probed.why}" for probed in proposed.found if probed.why)
            about = (opened.data, opened.model, *lengths_line(opened), *proposed.situation.notes)
            notes = (*about, *self._notes, *failed)
            view = replace(view, rows=proposed.rows, best=proposed.best, notes=notes)
        if self.working():
            spent = time.monotonic() - self._began
            left = spent / self._share - spent if self._share > 0.05 else None
            view = replace(view, stage=self._stage, share=self._share, left_s=left)
        if self._verified:
            choice = self._choice
            best = choice.best if choice is not None else None
            advice = choice.text if choice is not None else ""
            view = replace(view, verified=self._verified, advice=advice, recommended=best)
        return view

    def suggested(self) -> tuple[Proposal, ...]:
        if self._proposed is None or self.answers.gpu is not None:
            return ()
        from ndd_engine.wizard.session import to_verify

        return tuple(to_verify(self._proposed, self.answers))

    def preview(self, chosen: Proposal) -> Preview:
        from ndd_engine.wizard.writing import difference

        self._seen = self._contents()
        text, path = self._text(chosen), self._path
        lines = tuple(text.splitlines())
        if path is not None and replaces(path):
            return Preview(lines, str(path), True, tuple(difference(text_of(path), text, str(path))))
        return Preview(lines, str(path or new_path(_STEM)))

    def changed(self) -> bool:
        return self._contents() != self._seen

    def _contents(self) -> bytes | None:
        """What is in the file that would be replaced; None if there is none."""
        if self._path is None or not replaces(self._path):
            return None
        try:
            return self._path.read_bytes()
        except OSError as error:
            raise UsageError(f"{self._path} cannot be read: {error.strerror or error}") from None

    def save(self, chosen: Proposal) -> str:
        text, path = self._text(chosen), self._path
        if path is None:
            return str(save_new(_STEM, text))
        write_text(path, text)
        return str(path)

    def _text(self, chosen: Proposal) -> str:
        from ndd_engine.wizard.choice import comparison
        from ndd_engine.wizard.session import written, written_into

        assert self._proposed is not None
        path, situation = self._path, self._proposed.situation
        if path is not None and replaces(path):
            return written_into(self.answers, situation, chosen, path)
        return written(self.answers, situation, chosen, comparison(chosen, self._verified))

    def _start(self, work: Callable[[], None]) -> None:
        self._stage, self._share, self._began = "starting", 0.0, time.monotonic()
        self.begin(work)

    def _plan(self) -> None:
        from ndd_engine.wizard.session import propose

        def look(proposed: ProposalSet) -> None:
            self._proposed = proposed

        self._proposed = propose(self.answers, self._tell, self._stop, look)
        if not self._proposed.rows:
            reasons = "; ".join(probed.why for probed in self._proposed.found if probed.why)
            raise UsageError(f"nothing could be predicted: {reasons or 'no combination is possible'}")

    def _measure(self, chosen: Sequence[Proposal]) -> None:
        from ndd_engine.wizard.choice import choose, listed
        from ndd_engine.wizard.verify import verify

        assert self._proposed is not None
        measured = verify(
            self._proposed.situation, self.answers, chosen, self._budget_s, self._tell, self._stop
        )
        self._choice = choose(measured, self.answers)
        self._verified = tuple(listed(measured, self.answers, self._choice))
        self._proposed = self._proposed.verified(measured)

    def _tell(self, text: str, share: float) -> None:
        self._stage, self._share = text, share


def run_notes(runs: Sequence[str]) -> tuple[str, ...]:
    """How live runs affect the wizard. runs: their names."""
    if not runs:
        return ()
    word = "live run" if len(runs) == 1 else "live runs"
    return (f"{word} {', '.join(runs)}: included in measured times and in used memory",)


def live_run_notes(root: Path) -> tuple[str, ...]:
    """`run_notes` for the live runs in a folder."""
    return run_notes([run.name for run in all_runs(root) if run.live_owner()])


def show(
    answers: Answers, output: Path | None, budget_s: float, ascii_only: bool, root: Path, leash: Leash
) -> tuple[str, int]:
    """Show the wizard until it is closed. Returns the file to train, or "", and the exit status.

    root: folder of the runs.
    """
    job = WizardJob(answers, output or answers.config, budget_s, live_run_notes(root))
    app = WizardApp(job, capabilities(ascii_only), can_train=answers.gpu is None)
    status = hosted(app, job, leash)
    return app.to_train, status
