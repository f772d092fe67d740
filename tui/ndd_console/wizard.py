"""The wizard in a terminal: its work in a thread, the screen over it, and both ended together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ndd_console.source import StartRow
from ndd_console.view.machine import describe
from ndd_console.view.wizard import Field, Preview, WizardView
from ndd_engine.config import WORKLOADS
from ndd_engine.config.loading import DEFAULT_WORKLOAD
from ndd_engine.errors import NddError
from ndd_engine.hardware.card import Machine, detect
from ndd_engine.record.rundir import all_runs
from ndd_engine.text import number, size
from ndd_engine.wizard.answers import (
    GOALS,
    LEFT_FREE,
    Answers,
    Goal,
    card_named,
    longest_sequence,
    usable_bytes,
)
from ndd_engine.wizard.proposals import Proposal

from .app import WizardApp
from .hosting import hosted
from .saving import new_path, save_new
from .terminal import capabilities

if TYPE_CHECKING:
    from ndd_engine.config import Config
    from ndd_engine.predict.probe_process import Opened
    from ndd_engine.wizard.session import Planned

_GOALS: tuple[Goal, ...] = tuple(GOALS)
_LEAVE = (None, 0.0, 0.2, 0.4, 0.6)
_TIMES = (2, 4, 8)
# Of a file that was given no name.
_STEM = "wizard"
MEANINGS = {
    "throughput": "as many items a second as possible, within the limits below",
    "beside": "nearly as fast as possible with as little memory as possible, for a machine that others use too",
    "reproducible": "fp32 and deterministic algorithms: the same result again on the same machine",
    "time": "the shortest time to the items of the whole run",
}


class WizardJob:
    """See screens.wizard.WizardSource.

    answers: to begin with, as the command line has them. path: of the file that is written, and changed where it is
    there; None for a new name. notes: what there is to know of the machine besides.
    """

    def __init__(
        self, answers: Answers, path: Path | None, budget_s: float, notes: tuple[str, ...] = ()
    ) -> None:
        self.answers = answers
        self._items = answers.items
        self._path, self._budget_s, self._notes = path, budget_s, notes
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
        self._planned: Planned | None = None
        self._verified: tuple[Proposal, ...] = ()
        self._stage, self._share, self._began = "", 0.0, 0.0
        self._error = ""
        self._leave = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        threading.Thread(target=self._detect, name="ndd-wizard-machine", daemon=True).start()

    # The questions.

    def machine_lines(self) -> tuple[str, ...] | None:
        if self._machine is None:
            return None
        return (*_of_card(self.answers), *describe(self._machine), *self._notes)

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
            self._config, self._error = None, str(error)
            return ()
        self._config, self._sizes, self._error, self._open = config, draft.sizes, "", draft.size == "auto"
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
                from ndd_engine.wizard.plan import run_items

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
            return self._error or "choose a workload first"
        try:
            self.answers.checked(self._longest, self._sizes)
        except NddError as error:
            return str(error)
        return ""

    # The work.

    def probe(self) -> None:
        self._planned, self._verified = None, ()
        self._start(self._plan)

    def verify(self, chosen: tuple[Proposal, ...]) -> None:
        self._verified = chosen
        self._start(lambda: self._measure(chosen))

    def look(self, view: WizardView) -> WizardView:
        from ndd_engine.wizard.plan import model_name

        planned = self._planned
        if planned is not None:
            opened = planned.situation.opened
            notes = (opened.data, opened.model, *lengths_line(opened), *planned.situation.notes, *self._notes)
            notes += tuple(f"{model_name(found.model)}: {found.why}" for found in planned.found if found.why)
            view = replace(view, rows=planned.rows, best=planned.best, notes=notes)
        if self.working():
            spent = time.monotonic() - self._began
            left = spent / self._share - spent if self._share > 0.05 else None
            view = replace(view, stage=self._stage, share=self._share, left_s=left)
        if self._verified:
            view = replace(view, verified=self._verified)
        return view

    def working(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def failed(self) -> str:
        return "" if self.working() else self._error

    def suggested(self) -> tuple[Proposal, ...]:
        if self._planned is None or self.answers.card is not None:
            return ()
        from ndd_engine.wizard.session import to_verify

        return tuple(to_verify(self._planned, self.answers))

    def preview(self, chosen: Proposal) -> Preview:
        from ndd_engine.wizard.writing import difference, text_of

        text = self._text(chosen)
        path = self._path
        if path is not None and path.exists():
            diff = difference(text_of(path), text, str(path))
            return Preview(tuple(text.splitlines()), str(path), True, tuple(diff))
        return Preview(tuple(text.splitlines()), str(path or new_path(_STEM)))

    def save(self, chosen: Proposal) -> str:
        from ndd_engine.wizard.writing import save

        text = self._text(chosen)
        path = self._path
        if path is None:
            return str(save_new(_STEM, text))
        save(path, text)
        return str(path)

    def stop(self) -> None:
        self._stop.set()

    def join(self) -> None:
        """Wait for the end of what goes on; its processes end with it."""
        if self._thread is not None:
            self._thread.join()

    def _text(self, chosen: Proposal) -> str:
        from ndd_engine.wizard.session import written, written_into

        assert self._planned is not None
        path = self._path
        situation = self._planned.situation
        if path is not None and path.exists():
            return written_into(self.answers, situation, chosen, path)
        return written(self.answers, situation, chosen)

    def _start(self, work: Callable[[], None]) -> None:
        self.stop()
        self.join()
        self._stop = threading.Event()
        self._stage, self._share, self._began, self._error = "starting", 0.0, time.monotonic(), ""
        self._thread = threading.Thread(target=self._work, args=(work,), name="ndd-wizard")
        self._thread.start()

    def _work(self, work: Callable[[], None]) -> None:
        try:
            work()
        except NddError as error:
            self._error = str(error)
        except Exception as error:  # noqa: BLE001  told on the screen, which would wait for ever
            self._error = f"{type(error).__name__}: {error}"

    def _plan(self) -> None:
        from ndd_engine.wizard.session import plan

        def look(planned: Planned) -> None:
            self._planned = planned

        self._planned = plan(self.answers, self._tell, self._stop, look)
        if not self._planned.rows:
            reasons = "; ".join(found.why for found in self._planned.found if found.why)
            self._error = f"nothing could be predicted: {reasons or 'no combination is left'}"

    def _measure(self, chosen: Sequence[Proposal]) -> None:
        from ndd_engine.wizard.session import by_measured
        from ndd_engine.wizard.verify import verify

        assert self._planned is not None
        found = verify(self._planned.situation, self.answers, chosen, self._budget_s, self._tell, self._stop)
        self._verified = tuple(by_measured(found, self.answers))
        self._planned = self._planned.verified(found)

    def _tell(self, text: str, share: float) -> None:
        self._stage, self._share = text, share

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
            free = usable_bytes(card_named(self.answers.card))
        if free is None:
            return
        self._leave = (self._leave + by) % len(_LEAVE)
        part = _LEAVE[self._leave]
        self.answers = replace(self.answers, leave_bytes=None if part is None else int(part * free))


def _of_card(answers: Answers) -> tuple[str, ...]:
    """What there is to know of a card that is not here."""
    if answers.card is None:
        return ()
    card = card_named(answers.card)
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


def beside(runs: Sequence[str]) -> tuple[str, ...]:
    """What runs in progress mean for the wizard."""
    if not runs:
        return ()
    verb = "trains" if len(runs) == 1 else "train"
    return (
        f"{', '.join(runs)} {verb} meanwhile: times are measured beside it, and its memory counts as used",
    )


def live_runs(root: Path) -> list[str]:
    """Names of the runs in progress in a folder."""
    return [run.name for run in all_runs(root) if run.live_owner()]


def lengths_line(opened: Opened) -> tuple[str, ...]:
    """The distribution of the items' lengths, where these vary."""
    found = opened.lengths
    if not found:
        return ()
    middle, long = found[len(found) // 2], found[min(int(len(found) * 0.9), len(found) - 1)]
    unit = f"{opened.token or 'step'}s"
    return (f"lengths: {found[0]} to {found[-1]} {unit}, half of them up to {middle}, 90 % up to {long}",)


def show(
    answers: Answers, output: Path | None, budget_s: float, ascii_only: bool, root: Path
) -> tuple[str, int]:
    """The wizard with its screen. root: of the runs.

    Returns, once it is closed, the file to train ("" for none) and the exit status.
    """
    can = capabilities(ascii_only)
    job = WizardJob(answers, output or answers.config, budget_s, beside(live_runs(root)))
    app = WizardApp(job, can_train=answers.card is None, ascii_only=can.ascii_only, monochrome=can.monochrome)
    status = hosted(app, job.stop)
    job.stop()
    job.join()
    return app.to_train, status
