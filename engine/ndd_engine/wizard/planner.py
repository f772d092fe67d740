"""Probes one model after the other in a process of its own, and turns what it finds into proposals. No torch here.

A run that is in progress is not touched: the probes use memory that is free, and stop at a share of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ndd_engine.child import ChildError, ChildProcess, Json
from ndd_engine.config import Config, read
from ndd_engine.errors import EXIT_MACHINE, EXIT_USAGE, MachineError, NddError, UsageError
from ndd_engine.hardware.detect import detect
from ndd_engine.hardware.gpu import Machine
from ndd_engine.hardware.host import free_memory
from ndd_engine.hardware.profiles import GpuProfile
from ndd_engine.predict.memory import Memory
from ndd_engine.predict.probe_process import Opened
from ndd_engine.predict.steptime import StepTime, spread
from ndd_engine.text import size
from ndd_engine.train.preflight import preflight

from .answers import LEFT_FREE, Answers, gpu_named, longest_sequence, usable_bytes
from .proposals import Proposal, cost_in_words
from .space import Model, batches, models, worth_a_row

# Micro-batches that are timed, and how long the slowest of them may take.
TIMED = 4
LONGEST_S = 1.0
# Seconds for one question to the process with the probes.
PATIENCE_S = 300.0


# Errors of the process with the probes, by the exit status that they stand for.
_KINDS: dict[int, type[NddError]] = {EXIT_USAGE: UsageError, EXIT_MACHINE: MachineError}


class WizardStoppedError(NddError):
    """Asked to stop."""


@dataclass(frozen=True)
class Situation:
    """What there is before anything is probed. free_bytes: that may be used; card: one that is not here, else None."""

    config: Config
    opened: Opened
    card: GpuProfile | None
    free_bytes: int
    sizes: tuple[str, ...]
    amps: tuple[str, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class ProbedModel:
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

    def __init__(self, answers: Answers, tell: Tell, stop: threading.Event) -> None:
        self.answers = answers
        self._tell, self._stop = tell, stop
        self._done = 0.0
        self._stage = "starting"
        self._child: ChildProcess | None = None
        # What the process was told to open.
        self._spec: Json = {}

    def __enter__(self) -> Planner:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._child is not None:
            self._child.close()

    def open(self) -> Situation:
        """Prepare the workload. Raises NddError."""
        answers = self.answers
        card = None if answers.card is None else gpu_named(answers.card)
        # A card that is not here cannot be asked for here.
        sets = answers.all_sets if card is None else (*answers.all_sets, "run.device=auto")
        draft = read(answers.config, sets, answers.workload)
        device = preflight(draft, use_torch=False).run.device
        answers.checked(longest_sequence(draft), draft.sizes)
        if card is not None and draft.size == "auto":
            sets = (*sets, f"workload.size={draft.auto['card_size']}")
        machine = detect(device, use_torch=False)
        # Before the process with the probes takes its part.
        free, free_on_host = machine.free_bytes, free_memory()
        self._spec = {
            "config": None if answers.config is None else str(answers.config.absolute()),
            "sets": list(sets),
            "workload": answers.workload,
        }
        opened = Opened.from_dict(self._ask({"do": "open", **self._spec})["opened"])
        if draft.size == "auto":  # and then the batch is the one for such a card
            config = draft.resolve(opened.size, opened.memory_gb if card is None else card.memory_gb)
        else:
            config = draft.resolve()
        if opened.size is not None:  # found once; the process may have to be started again
            self._spec["sets"] = [*sets, f"workload.size={opened.size}"]
        answers.checked(config.batch.sequence, draft.sizes)
        hold = answers.step_items(config)
        if hold is not None and hold > opened.train_items:
            raise UsageError(
                f"a step takes {hold} {opened.item}s, and the data has {opened.train_items} to train on; "
                "--effective N holds fewer"
            )
        sizes = answers.sizes or ((opened.size,) if opened.size is not None else ())
        amps, notes = self._amps(card, machine, config)
        if card is not None:
            free = usable_bytes(card)
        elif opened.device == "cpu":
            free = free_on_host
        return Situation(config, opened, card, self._may_be_used(free), tuple(sizes), amps, tuple(notes))

    def _may_be_used(self, free: int | None) -> int:
        """Of the bytes that are free, those that need not stay so. Raises NddError."""
        if free is None:
            raise MachineError("how much memory of the card is free cannot be found out; name it with --card")
        asked = self.answers.leave_bytes
        leave = asked if asked is not None else int(free * LEFT_FREE)
        if leave >= free:
            raise UsageError(f"--leave: {size(leave)} are to stay free, and only {size(free)} are free")
        return free - leave

    def probe(self, situation: Situation) -> Iterator[ProbedModel]:
        """Every model of the space, the configured one first, as soon as it is known. Raises NddError."""
        wanted = models(situation.config, self.answers, situation.sizes, situation.amps)
        for place, model in enumerate(wanted):
            self._done = place / len(wanted)
            self._stage = f"probing {model_name(model)}"
            yield self.probe_one(situation, model)
        self._done = 1.0

    def probe_one(self, situation: Situation, model: Model) -> ProbedModel:
        """One model. Raises StoppedError."""
        grid = batches(
            situation.config, self.answers.step_items(situation.config), situation.opened.train_items
        )
        command = {
            "do": "probe",
            "sets": list(model.sets()),
            "micros": spread(grid[0].micro, grid[-1].micro, TIMED),
            "longest_s": LONGEST_S,
            "free_bytes": situation.free_bytes,
            "card": None if situation.card is None else situation.card.slug,
        }
        try:
            if self._child is not None and self._child.ended:  # memory ran out with the model before
                self._child.close()
                self._start()
                self._ask({"do": "open", **self._spec})
            body = self._ask(command)["probed"]
        except WizardStoppedError:
            raise
        except (ChildError, NddError) as error:
            return ProbedModel(model, 0, 0.0, None, None, why=str(error))
        return ProbedModel(
            model,
            int(body["parameters"]),
            float(body["tokens_per_item"]),
            None if body["memory"] is None else Memory.from_dict(body["memory"]),
            None if body["time"] is None else StepTime.from_dict(body["time"]),
            bool(body.get("lower_bound")),
            str(body.get("why", "")),
        )

    def _start(self) -> None:
        try:
            self._child = ChildProcess("ndd_engine.predict.probe_process")
        except OSError as error:
            raise MachineError(f"the process for the probes cannot be started: {error.strerror}") from None

    def _ask(self, command: Json) -> Json:
        assert self._child is not None

        words = self._stage

        def tick(text: str | None) -> None:
            nonlocal words
            if self._stop.is_set():
                raise WizardStoppedError("stopped")
            if text is not None:
                words = f"{self._stage}: {text}"
            self._tell(words, self._done)

        try:
            return self._child.ask(command, PATIENCE_S, tick)
        except ChildError as error:
            if command["do"] == "open":
                raise _KINDS.get(error.status or 0, NddError)(str(error)) from None
            raise

    def _amps(
        self, card: GpuProfile | None, machine: Machine, config: Config
    ) -> tuple[tuple[str, ...], list[str]]:
        """Precisions worth a probe, the usual one first, and what there is to tell of them."""
        if self.answers.goal == "reproducible":
            return ("off",), ["reproducible: fp32 throughout, deterministic algorithms"]
        if config.precision.amp != "auto":
            return (config.precision.amp,), []
        if card is None and machine.chosen is None:
            units = machine.host.bf16_units
            if not units:
                return ("off",), ["bf16 is left out: this processor has no instructions for it"]
            return ("off", "bf16"), [
                f"bf16 is looked at: this processor has instructions for it ({units[0]})"
            ]
        profile = card or (machine.chosen.profile if machine.chosen else None)
        if profile is None or profile.peak_tflops("bf16"):
            return ("off", "bf16"), []
        half = ("fp16",) if profile.peak_tflops("fp16") else ()
        return ("off", *half), [f"bf16 is left out: {profile.name} has no units for it"]


def proposals(situation: Situation, answers: Answers, found: ProbedModel) -> list[Proposal]:
    """Every batch of a model with its predictions. A model whose probe failed has none."""
    if found.memory is None and found.time is None:
        return []
    config, opened = situation.config, situation.opened
    hold = answers.step_items(config)
    items = answers.items or run_items(config, opened.train_items)
    now = (opened.size, opened.sequence)
    loader, kept = config.loader, opened.items
    card = on_gpu(situation)
    peaks = found.memory
    beside_least = min(kept.beside(card, placement, loader.cache) for placement in placements(situation))

    def fits(micro: int) -> bool:
        times = 1 if hold is None else max(hold // micro, 1)
        return peaks is None or peaks.peak(micro, times) + beside_least <= situation.free_bytes

    grid = batches(config, hold, opened.train_items)
    rows = []
    for batch in worth_a_row(grid, config.batch.micro, fits, hold is None):
        memory = None if peaks is None else peaks.peak(batch.micro, batch.accumulation)
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
                    threads=None if situation.card is not None else opened.chosen_threads,
                    parameters=found.parameters,
                    memory_bytes=None if memory is None else memory + beside,
                    free_bytes=situation.free_bytes,
                    step_s=step,
                    items=items,
                    tokens_per_item=found.tokens_per_item,
                    setup_s=0.0 if situation.card is not None else opened.setup_s,
                    doubt="" if found.memory is None else found.memory.why_not,
                    lower_bound=found.lower_bound,
                    cost=cost,
                )
            )
    return rows


def on_gpu(situation: Situation) -> bool:
    """Whether the proposals are for a card, here or not."""
    return situation.card is not None or situation.opened.device.startswith("cuda")


def placements(situation: Situation) -> list[str]:
    """Where the data may lie, the configured place first. On a card its memory is worth a row of its own."""
    loader = situation.config.loader
    if not on_gpu(situation) or not situation.opened.items.places or loader.workers:
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
