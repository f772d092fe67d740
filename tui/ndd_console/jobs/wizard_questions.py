"""The questions of the wizard (workload, goal and limits) and how keys change the answers. Does not probe."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ndd_console.render.text import lines
from ndd_console.screens.interfaces import StartRow
from ndd_console.view.wizard import Field
from ndd_console.words.machine import machine_blocks
from ndd_engine.config import WORKLOADS
from ndd_engine.config.loading import DEFAULT_WORKLOAD
from ndd_engine.errors import NddError
from ndd_engine.hardware.detect import detect
from ndd_engine.hardware.gpu import Machine
from ndd_engine.text import counted, number, size
from ndd_engine.wizard.answers import (
    GOALS,
    RESERVED_SHARE,
    Answers,
    Goal,
    gpu_named,
    longest_sequence,
    usable_bytes,
)

from .folder import folder_rows
from .run_sources import sizes_text

if TYPE_CHECKING:
    from ndd_engine.config import Config

T = TypeVar("T")

_GOALS: tuple[Goal, ...] = tuple(GOALS)
# Choices for the reserved memory, as shares of the free memory; None for the default.
_RESERVED = (None, 0.0, 0.2, 0.4, 0.6)
# Choices for the effective batch, relative to the configured one.
_TIMES = (2, 4, 8)
_ITEMS, _BATCH, _SEQUENCE, _SIZES = "number of items", "effective batch", "minimum sequence", "model sizes"
MEANINGS = {
    "throughput": "as many items per second as possible within the limits below",
    "low-memory": "little memory at nearly full speed, for a machine shared with others",
    "reproducible": "fp32 and deterministic algorithms: the same results on the same machine",
    "time": "the shortest time for the number of items below, including data preparation",
}


class Questions:
    """The first three pages; see screens.wizard.WizardSource. answers: the current ones.

    notes: additional lines about the machine. The hardware is detected in a thread. first: the entry of the home screen
    to begin with.
    """

    def __init__(self, answers: Answers, notes: tuple[str, ...] = (), first: StartRow | None = None) -> None:
        self.answers = answers
        # Whether the configuration was given, so that there is nothing to choose from.
        self._given = answers.config is not None
        self._first = first
        self._rows: tuple[StartRow, ...] = ()
        self._items = answers.items
        self._notes = notes
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
        threading.Thread(target=self._detect, name="ndd-wizard-machine", daemon=True).start()

    def machine_lines(self) -> tuple[str, ...] | None:
        if self._machine is None:
            return None
        return (*_of_gpu(self.answers), *lines(machine_blocks(self._machine)), *self._notes)

    def workloads(self) -> tuple[StartRow, ...]:
        if self._given:
            self._rows = (StartRow(str(self.answers.config), "from the command line", "", kind="file"),)
            return self._rows
        asked = self._first.name if self._first is not None else self._asked
        rows = [*folder_rows(), *(StartRow(name, sizes_text(name), "") for name in WORKLOADS)]
        if asked not in {row.name for row in rows}:
            rows.append(StartRow(asked, "your own workload", "", kind="own"))
        # The requested one comes first; the default workload only before the other built-in ones.
        only = self.answers.workload is None and self._first is None
        rows.sort(key=lambda row: (only and row.kind == "workload", row.name != asked))
        self._rows = tuple(rows)
        return self._rows

    def choose(self, place: int) -> tuple[str, ...]:
        from ndd_engine.workloads.facts import facts

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
        answers, config = self.answers, self._config
        assert config is not None
        batch = answers.step_items(config)
        open_batch = self._open and answers.effective_batch is None
        reserved = answers.reserve_bytes
        goal = [Field("goal", GOALS[answers.goal], MEANINGS[answers.goal])]
        if answers.goal == "time":
            goal.append(Field(_ITEMS, number(answers.items), "the total number of items to train on"))
        text = ", ".join(answers.sizes) or ("automatic" if self._open else "as configured")
        meaning = "smaller models are faster and need less memory, but reach a higher loss"
        sizes = [Field(_SIZES, text, meaning)] if self._sizes else []
        return (
            *goal,
            Field(
                _BATCH, "any" if batch is None else "as configured" if open_batch else str(batch),
                "items per optimizer step; kept by gradient accumulation, because changing it changes the training",
            ),
            Field(
                _SEQUENCE,
                str(answers.min_sequence or ("as configured" if self._open else config.batch.sequence)),
                "shorter sequences are faster and need less memory, but give the model less context",
            ),
            *sizes,
            Field(
                "reserved memory", f"{RESERVED_SHARE:.0%} of free memory" if reserved is None else size(reserved),
                "kept free for evaluation, libraries and other processes",
            ),
        )  # fmt: skip

    def change(self, place: int, by: int) -> str:
        answers, config = self.answers, self._config
        assert config is not None
        name = self.fields()[place].name
        if name == "goal":
            goal = _next(_GOALS, answers.goal, by)
            items = answers.items if goal == "time" else self._items
            if goal == "time" and items is None:
                from ndd_engine.wizard.rows import run_items

                items = run_items(config, config.batch.items * 1000)
            answers = replace(answers, goal=goal, items=items)
        elif name == _ITEMS:
            items = answers.items or config.batch.items
            answers = replace(answers, items=max(items * 2 if by > 0 else items // 2, 1))
        elif name == _BATCH:
            now, most = config.batch.items, self._train_items or sys.maxsize
            larger = [(True, now * times) for times in _TIMES if now * times <= most]
            choices = [(True, None), *larger, (False, None)]
            hold, batch = _next(choices, (answers.hold_effective, answers.effective_batch), by)
            answers = replace(answers, hold_effective=hold, effective_batch=batch)
        elif name == _SEQUENCE:
            shorter = [self._longest // 2**power for power in range(1, 6 if self._open else 4)]
            lengths = [None, *(length for length in shorter if length >= 2)]
            answers = replace(answers, min_sequence=_next(lengths, answers.min_sequence, by))
        elif name == _SIZES:
            sizes = [(), *((name,) for name in self._sizes), self._sizes]
            answers = replace(answers, sizes=_next(sizes, answers.sizes, by))
        else:
            here = self._machine.free_bytes if self._machine is not None else None
            free = here if answers.gpu is None else usable_bytes(gpu_named(answers.gpu))
            if free is not None:
                share = self._reserved = _next(_RESERVED, self._reserved, by)
                answers = replace(answers, reserve_bytes=None if share is None else int(share * free))
        self.answers = answers
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


def _next(choices: Sequence[T], current: T, by: int) -> T:
    """The choice `by` places after the current one, wrapping around; from the first if it is not a choice."""
    place = choices.index(current) if current in choices else 0
    return choices[(place + by) % len(choices)]


def _of_gpu(answers: Answers) -> tuple[str, ...]:
    """The specifications of a GPU that is not in this machine."""
    if answers.gpu is None:
        return ()
    gpu = gpu_named(answers.gpu)
    peaks = ", ".join(f"{kind} {peak:g}" for kind, peak in gpu.dense_tflops.items())
    return (
        f"proposals are for another GPU: {gpu.name} (from its specifications)",
        f"  memory    {gpu.memory_gb:g} GB, {size(usable_bytes(gpu))} usable",
        f"  peak      {peaks} TFLOP/s, {gpu.bandwidth_gb_s:g} GB/s",
        "nothing is measured on this machine; times are lower bounds from the peak FLOP/s",
        "",
    )
