"""The wizard behind its screen: its questions, and its work in a thread."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ndd_console.process.thread import ThreadJob
from ndd_console.words.blocks import Block, Text
from ndd_console.words.machine import machine_blocks
from ndd_console.words.wizard import MEANINGS, data_texts, other_gpu_blocks, situation_texts
from ndd_engine.config import DEFAULT_WORKLOAD
from ndd_engine.config.loading import text_of
from ndd_engine.errors import NddError, UsageError
from ndd_engine.files import replaces, write_text
from ndd_engine.hardware.detect import detect
from ndd_engine.hardware.named_gpus import gpu_named, usable_bytes
from ndd_engine.record.rundir import all_runs
from ndd_engine.text import number, size
from ndd_engine.wizard.proposals import (
    GOALS,
    RESERVED_SHARE,
    Answers,
    Proposal,
    longest_sequence,
)

from .folder import StartRow, folder_rows
from .run_sources import built_in_rows
from .trials import new_path, save_new

if TYPE_CHECKING:
    from ndd_engine.config import Config
    from ndd_engine.hardware.gpus import Machine
    from ndd_engine.wizard.session import Choice, ProposalSet

_STEM = "wizard"  # default file name
# Choices for the reserved memory besides the default, as shares of the free memory.
_RESERVED = (0.0, 0.2, 0.4, 0.6)
# Choices for the effective batch, relative to the configured one.
_TIMES = (2, 4, 8)


@dataclass(frozen=True, slots=True)
class Field:
    """One question of the goal page, its current answer, an explanation, and the choices as changes to the answers."""

    name: str
    value: str
    meaning: str
    choices: Sequence[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Preview:
    """A file before it is written. there: it already exists; diff: the lines that would change in it."""

    text: tuple[str, ...]
    path: str
    there: bool = False
    diff: tuple[str, ...] = ()


class WizardJob(ThreadJob):
    """What the wizard knows, and its work. The hardware is detected in a thread, too.

    stage: of the work. verified: the proposals that are measured, best for the goal first at the end.
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
        super().__init__("ndd-wizard")
        self.answers = answers
        # Whether the configuration was given, so that there is nothing to choose from.
        self._given = answers.config is not None
        self._first = first
        self._rows: tuple[StartRow, ...] = ()
        self._items = answers.items
        self._about_machine = notes
        self._machine: Machine | None = None
        # The workload that the answers refer to.
        self._asked = answers.workload or DEFAULT_WORKLOAD
        # Of the chosen workload; with the smallest size if the size is "auto" (open).
        self._config: Config | None = None
        self._open = False
        self._longest = 0
        self._train_items: int | None = None
        self._sizes: tuple[str, ...] = ()
        self._trouble = ""
        self._output, self._budget_s = path, budget_s
        self._proposed: ProposalSet | None = None
        self.verified: tuple[Proposal, ...] = ()
        self._choice: Choice | None = None
        self.stage, self._share, self._began = "", 0.0, 0.0
        # Contents of the file when its preview was made; None if there was none.
        self._seen: bytes | None = None
        threading.Thread(target=self._detect, name="ndd-wizard-machine", daemon=True).start()

    # The questions.

    @property
    def machine(self) -> list[Block] | None:
        """The hardware; None during detection."""
        if self._machine is None:
            return None
        gpu = self.answers.gpu
        other = () if gpu is None else other_gpu_blocks(gpu_named(gpu))
        return [*other, *machine_blocks(self._machine), *map(Text, self._about_machine)]

    def workloads(self) -> tuple[StartRow, ...]:
        """The requested one first."""
        if self._given:
            self._rows = (StartRow(str(self.answers.config), "from the command line", "", kind="file"),)
            return self._rows
        asked = self._first.name if self._first is not None else self._asked
        rows = [*folder_rows(), *built_in_rows()]
        if asked not in {row.name for row in rows}:
            rows.append(StartRow(asked, "your own workload", "", kind="own"))
        # The requested one comes first; the default workload only before the other built-in ones.
        only = self.answers.workload is None and self._first is None
        rows.sort(key=lambda row: (only and row.kind == "workload", row.name != asked))
        self._rows = tuple(rows)
        return self._rows

    def choose(self, place: int) -> tuple[str, ...]:
        """Choose a workload. Returns facts about its data; () if it has a problem."""
        from ndd_engine.workloads.interface import facts

        row = self._rows[place]
        name = row.name
        if not self._given and name != self._asked:
            # Another workload has other sizes, sequences and batches.
            self.answers = replace(self.answers, sizes=(), min_sequence=None, effective_batch=None, keep=())
        if not self._given:
            file = Path(name) if row.kind == "file" else None
            self.answers = replace(self.answers, config=file, workload=None if file else name)
            self._asked = name
        try:
            draft = self.answers.draft()
            config = draft.resolve(draft.auto["candidates"][0] if draft.size == "auto" else None)
            self._longest = longest_sequence(draft)
            known = facts(config)
        except NddError as error:
            self._config, self._trouble = None, str(error)
            return ()
        self._config, self._sizes, self._trouble = config, draft.sizes, ""
        self._open = draft.size == "auto"
        self._train_items = None if known is None else known.train_items
        return data_texts(known, str(config.workload.size) if self._open else "")

    def fields(self) -> tuple[Field, ...]:
        return tuple(self._questions())

    def _questions(self) -> Iterator[Field]:
        answers, config, items = self.answers, self._config, self.answers.items or 1
        assert config is not None
        goals = [{"goal": goal} for goal in GOALS]
        yield Field("goal", GOALS[answers.goal], MEANINGS[answers.goal], goals)
        if answers.goal == "time":
            numbers = [{"items": amount} for amount in (items, items * 2, max(items // 2, 1))]
            yield Field("number of items", number(answers.items), MEANINGS["number of items"], numbers)
        batch = answers.step_items(config)
        configured = self._open and answers.effective_batch is None
        text = "any" if batch is None else "as configured" if configured else str(batch)
        now, most = config.batch.items, self._train_items or sys.maxsize
        larger = (now * times for times in _TIMES if now * times <= most)
        held = [self._kept("batch", False), self._kept("batch", True)]
        held = [{**one, "effective_batch": None} for one in held]
        held += [{"effective_batch": size} for size in larger]
        yield Field("effective batch", text, MEANINGS["effective batch"], held)
        kept = "as configured" if self._open else str(config.batch.sequence)
        beside = kept if "sequence" in answers.keep else f"{kept}, half of it beside"
        text = beside if answers.min_sequence is None else str(answers.min_sequence)
        shorter = [self._longest // 2**power for power in range(1, 6 if self._open else 4)]
        lengths = [{**self._kept("sequence", keep), "min_sequence": None} for keep in (False, True)]
        lengths += [
            {**self._kept("sequence", False), "min_sequence": length} for length in shorter if length >= 2
        ]
        yield Field("minimum sequence", text, MEANINGS["minimum sequence"], lengths)
        if self._sizes:
            automatic = "automatic" if self._open else "as configured"
            beside = automatic if "size" in answers.keep else f"{automatic}, its neighbours beside"
            text = ", ".join(answers.sizes) or beside
            named = [*((name,) for name in self._sizes), self._sizes]
            chosen = [{**self._kept("size", keep), "sizes": ()} for keep in (False, True)]
            chosen += [{**self._kept("size", False), "sizes": one} for one in named]
            yield Field("model sizes", text, MEANINGS["model sizes"], chosen)
        reserved = answers.reserve_bytes
        text = f"{RESERVED_SHARE * 100:.0f} % of free memory" if reserved is None else size(reserved)
        here = self._machine.free_bytes if self._machine is not None else None
        free = here if answers.gpu is None else usable_bytes(gpu_named(answers.gpu))
        shares = () if free is None else (int(share * free) for share in _RESERVED)
        spare = [{"reserve_bytes": count} for count in (None, *shares)]
        yield Field("reserved memory", text, MEANINGS["reserved memory"], spare)

    def _kept(self, name: str, keep: bool) -> dict[str, Any]:
        """The change of the answers that keeps one more or one less as configured."""
        others = (one for one in self.answers.keep if one != name)
        return {"keep": (*others, name) if keep else tuple(others)}

    def change(self, place: int, by: int) -> str:
        """Change an answer to the next (by 1) or previous choice. Returns the problem with the answers, or ""."""
        choices, before = self.fields()[place].choices, self.answers
        chosen = (all(getattr(before, key) == value for key, value in each.items()) for each in choices)
        now = next((index for index, known in enumerate(chosen) if known), 0)
        self.answers = replace(before, **choices[(now + by) % len(choices)])
        if self.answers.goal != before.goal:
            items = self._items
            if self.answers.goal == "time" and items is None and self._config is not None:
                from ndd_engine.wizard.planner import run_items

                items = run_items(self._config, self._config.batch.items * 1000)
            self.answers = replace(self.answers, items=items)
        return self.problem()

    def problem(self) -> str:
        if self._config is None:
            return self._trouble or "choose a workload first"
        try:
            self.answers.checked(self._longest, self._sizes)
        except NddError as error:
            return str(error)
        return ""

    def _detect(self) -> None:
        self._machine = detect(use_torch=False)

    # The work.

    @property
    def _path(self) -> Path | None:
        """The file to write: that of the command line, else the configuration that was chosen from the folder."""
        return self._output if self._output is not None or self._given else self.answers.config

    def probe(self) -> None:
        self._proposed, self.verified, self._choice = None, (), None
        self._start(self._plan)

    def verify(self, chosen: tuple[Proposal, ...]) -> None:
        from ndd_engine.wizard.session import with_present

        assert self._proposed is not None
        self.verified, self._choice = tuple(with_present(chosen, self._proposed)), None
        self._start(self._measure)

    @property
    def rows(self) -> tuple[Proposal, ...]:
        return self._proposed.rows if self._proposed is not None else ()

    @property
    def table(self) -> tuple[Proposal, ...]:
        """The handful of proposals that differ in what matters, best for the goal first."""
        from ndd_engine.wizard.ranking import handful

        return tuple(handful(self.rows, self.answers))

    @property
    def best(self) -> tuple[Proposal, ...]:
        """The Pareto front."""
        return self._proposed.best if self._proposed is not None else ()

    @property
    def notes(self) -> Sequence[str]:
        """About data, model and what failed."""
        return () if self._proposed is None else (*situation_texts(self._proposed), *self._about_machine)

    @property
    def advice(self) -> str:
        """The recommendation from the measurements, or why there is none."""
        return self._choice.text if self._choice is not None else ""

    @property
    def recommended(self) -> Proposal | None:
        return self._choice.best if self._choice is not None else None

    def progress(self) -> tuple[float, float | None]:
        """The share of the work, and the seconds left if known."""
        share, spent = self._share, time.monotonic() - self._began
        return share, spent / share - spent if share > 0.05 else None

    def suggested(self) -> tuple[Proposal, ...]:
        """The proposals recommended for measurement."""
        if self._proposed is None or self.answers.gpu is not None:
            return ()
        from ndd_engine.wizard.session import to_verify

        return tuple(to_verify(self._proposed, self.answers))

    def preview(self, chosen: Proposal) -> Preview:
        """The file to write. Raises NddError."""
        from ndd_engine.wizard.session import difference

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
        from ndd_engine.wizard.session import comparison, written, written_into

        assert self._proposed is not None
        path, situation = self._path, self._proposed.situation
        if path is not None and replaces(path):
            return written_into(self.answers, situation, chosen, path)
        return written(self.answers, situation, chosen, comparison(chosen, self.verified))

    def _start(self, work: Callable[[], None]) -> None:
        self.stage, self._share, self._began = "starting", 0.0, time.monotonic()
        self.begin(work)

    def _plan(self) -> None:
        from ndd_engine.wizard.session import propose

        def look(proposed: ProposalSet) -> None:
            self._proposed = proposed

        self._proposed = propose(self.answers, self._tell, self.stopping, look)
        if not self._proposed.rows:
            reasons = "; ".join(probed.why for probed in self._proposed.found if probed.why)
            raise UsageError(f"nothing could be predicted: {reasons or 'no combination is possible'}")

    def _measure(self) -> None:
        from ndd_engine.wizard.session import choose, listed, verify

        assert self._proposed is not None
        situation, chosen = self._proposed.situation, self.verified
        measured = verify(situation, self.answers, chosen, self._budget_s, self._tell, self.stopping)
        self._choice = choose(measured, self.answers)
        self.verified = tuple(listed(measured, self.answers, self._choice))
        self._proposed = self._proposed.verified(measured)

    def _tell(self, text: str, share: float) -> None:
        self.stage, self._share = text, share


def live_run_notes(root: Path, ended: str = "") -> tuple[str, ...]:
    """How the live runs in a folder affect the wizard. ended: a run that has ended, but whose process has not."""
    runs = [run.name for run in all_runs(root) if run.name != ended and run.live_owner()]
    word = "live run" if len(runs) == 1 else "live runs"
    return (f"{word} {', '.join(runs)}: included in measured times and in used memory",) if runs else ()
