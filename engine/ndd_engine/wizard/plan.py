"""Probes one model after the other in a process of its own, and turns what it finds into proposals. No torch here.

A run that is in progress is not touched: the probes use memory that is free, and stop at a share of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ndd_engine.child import ChildError, ChildProcess, Json
from ndd_engine.config import Config, Draft
from ndd_engine.errors import MachineError, NddError, UsageError
from ndd_engine.hardware.card import Machine
from ndd_engine.hardware.profiles import CardProfile
from ndd_engine.predict.memory import Items, Memory
from ndd_engine.predict.probe_process import Opened
from ndd_engine.predict.steptime import StepTime, spread
from ndd_engine.text import size

from .answers import LEFT_FREE, Answers, card_named
from .proposals import Proposal, cost_in_words
from .space import Model, batches, models

GIB = 1 << 30
# Micro-batches that are timed, and how long the slowest of them may take.
TIMED = 3
LONGEST_S = 1.0
# Seconds for one question to the process with the probes.
PATIENCE_S = 300.0


class StoppedError(NddError):
    """Asked to stop."""


@dataclass(frozen=True)
class Situation:
    """What there is before anything is probed. free_bytes: that may be used; card: one that is not here, else None."""

    config: Config
    draft: Draft
    opened: Opened
    machine: Machine
    card: CardProfile | None
    free_bytes: int
    sizes: tuple[str, ...]
    amps: tuple[str, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Found:
    """What a probe found of a model; memory and time None where it failed, with the reason in `why`."""

    model: Model
    parameters: int
    tokens_per_item: float
    memory: Memory | None
    time: StepTime | None
    lower_bound: bool = False
    why: str = ""


Tell = Callable[[str, float], None]


class Planner:
    """Use it as a context: it holds the process with the probes.

    tell: called on the caller's thread with what is done and the part of it that is, 0..1. stop: set it to end early.
    """

    def __init__(self, answers: Answers, machine: Machine, tell: Tell, stop: threading.Event) -> None:
        self.answers, self.machine = answers, machine
        self._tell, self._stop = tell, stop
        self._done = 0.0
        self._stage = "starting"
        self._child: ChildProcess | None = None

    def __enter__(self) -> Planner:
        try:
            self._child = ChildProcess("ndd_engine.predict.probe_process")
        except OSError as error:
            raise MachineError(f"the process for the probes cannot be started: {error.strerror}") from None
        return self

    def __exit__(self, *_: object) -> None:
        if self._child is not None:
            self._child.close()

    def open(self) -> Situation:
        """Prepare the workload. Raises NddError."""
        answers = self.answers
        draft = answers.draft()
        free = self.machine.free_bytes  # before the process with the probes takes its part
        spec: Json = {
            "config": None if answers.config is None else str(answers.config.absolute()),
            "sets": list(answers.all_sets),
            "workload": answers.workload,
        }
        opened = Opened(**self._ask({"do": "open", **spec})["opened"])
        config = draft.resolve(opened.size if draft.size == "auto" else None)
        answers.checked(config, draft.sizes)
        sizes = answers.sizes or ((opened.size,) if opened.size is not None else ())
        amps, notes = self._amps(opened, config)
        card = None if answers.card is None else card_named(answers.card)
        if card is not None:
            free = int(card.memory_gb * GIB)
        if free is None:
            raise MachineError("how much memory of the card is free cannot be found out; name it with --card")
        leave = answers.leave_bytes if answers.leave_bytes is not None else int(free * LEFT_FREE)
        if leave >= free:
            raise UsageError(f"--leave: {size(leave)} are to stay free, and only {size(free)} are free")
        return Situation(
            config, draft, opened, self.machine, card, free - leave, tuple(sizes), amps, tuple(notes)
        )

    def probe(self, situation: Situation) -> Iterator[Found]:
        """Every model of the space, the configured one first, as soon as it is known. Raises NddError."""
        wanted = models(situation.config, self.answers, situation.sizes, situation.amps)
        for place, model in enumerate(wanted):
            self._done = place / len(wanted)
            self._stage = f"probing {model_name(model)}"
            yield self.probe_one(situation, model)
        self._done = 1.0

    def probe_one(self, situation: Situation, model: Model) -> Found:
        """One model. Raises StoppedError."""
        grid = micros(situation, self.answers, situation.opened.train_items)
        command = {
            "do": "probe",
            "sets": list(model.sets()),
            "micros": spread(grid[0], grid[-1], TIMED),
            "longest_s": LONGEST_S,
            "free_bytes": situation.free_bytes,
            "card": None if situation.card is None else situation.card.slug,
        }
        try:
            body = self._ask(command)["probed"]
        except ChildError as error:
            return Found(model, 0, 0.0, None, None, why=str(error))
        return Found(
            model,
            int(body["parameters"]),
            float(body["tokens_per_item"]),
            None if body["memory"] is None else Memory.from_dict(body["memory"]),
            None if body["time"] is None else StepTime.from_dict(body["time"]),
            bool(body.get("lower_bound")),
            str(body.get("why", "")),
        )

    def _ask(self, command: Json) -> Json:
        assert self._child is not None

        def tick(text: str | None) -> None:
            if self._stop.is_set():
                raise StoppedError("stopped")
            self._tell(self._stage if text is None else f"{self._stage}: {text}", self._done)

        try:
            return self._child.ask(command, PATIENCE_S, tick)
        except ChildError as error:
            if command["do"] == "open":
                raise NddError(str(error)) from None
            raise

    def _amps(self, opened: Opened, config: Config) -> tuple[tuple[str, ...], list[str]]:
        """Precisions worth a probe, the usual one first, and what there is to tell of them."""
        if self.answers.goal == "reproducible":
            return ("off",), ["reproducible: fp32 throughout, deterministic algorithms"]
        if config.precision.amp != "auto":
            return (config.precision.amp,), []
        if self.machine.chosen is None and self.answers.card is None:
            units = self.machine.host.bf16_units
            if not units:
                return ("off",), ["bf16 is left out: this processor has no instructions for it"]
            return ("off", "bf16"), [
                f"bf16 is looked at: this processor has instructions for it ({units[0]})"
            ]
        return ("off", "bf16") if opened.amp != "fp16" else ("off", "fp16"), []


def micros(situation: Situation, answers: Answers, items: int) -> list[int]:
    """The micro-batches of the table, ascending."""
    hold = answers.step_items(situation.config)
    return [batch.micro for batch in batches(situation.config, hold, items)]


def proposals(situation: Situation, answers: Answers, found: Found) -> list[Proposal]:
    """Every batch of a model with its predictions. A model whose probe failed has none."""
    if found.memory is None and found.time is None:
        return []
    config, opened = situation.config, situation.opened
    hold = answers.step_items(config)
    items = answers.items or run_items(config, opened.train_items)
    now = (opened.size, opened.sequence)
    loader, kept = config.loader, Items(opened.kept_bytes, opened.gathers)
    card = on_card(situation)
    rows = []
    for batch in batches(config, hold, opened.train_items):
        memory = None if found.memory is None else found.memory.peak(batch.micro, batch.accumulation)
        cost = cost_in_words(
            config, opened.token, now, found.model, batch, (opened.parameters, found.parameters)
        )
        for placement in placements(situation):
            placed = placement == "device" and card
            beside = kept.beside(card, placement, loader.cache)
            step = (
                None
                if found.time is None
                else found.time.step_s(batch.micro, batch.accumulation, loader.workers, placed)
            )
            rows.append(
                Proposal(
                    model=found.model,
                    batch=batch,
                    placement=placement,
                    workers=loader.workers,
                    threads=opened.chosen_threads,
                    parameters=found.parameters,
                    memory_bytes=None if memory is None else memory + beside,
                    free_bytes=situation.free_bytes,
                    step_s=step,
                    items=items,
                    tokens_per_item=found.tokens_per_item,
                    setup_s=opened.setup_s,
                    doubt="" if found.memory is None else found.memory.why_not,
                    lower_bound=found.lower_bound,
                    cost=cost,
                )
            )
    return rows


def on_card(situation: Situation) -> bool:
    """Whether the proposals are for a card, here or not."""
    return situation.card is not None or situation.opened.device.startswith("cuda")


def placements(situation: Situation) -> list[str]:
    """Where the data may lie, the configured place first. On a card its memory is worth a row of its own."""
    loader = situation.config.loader
    if not on_card(situation) or not situation.opened.places or loader.workers:
        return [loader.placement]
    return sorted(("host", "device"), key=lambda place: place != loader.placement)


def run_items(config: Config, train_items: int) -> int:
    """Items of the whole run."""
    step = config.batch.items
    limits = [] if config.run.max_steps is None else [config.run.max_steps * step]
    if config.run.epochs is not None:
        limits.append(config.run.epochs * (train_items // step) * step)
    return max(min(limits, default=train_items), 1)


def model_name(model: Model) -> str:
    """For people: "small, sequence 128, bf16"."""
    parts = [model.size or "the model", f"sequence {model.sequence}", "" if model.amp == "off" else model.amp]
    return ", ".join(part for part in parts if part)
