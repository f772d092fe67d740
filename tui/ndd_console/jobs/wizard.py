"""The wizard behind its screen: its questions, and its work in a thread."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ndd_console.process.thread import ThreadJob
from ndd_console.words.blocks import Block, Facts, Text
from ndd_console.words.machine import machine_blocks, peak_rows
from ndd_console.words.wizard import situation_texts
from ndd_engine.config import DEFAULT_WORKLOAD
from ndd_engine.config.loading import text_of
from ndd_engine.errors import NddError, UsageError
from ndd_engine.files import replaces, write_text
from ndd_engine.hardware.detect import detect
from ndd_engine.record.rundir import all_runs
from ndd_engine.text import counted, number, size
from ndd_engine.wizard.proposals import (
    GOALS,
    RESERVED_SHARE,
    Answers,
    Goal,
    Proposal,
    gpu_named,
    longest_sequence,
    usable_bytes,
)

from .folder import StartRow, folder_rows
from .run_sources import built_in_rows
from .saving import new_path, save_new

if TYPE_CHECKING:
    from ndd_engine.config import Config
    from ndd_engine.hardware.gpus import Machine
    from ndd_engine.wizard.session import Choice, ProposalSet

T = TypeVar("T")

_STEM = "wizard"  # default file name
_GOALS: tuple[Goal, ...] = tuple(GOALS)
# Choices for the reserved memory, as shares of the free memory; None for the default.
_RESERVED = (None, 0.0, 0.2, 0.4, 0.6)
# Choices for the effective batch, relative to the configured one.
_TIMES = (2, 4, 8)
MEANINGS = {
    "throughput": "as many items per second as possible within the limits below",
    "low-memory": "little memory at nearly full speed, for a machine shared with others",
    "reproducible": "fp32 and deterministic algorithms: the same results on the same machine",
    "time": "the shortest time for the number of items below, including data preparation",
}


@dataclass(frozen=True, slots=True)
class Field:
    """One question of the goal page, its current answer, and an explanation.

    after: the answers with the next choice (by 1), or with the one before (by -1).
    """

    name: str
    value: str
    meaning: str
    after: Callable[[int], Answers]


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
        self._reserved: float | None = None
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
        return [*_of_gpu(self.answers), *machine_blocks(self._machine), *map(Text, self._about_machine)]

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
            self.answers = replace(
                self.answers, sizes=(), min_sequence=None, effective_batch=None, hold_effective=True
            )
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
        if known is None:
            return ("the number of items is known after the data has been read",)
        each = (
            f", {counted(known.tokens_per_item, known.token or 'token')} each"
            if known.tokens_per_item
            else ""
        )
        amount = f"{counted(known.train_items, f'training {known.item}')}{each}"
        if self._open:
            amount += f" (with size {config.workload.size}; the size is chosen automatically)"
        return (known.text, amount)

    def fields(self) -> tuple[Field, ...]:
        """The questions of the goal page."""
        return tuple(self._questions())

    def _questions(self) -> Iterator[Field]:
        answers, config = self.answers, self._config
        assert config is not None
        yield Field("goal", GOALS[answers.goal], MEANINGS[answers.goal], self._next_goal)
        if answers.goal == "time":
            text = "the total number of items to train on"
            yield Field("number of items", number(answers.items), text, self._next_items)
        batch = answers.step_items(config)
        configured = self._open and answers.effective_batch is None
        text = "any" if batch is None else "as configured" if configured else str(batch)
        meaning = "items per optimizer step; kept by gradient accumulation, because changing it changes the training"
        yield Field("effective batch", text, meaning, self._next_batch)
        text = str(answers.min_sequence or ("as configured" if self._open else config.batch.sequence))
        meaning = "shorter sequences are faster and need less memory, but give the model less context"
        yield Field("minimum sequence", text, meaning, self._next_sequence)
        if self._sizes:
            text = ", ".join(answers.sizes) or ("automatic" if self._open else "as configured")
            meaning = "smaller models are faster and need less memory, but reach a higher loss"
            yield Field("model sizes", text, meaning, self._next_sizes)
        reserved = answers.reserve_bytes
        text = f"{RESERVED_SHARE * 100:.0f} % of free memory" if reserved is None else size(reserved)
        meaning = "kept free for evaluation, libraries and other processes"
        yield Field("reserved memory", text, meaning, self._next_reserve)

    def change(self, place: int, by: int) -> str:
        """Change an answer to the next (by 1) or previous choice. Returns the problem with the answers, or ""."""
        self.answers = self.fields()[place].after(by)
        return self.problem()

    def _next_goal(self, by: int) -> Answers:
        goal = _next(_GOALS, self.answers.goal, by)
        items = self.answers.items if goal == "time" else self._items
        if goal == "time" and items is None and self._config is not None:
            from ndd_engine.wizard.planner import run_items

            items = run_items(self._config, self._config.batch.items * 1000)
        return replace(self.answers, goal=goal, items=items)

    def _next_items(self, by: int) -> Answers:
        items = self.answers.items or 1
        return replace(self.answers, items=max(items * 2 if by > 0 else items // 2, 1))

    def _next_batch(self, by: int) -> Answers:
        assert self._config is not None
        now, most = self._config.batch.items, self._train_items or sys.maxsize
        larger = [(True, now * times) for times in _TIMES if now * times <= most]
        choices = [(True, None), *larger, (False, None)]
        hold, batch = _next(choices, (self.answers.hold_effective, self.answers.effective_batch), by)
        return replace(self.answers, hold_effective=hold, effective_batch=batch)

    def _next_sequence(self, by: int) -> Answers:
        shorter = [self._longest // 2**power for power in range(1, 6 if self._open else 4)]
        lengths = [None, *(length for length in shorter if length >= 2)]
        return replace(self.answers, min_sequence=_next(lengths, self.answers.min_sequence, by))

    def _next_sizes(self, by: int) -> Answers:
        sizes = [(), *((name,) for name in self._sizes), self._sizes]
        return replace(self.answers, sizes=_next(sizes, self.answers.sizes, by))

    def _next_reserve(self, by: int) -> Answers:
        gpu = self.answers.gpu
        here = self._machine.free_bytes if self._machine is not None else None
        free = here if gpu is None else usable_bytes(gpu_named(gpu))
        if free is None:
            return self.answers
        share = self._reserved = _next(_RESERVED, self._reserved, by)
        return replace(self.answers, reserve_bytes=None if share is None else int(share * free))

    def problem(self) -> str:
        """What is wrong with the answers, or ""."""
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
        """Start to probe."""
        self._proposed, self.verified, self._choice = None, (), None
        self._start(self._plan)

    def verify(self, chosen: tuple[Proposal, ...]) -> None:
        """Start to measure."""
        from ndd_engine.wizard.session import with_present

        assert self._proposed is not None
        rows = self.verified = tuple(with_present(chosen, self._proposed))
        self._choice = None
        self._start(lambda: self._measure(rows))

    @property
    def rows(self) -> tuple[Proposal, ...]:
        """All proposals."""
        return self._proposed.rows if self._proposed is not None else ()

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
        """Whether the file differs from what `preview` read."""
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
        """Write the file. Returns its name; raises NddError."""
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

    def _measure(self, chosen: Sequence[Proposal]) -> None:
        from ndd_engine.wizard.session import choose, listed, verify

        assert self._proposed is not None
        measured = verify(
            self._proposed.situation, self.answers, chosen, self._budget_s, self._tell, self.stopping
        )
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


def _next(choices: Sequence[T], current: T, by: int) -> T:
    """The choice `by` places after the current one, wrapping around; from the first if it is not a choice."""
    place = choices.index(current) if current in choices else 0
    return choices[(place + by) % len(choices)]


def _of_gpu(answers: Answers) -> tuple[Block, ...]:
    """The specifications of a GPU that is not in this machine."""
    if answers.gpu is None:
        return ()
    gpu = gpu_named(answers.gpu)
    rows = (
        ("memory", f"{gpu.memory_gb:g} GB, {size(usable_bytes(gpu))} usable"),
        *peak_rows(gpu),
        ("", "nothing is measured on this machine; times are lower bounds from the peak FLOP/s"),
    )
    return Text(f"proposals are for another GPU: {gpu.name} (from its specifications)"), Facts(rows)
