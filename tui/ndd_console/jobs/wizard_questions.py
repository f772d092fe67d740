"""What the wizard asks: the workload, the goal and its limits, and what a key makes of each answer. Probes nothing."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING

from ndd_console.screens.interfaces import StartRow
from ndd_console.view.machine import machine_lines as describe
from ndd_console.view.wizard import Field
from ndd_engine.config import WORKLOADS
from ndd_engine.config.loading import DEFAULT_WORKLOAD
from ndd_engine.errors import NddError
from ndd_engine.hardware.gpu import Machine, detect
from ndd_engine.text import number, size
from ndd_engine.wizard.answers import (
    GOALS,
    LEFT_FREE,
    Answers,
    Goal,
    gpu_named,
    longest_sequence,
    usable_bytes,
)

if TYPE_CHECKING:
    from ndd_engine.config import Config

_GOALS: tuple[Goal, ...] = tuple(GOALS)
_LEAVE = (None, 0.0, 0.2, 0.4, 0.6)
_TIMES = (2, 4, 8)
MEANINGS = {
    "throughput": "as many items a second as possible, within the limits below",
    "beside": "nearly as fast as possible with as little memory as possible, for a machine that others use too",
    "reproducible": "fp32 and deterministic algorithms: the same result again on the same machine",
    "time": "the shortest time to the items of the whole run",
}


class Questions:
    """The first three pages; see screens.wizard.WizardSource. answers: as they are now.

    notes: what there is to know of the machine besides. The machine is looked at in a thread.
    """

    def __init__(self, answers: Answers, notes: tuple[str, ...] = ()) -> None:
        self.answers = answers
        self._items = answers.items
        self._notes = notes
        self._machine: Machine | None = None
        self._names: tuple[str, ...] = ()
        # The workload that the answers are for.
        self._asked = answers.workload or DEFAULT_WORKLOAD
        # Of the chosen workload; where its size is yet to be found (open), with the smallest one.
        self._config: Config | None = None
        self._open = False
        self._longest = 0
        self._train_items: int | None = None
        self._sizes: tuple[str, ...] = ()
        self._trouble = ""
        self._leave = 0
        threading.Thread(target=self._detect, name="ndd-wizard-machine", daemon=True).start()

    def machine_lines(self) -> tuple[str, ...] | None:
        if self._machine is None:
            return None
        return (*_of_gpu(self.answers), *describe(self._machine), *self._notes)

    def workloads(self) -> tuple[StartRow, ...]:
        import ndd_profiles

        asked = self.answers.workload
        rows = []
        if self.answers.config is not None:
            rows.append(StartRow(str(self.answers.config), "the file that was given", ""))
        elif asked is not None and asked not in WORKLOADS:
            rows.append(StartRow(asked, "your own workload", ""))
        if self.answers.config is None:
            names = sorted(WORKLOADS, key=lambda name: name != (asked or DEFAULT_WORKLOAD))
            rows += [StartRow(name, _about(ndd_profiles.read("workloads", name)), "") for name in names]
        self._names = tuple(row.name for row in rows)
        return tuple(rows)

    def choose(self, place: int) -> tuple[str, ...]:
        from ndd_engine.workloads.facts import facts

        name = self._names[place]
        if self.answers.config is None and name != self._asked:
            # Another one has other sizes, sequences and batches.
            self.answers = replace(self.answers, sizes=(), shortest=None, effective=None, hold_effective=True)
        if self.answers.config is None:
            self.answers, self._asked = replace(self.answers, workload=name), name
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
            return ("what it holds is known once it is opened",)
        each = f", {number(known.tokens_per_item)} {known.token}s each" if known.tokens_per_item else ""
        found = f"{number(known.train_items)} {known.item}s to train on{each}"
        if self._open:
            found += (
                f", with size {config.workload.size}: the size that this machine takes is found by trying"
            )
        return (known.text, found)

    def fields(self) -> tuple[Field, ...]:
        answers, config = self.answers, self._config
        assert config is not None
        hold = answers.step_items(config)
        sizes = ", ".join(answers.sizes) or ("as this machine allows" if self._open else "as configured")
        shortest = "as configured" if self._open else str(config.batch.sequence)
        if answers.shortest is not None:
            shortest = str(answers.shortest)
        held = "as configured, held" if self._open and answers.effective is None else f"{hold} held"
        leave = (
            f"{LEFT_FREE:.0%} of what is free" if answers.leave_bytes is None else size(answers.leave_bytes)
        )
        asked = [Field("goal", GOALS[answers.goal], MEANINGS[answers.goal])]
        if answers.goal == "time":
            asked.append(
                Field("number of items", number(answers.items), "in all, preparing the data counts as well")
            )
        return (
            *asked,
            Field(
                "items of a step",
                "free" if hold is None else held,
                "the effective batch: micro-batches are accumulated to hold it, as another one is another training",
            ),
            Field(
                "shortest sequence",
                shortest,
                "shorter ones are faster and lighter, and see less at a time",
            ),
            Field(
                "sizes of the model", sizes, "smaller models are faster and lighter, and reach a higher loss"
            ),
            Field("memory to leave free", leave, "for evaluations, libraries, and others on this machine"),
        )

    def change(self, place: int, by: int) -> str:
        answers, config = self.answers, self._config
        assert config is not None
        if answers.goal != "time" and place > 0:
            place += 1  # without the number of items
        if place == 0:
            goal = _GOALS[(_GOALS.index(answers.goal) + by) % len(_GOALS)]
            items = answers.items if goal == "time" else self._items
            if goal == "time" and items is None:
                from ndd_engine.wizard.planner import run_items

                items = run_items(config, config.batch.items * 1000)
            self.answers = replace(answers, goal=goal, items=items)
        elif place == 1:
            items = answers.items or config.batch.items
            self.answers = replace(answers, items=max(items * 2 if by > 0 else items // 2, 1))
        elif place == 2:
            self._change_batch(config, by)
        elif place == 3:
            now = self._longest
            shorter = [now // 2**power for power in range(1, 6 if self._open else 4)]
            lengths: list[int | None] = [None, *(length for length in shorter if length >= 2)]
            at = lengths.index(answers.shortest) if answers.shortest in lengths else 0
            self.answers = replace(answers, shortest=lengths[(at + by) % len(lengths)])
        elif place == 4:
            # None, each by itself, then all of them.
            choices_ = [(), *((name,) for name in self._sizes), self._sizes]
            at = choices_.index(answers.sizes) if answers.sizes in choices_ else 0
            self.answers = replace(answers, sizes=tuple(choices_[(at + by) % len(choices_)]))
        else:
            self._change_leave(by)
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

    def _change_batch(self, config: Config, by: int) -> None:
        now = config.batch.items
        # (to be held, how many; None: as configured)
        # No step takes more items than there are.
        held_ = [
            now * times for times in _TIMES if self._train_items is None or now * times <= self._train_items
        ]
        choices: list[tuple[bool, int | None]] = [(True, None), *((True, items) for items in held_)]
        choices.append((False, None))
        held = (self.answers.hold_effective, self.answers.effective)
        at = choices.index(held) if held in choices else 0
        hold, effective = choices[(at + by) % len(choices)]
        self.answers = replace(self.answers, hold_effective=hold, effective=effective)

    def _change_leave(self, by: int) -> None:
        free = self._machine.free_bytes if self._machine is not None else None
        if self.answers.card is not None:
            free = usable_bytes(gpu_named(self.answers.card))
        if free is None:
            return
        self._leave = (self._leave + by) % len(_LEAVE)
        part = _LEAVE[self._leave]
        self.answers = replace(self.answers, leave_bytes=None if part is None else int(part * free))


def _of_gpu(answers: Answers) -> tuple[str, ...]:
    """What there is to know of a card that is not here."""
    if answers.card is None:
        return ()
    card = gpu_named(answers.card)
    peaks = ", ".join(f"{kind} {peak:g}" for kind, peak in card.dense_tflops.items())
    return (
        f"what is proposed is for another card: {card.name}, by its published figures",
        f"  memory    {card.memory_gb:g} GB, of which {size(usable_bytes(card))} are counted on",
        f"  peaks     {peaks} TFLOP/s, {card.bandwidth_gb_s:g} GB/s",
        "nothing of it is verified here; times are what the peaks allow at best",
        "",
    )


def _about(profile: dict[str, object]) -> str:
    sizes = profile.get("sizes")
    return f"sizes {', '.join(sizes)}" if isinstance(sizes, dict) and sizes else "one size"
