"""Probes models in a subprocess and turns the results into rows and proposals. Does not import torch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ndd_engine.child import ChildError, ChildProcess, Json, StoppedError, decoded, spec_of, ticker
from ndd_engine.config import Config, Draft, read
from ndd_engine.errors import EXIT_MACHINE, EXIT_USAGE, MachineError, NddError, UsageError
from ndd_engine.hardware.detect import detect
from ndd_engine.hardware.gpus import GpuProfile, Machine, free_memory, match
from ndd_engine.hardware.named_gpus import gpu_named, usable_bytes
from ndd_engine.predict.estimate import Fit, Memory, StepTime, at, spread
from ndd_engine.predict.launches import StepEstimate
from ndd_engine.predict.probe_process import Opened, Probed
from ndd_engine.text import counted, size
from ndd_engine.train.request import preflight
from ndd_engine.trial.outcome import differences
from ndd_watch.fitting import budget_bytes

from .proposals import (
    LARGEST_MICRO,
    RESERVED_SHARE,
    SINGLE,
    Answers,
    Batch,
    Layout,
    Model,
    Proposal,
    batches,
    layout_of,
    longest_sequence,
    models,
    ranks_to_propose,
    worth_a_row,
)
from .ranking import cost_in_words

# Number of micro-batches to time, and the maximum seconds of the slowest.
TIMED = 4
# Number of micro-batches to estimate on a GPU that is not in this machine.
ESTIMATED = 4
# A trace of more events takes long to replay: its peaks are interpolated between powers of this micro-batch.
LONG_TRACE, APART = 40_000, 16
LONGEST_S = 1.0
# The share of reading data and model; what a stage of a probe leaves of the progress within it.
OPENING, STAGE = 0.2, 0.8
# Maximum seconds for one command to the probe process.
PATIENCE_S = 300.0


# Errors of the probe process, by exit status.
_KINDS: dict[int, type[NddError]] = {EXIT_USAGE: UsageError, EXIT_MACHINE: MachineError}


WizardStoppedError = StoppedError


@dataclass(frozen=True)
class Situation:
    """What is known before probing. gpu: a GPU that is not in this machine, else None. free_bytes: usable memory."""

    config: Config
    opened: Opened
    gpu: GpuProfile | None
    free_bytes: int
    sizes: tuple[str, ...]
    known_sizes: tuple[str, ...]
    amps: tuple[str, ...]
    notes: tuple[str, ...] = ()
    # Ranks to propose, why so many, and the usable memory of each; with 1, free_bytes.
    ranks: int = 1
    ranks_why: str = ""
    rank_bytes: int = 0
    # What the profile sets for size "auto" on a GPU with this memory.
    tier: tuple[str, ...] = ()

    def usable(self, layout: Layout) -> int:
        """Usable memory of a rank."""
        return self.free_bytes if layout.ranks == 1 else self.rank_bytes

    def hold(self, answers: Answers, layout: Layout) -> int | None:
        """The effective batch of one rank to keep, or None if it may change."""
        items = answers.step_items(self.config)
        return None if items is None else max(items // layout.ranks, 1)

    @property
    def device_name(self) -> str:
        """Name of the GPU or CPU that the proposals are for."""
        return self.opened.device_name if self.gpu is None else self.gpu.name


@dataclass(frozen=True)
class ProbedModel:
    """Result of a probe. If it failed, memory and time are None and `why` is the reason.

    estimate: the range of `time` on a GPU that is not in this machine. data_share: items of the same data, relative to
    the configured model. recomputes: which blocks compute again, in words. layout: of the ranks that it is for.
    instead: memory of a layout that is preferred where it fits.
    """

    model: Model
    parameters: int
    tokens_per_item: float
    memory: Memory | None
    time: StepTime | None
    estimate: StepEstimate | None = None
    data_share: float = 1.0
    recomputes: str = ""
    why: str = ""
    layout: Layout = SINGLE
    instead: Memory | None = None


Tell = Callable[[str, float], None]


class Planner:
    """Context manager that owns the probe process.

    tell: called on the caller's thread with the current work and its progress, 0..1. stop: set it to stop early.
    """

    def __init__(self, answers: Answers, tell: Tell, stop: threading.Event) -> None:
        self.answers = answers
        self._tell, self._stop = tell, stop
        # The share that is done, and that of the present work.
        self._done, self._each = 0.0, OPENING
        self._stage = "starting"
        self._child: ChildProcess | None = None
        # Arguments of the open command.
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
        gpu = None if answers.gpu is None else gpu_named(answers.gpu)
        # run.device may name the missing GPU.
        sets = answers.all_sets if gpu is None else (*answers.all_sets, "run.device=auto")
        draft = read(answers.config, sets, answers.workload)
        device = preflight(draft, use_torch=False).run.device
        answers.checked(longest_sequence(draft), draft.sizes)
        if gpu is not None and draft.size == "auto":
            sets = (*sets, f"workload.size={draft.auto['gpu_size']}")
        machine = detect(device, use_torch=False)
        free = free_memory()  # before the probe process takes its share
        self._spec = spec_of(answers.config, answers.workload, sets)
        self._spec["gpu"] = None if gpu is None else gpu.slug
        tier: tuple[str, ...] = ()
        known = draft.sizes
        if gpu is not None and draft.size == "auto":
            tier = tier_of(draft, draft.auto["gpu_size"], gpu.memory_gb)
        self._spec["tier"] = tier
        opened = decoded(Opened, self._ask({"do": "open", **self._spec})["opened"])
        if draft.size == "auto":  # the batch depends on the GPU as well
            memory_gb = opened.memory_gb if gpu is None else gpu.memory_gb
            config, tier = draft.resolve(opened.size, memory_gb), tier_of(draft, opened.size, memory_gb)
            # For a small GPU it may be the model of another size.
            known = tuple(name for name in known if not _is_of_size(config, draft, opened.size, name))
        else:
            config = draft.resolve()
        if opened.size is not None:  # chosen once, because the process may be restarted
            self._spec["sets"] = [*sets, f"workload.size={opened.size}"]
        answers.checked(config.batch.sequence, draft.sizes)
        hold = answers.step_items(config)
        if hold is not None and opened.train_items is not None and hold > opened.train_items:
            raise UsageError(
                f"the effective batch is {counted(hold, opened.item)}, but the training data has only "
                f"{opened.train_items}; set a smaller one with --effective-batch N"
            )
        sizes = answers.sizes or ((opened.size,) if opened.size is not None else ())
        amps, notes = self._amps(gpu, machine, config, opened)
        if gpu is not None:
            usable = self._usable(usable_bytes(gpu))
        else:
            usable = self._usable(free if opened.device == "cpu" else opened.free_bytes)
        ranks = ranks_to_propose(answers, config, machine, gpu, opened)
        each = usable // ranks.count if opened.device == "cpu" and gpu is None else usable
        if ranks.free_bytes is not None and gpu is None:
            each = min(each, self._usable(ranks.free_bytes))
        notes += ranks.notes
        return Situation(
            config,
            opened,
            gpu,
            usable,
            tuple(sizes),
            known,
            amps,
            tuple(notes),
            ranks.count,
            ranks.why,
            each,
            tier,
        )

    def _usable(self, free: int | None) -> int:
        """The free bytes minus those to reserve. Raises NddError."""
        if free is None:
            raise MachineError("the free GPU memory is unknown; name the GPU with --gpu")
        asked = self.answers.reserve_bytes
        if self.answers.budget_memory is not None:
            free = min(free, budget_bytes(self.answers.budget_memory) or free)
            asked = asked or 0
        reserve = asked if asked is not None else int(free * RESERVED_SHARE)
        if reserve >= free:
            raise UsageError(f"--reserve-memory: cannot reserve {size(reserve)}, only {size(free)} are free")
        return free - reserve

    def probe(self, situation: Situation) -> Iterator[ProbedModel]:
        """Probe all models, the configured one first; of several ranks, each layout. Raises NddError."""
        known = situation.known_sizes
        amps = situation.amps
        # On a GPU the last precision is the fastest.
        beside = amps[-1] if on_gpu(situation) else amps[0]
        wanted = models(situation.config, self.answers, situation.sizes, amps, known, beside, situation.tier)
        first: ProbedModel | None = None
        for place, model in enumerate(wanted):
            self._each = (1 - OPENING) / len(wanted)
            self._done = OPENING + place * self._each
            self._stage = f"probing {model_name(model)}"
            if situation.ranks == 1:
                found = self.probe_one(situation, model)
                first = first or found
                if model.sequence == first.model.sequence or not _alike(found, first):
                    yield found
                if found is first and not self._configured_fits(situation, found):
                    self._stage = f"choosing blocks of {model_name(model)} that compute again"
                    budget = f'memory.budget="{situation.free_bytes // 10**6}MB"'
                    yield self.probe_one(situation, replace(model, tier=(*model.tier, budget)))
                continue
            present = layout_of(situation.config)
            compared = not place and situation.gpu is None and present != Layout(situation.ranks)
            if compared:
                yield self.probe_one(situation, model, present)
            self._stage = f"probing {model_name(model)} on {situation.ranks} ranks"
            whole = self.probe_one(situation, model, Layout(situation.ranks))
            yield whole
            layout = Layout(situation.ranks, "fsdp2")
            if not (compared and present == layout) and not self._all_fit(situation, whole):
                yield replace(self.probe_one(situation, model, layout), instead=whole.memory)
        self._done, self._each = 1.0, 0.0

    def _configured_fits(self, situation: Situation, found: ProbedModel) -> bool:
        """Whether the configured batch fits without blocks that compute again; if it was not probed, it may."""
        batch, loader = situation.config.batch, situation.config.loader
        if found.memory is None or situation.config.memory.budget or situation.config.memory.recompute:
            return True
        added = situation.opened.items.loader_bytes(on_gpu(situation), loader.placement, loader.cache)
        fit = found.memory.fit(batch.micro, batch.accumulation, situation.free_bytes, added)
        return bool(fit.fits and not fit.retries)

    def _all_fit(self, situation: Situation, found: ProbedModel) -> bool:
        """Whether the largest batch that has to fit does; if any effective batch will do, the smallest."""
        if found.memory is None:
            return False
        hold = situation.hold(self.answers, found.layout)
        grid = batches(situation.config, hold, most_items(situation.opened))
        one = grid[0] if hold is None else grid[-1]
        return bool(found.memory.fit(one.micro, one.accumulation, situation.usable(found.layout)).fits)

    def probe_one(self, situation: Situation, model: Model, layout: Layout = SINGLE) -> ProbedModel:
        """Probe one model. Raises WizardStoppedError; other errors are returned as `why`."""
        hold = situation.hold(self.answers, layout)
        grid = batches(situation.config, hold, most_items(situation.opened))
        command = {
            "do": "probe",
            "sets": [*model.sets(), *layout.sets_to_probe(situation.config)],
            "micros": spread(grid[0].micro, grid[-1].micro, TIMED if situation.gpu is None else ESTIMATED),
            "longest_s": LONGEST_S,
            "free_bytes": situation.usable(layout),
            "gpu": None if situation.gpu is None else situation.gpu.slug,
            "check": self._done <= OPENING,  # the first model
        }
        try:
            if self._child is not None and self._child.ended:  # the previous model ran out of memory
                self._child.close()
                self._start()
                self._ask({"do": "open", **self._spec, "threads": situation.opened.threads})
            found = decoded(Probed, self._ask(command)["probed"])
        except WizardStoppedError:
            raise
        except (ChildError, NddError) as error:
            return ProbedModel(model, 0, 0.0, None, None, why=str(error), layout=layout)
        return ProbedModel(model, **vars(found), layout=layout)

    def _start(self) -> None:
        try:
            self._child = ChildProcess("ndd_engine.predict.probe_process")
        except ChildError as error:
            raise MachineError(f"the probes cannot run: {error}") from None

    def _ask(self, command: Json) -> Json:
        assert self._child is not None
        told: dict[str, None] = {}

        def tell(words: str) -> None:
            # Each new stage takes a share of what is left of the model.
            told[words] = None
            self._tell(words, self._done + (1 - STAGE ** (len(told) - 1)) * self._each)

        tick = ticker(self._stage, tell, self._stop)
        try:
            return self._child.ask(command, PATIENCE_S, tick)
        except ChildError as error:
            if command["do"] == "open":
                raise _KINDS.get(error.status or 0, NddError)(str(error)) from None
            raise

    def _amps(
        self, gpu: GpuProfile | None, machine: Machine, config: Config, opened: Opened
    ) -> tuple[tuple[str, ...], list[str]]:
        """The precisions to probe, the default first, and notes about them."""
        if self.answers.goal == "reproducible":
            return ("off",), ["reproducible: fp32 and deterministic algorithms"]
        if config.precision.amp != "auto":
            return (config.precision.amp,), []
        if gpu is None and opened.device == "cpu":
            units = machine.host.bf16_units
            if not units:
                return ("off",), ["bf16 is not probed: this CPU has no bf16 instructions"]
            return ("off", "bf16"), [f"bf16 is probed: this CPU has bf16 instructions ({units[0]})"]
        # NVML may not list a GPU that torch sees.
        profile = gpu or (machine.chosen.profile if machine.chosen else match(opened.device_name, None))
        if profile is None or profile.peak_tflops("bf16"):
            return ("off", "bf16"), []
        half = ("fp16",) if profile.peak_tflops("fp16") else ()
        return ("off", *half), [f"bf16 is not probed: {profile.name} does not support it"]


def tier_of(draft: Draft, size: str | None, memory_gb: float | None) -> tuple[str, ...]:
    """The overrides of [workload] that a profile has for size "auto" on a GPU with this memory."""
    plain, tier = draft.resolve(size), draft.resolve(size, memory_gb)
    changed = differences(plain, tier).items()
    return tuple(f"{key}={new}" for key, (_, new) in changed if key.startswith("workload."))


def _is_of_size(config: Config, draft: Draft, size: str | None, other: str) -> bool:
    """Whether the configuration, of one size, already has all that another size would change in the model."""
    changed = differences(draft.resolve(size), draft.resolve(other)).items()
    model = {key: new for key, (_, new) in changed if key.startswith("workload.") and key != "workload.size"}
    return bool(model) and all(config.value(key) == new for key, new in model.items())


def _alike(one: ProbedModel, other: ProbedModel) -> bool:
    """Whether both models have the same steps, as those of a factory that does not use the sequence."""
    if one.memory is None or other.memory is None or one.model.amp != other.model.amp:
        return one.tokens_per_item == other.tokens_per_item and one.data_share == other.data_share == 1.0
    return one.memory.family.lines == other.memory.family.lines


def most_items(opened: Opened) -> int:
    """The most items that a batch can have."""
    return LARGEST_MICRO if opened.train_items is None else opened.train_items


def model_name(model: Model) -> str:
    """Display name, such as "small, sequence 128, bf16"."""
    again = "recompute" if model.recomputes else ""
    amp = "" if model.amp == "off" else model.amp
    parts = [model.size or "model", f"sequence {model.sequence}", amp, again]
    return ", ".join(part for part in parts if part)


# Disadvantage of a proposal.
RETRIES = "fits, with allocator retries, which cost time"


class _Peaks:
    """What batches of a model need of the free bytes; each is replayed once."""

    def __init__(self, memory: Memory, free_bytes: int) -> None:
        self._memory, self._free_bytes = memory, free_bytes
        self._long = len(memory.family.first.events) > LONG_TRACE
        self._peaks: dict[tuple[int, int], int] = {}
        self._fits: dict[tuple[int, int, int], Fit] = {}

    def fit(self, micro: int, accumulation: int, added_bytes: int) -> Fit:
        """As `Memory.fit`; of a long trace without retries of the allocator."""
        accumulation = min(accumulation, 2)  # two or more need the same
        if self._long:
            peak = self._peak(micro, accumulation) + added_bytes
            return Fit(peak, peak <= self._free_bytes, roomy_bytes=peak)
        key = micro, accumulation, added_bytes
        if key not in self._fits:
            self._fits[key] = self._memory.fit(micro, accumulation, self._free_bytes, added_bytes)
        return self._fits[key]

    def _peak(self, micro: int, accumulation: int) -> int:
        below = 1
        while below * APART <= micro:
            below *= APART
        places = [below] if below == micro else [below, below * APART]
        for place in places:
            if (place, accumulation) not in self._peaks:
                self._peaks[place, accumulation] = self._memory.peak(place, accumulation)
        peaks = [self._peaks[place, accumulation] for place in places]
        return peaks[0] if len(places) == 1 else round(at(micro, places, peaks))


def proposals(situation: Situation, answers: Answers, found: ProbedModel) -> list[Proposal]:
    """The proposals of a probed model; none if its probe failed."""
    if found.memory is None and found.time is None:
        return []
    config, opened, layout = situation.config, situation.opened, found.layout
    hold, free = situation.hold(answers, layout), situation.usable(layout)
    # Ranks on one CPU would share its cores, by how much is not known.
    timed = found.time if layout.ranks == 1 or on_gpu(situation) else None
    items = answers.items or run_items(config, opened.train_items)
    now = (opened.size, config.batch.sequence)
    loader, kept = config.loader, opened.items
    cuda = on_gpu(situation)
    peaks = None if found.memory is None else _Peaks(found.memory, free)
    loader_bytes = {place: kept.loader_bytes(cuda, place, loader.cache) for place in placements(situation)}

    def fits(micro: int) -> bool:
        times = 1 if hold is None else max(hold // micro, 1)
        least = min(loader_bytes.values())
        return peaks is None or bool(peaks.fit(micro, times, least).fits)

    per_epoch = None if opened.train_items is None else round(opened.train_items * found.data_share)
    most = most_items(opened) if per_epoch is None else per_epoch
    single = not opened.normalises and not fits(2)
    grid = batches(config, hold, most, single)
    threads = opened.threads if opened.faster else opened.chosen_threads
    rows = []
    chosen = worth_a_row(grid, config.batch.micro, fits, hold is None)
    if hold is None:  # smaller micro-batches may also keep the effective batch
        kept_batch = max(config.items_per_step // layout.ranks, 1)
        held = batches(config, kept_batch, most, single)
        chosen += [one for one in worth_a_row(held, config.batch.micro, fits, False) if one not in chosen]
    given = given_sets(situation, answers)
    mine = (
        given is not None
        and not opened.faster  # all rows have other threads
        and found.model == present_model(situation)
        and layout == layout_of(situation.config)
    )
    if layout.ranks != situation.ranks:  # for comparison only
        chosen = []
    if found.instead is not None:
        preferred, least = found.instead, min(loader_bytes.values())
        chosen = [one for one in chosen if not preferred.fit(one.micro, one.accumulation, free, least).fits]
    if mine and present_batch(config) not in chosen:
        chosen.append(present_batch(config))
    for batch in chosen:
        total = batch.items * layout.ranks
        steps = None if per_epoch is None else per_epoch // total
        parameters = opened.parameters, found.parameters
        cost = cost_in_words(config, opened.token, now, found.model, batch, parameters, layout)
        for placement, added in loader_bytes.items():
            fit = None if peaks is None else peaks.fit(batch.micro, batch.accumulation, added)
            retries = 0 if fit is None else fit.retries
            estimate = found.estimate if layout.ranks == 1 or on_gpu(situation) else None
            placed = placement == "device" and cuda
            times = batch.micro, batch.accumulation, loader.workers, placed
            present = mine and batch == present_batch(config) and placement == loader.placement
            rows.append(
                Proposal(
                    model=found.model,
                    batch=batch,
                    placement=placement,
                    workers=loader.workers,
                    threads=threads if situation.gpu is None else None,
                    parameters=found.parameters,
                    memory_bytes=None if fit is None else fit.peak_bytes,
                    free_bytes=free,
                    step_s=None if timed is None else timed.step_s(*times),
                    items=round(items * found.data_share),
                    tokens_per_item=found.tokens_per_item,
                    setup_s=opened.setup_s if situation.gpu is None else 0.0,
                    doubt="" if found.memory is None else found.memory.why_not,
                    step_range_s=None
                    if estimate is None
                    else (estimate.low.step_s(*times), estimate.high.step_s(*times)),
                    decides="" if estimate is None else estimate.decides(batch.micro, *times[2:]),
                    cost="; ".join(filter(None, (RETRIES if retries else "", found.recomputes, cost))),
                    retries=retries,
                    given=given if present else None,
                    steps_per_epoch=steps,
                    batch_times=total / config.items_per_step,
                    alternative=answers.alternatives and (found.model.size, found.model.sequence) != now,
                    allowed=hold is None or total == answers.step_items(config),
                    layout=layout,
                    select_ranks=layout != layout_of(config),
                    whole_bytes=None
                    if found.instead is None
                    else found.instead.peak(batch.micro, batch.accumulation) + added,
                    item=opened.item,
                    token=opened.token,
                )
            )
    return rows


def present_model(situation: Situation) -> Model:
    """The model of the configuration that the wizard started from."""
    config, amps = situation.config, situation.amps
    amp = config.precision.amp
    if amp == "auto":
        amp = "off"
        if on_gpu(situation):
            amp = "bf16" if "bf16" in amps else "fp16" if "fp16" in amps else "off"
    return Model(situation.opened.size, config.batch.sequence, amp, situation.tier)


def present_batch(config: Config) -> Batch:
    """The batch of the configuration that the wizard started from."""
    return Batch(config.batch.micro, config.batch.accumulation)


def given_sets(situation: Situation, answers: Answers) -> tuple[str, ...] | None:
    """The overrides that select the present configuration; None for a GPU that is not in this machine."""
    if situation.gpu is not None:
        return None
    if answers.draft().size != "auto":
        return ()
    opened = situation.opened
    threads = () if opened.chosen_threads is None else (f"run.threads={opened.chosen_threads}",)
    batch = situation.config.batch  # it may depend on the memory of the GPU
    return (
        f"workload.size={opened.size}", *situation.tier, *threads, f"batch.sequence={batch.sequence}",
        f"batch.micro={batch.micro}", f"batch.accumulation={batch.accumulation}",
    )  # fmt: skip


def unprobed_present(
    situation: Situation, answers: Answers, rows: Sequence[Proposal] = ()
) -> Proposal | None:
    """The present configuration without predictions, for answers that exclude its model, or where all rows have other
    threads; None for another GPU.

    rows: those of the proposals. It is within the limits if one of them differs in the threads only.
    """
    given, config, opened = given_sets(situation, answers), situation.config, situation.opened
    if given is None:
        return None
    model, batch = present_model(situation), present_batch(config)
    return Proposal(
        model=model,
        batch=batch,
        placement=config.loader.placement,
        workers=config.loader.workers,
        threads=opened.chosen_threads,
        parameters=opened.parameters,
        memory_bytes=None,
        free_bytes=situation.free_bytes,
        step_s=None,
        items=answers.items or run_items(config, opened.train_items),
        tokens_per_item=opened.tokens_per_item,
        setup_s=opened.setup_s,
        given=given,
        allowed=opened.faster and any((one.model, one.batch) == (model, batch) for one in rows),
        layout=layout_of(config),
        item=opened.item,
        token=opened.token,
    )


def on_gpu(situation: Situation) -> bool:
    """Whether the proposals are for a GPU, in this machine or not."""
    return situation.gpu is not None or situation.opened.device.startswith("cuda")


def placements(situation: Situation) -> list[str]:
    """Possible data placements, the configured one first. On a GPU each is a separate row."""
    loader = situation.config.loader
    if not on_gpu(situation) or not situation.opened.items.places or loader.workers:
        return [loader.placement]
    return sorted(("host", "device"), key=lambda place: place != loader.placement)


def run_items(config: Config, train_items: int | None) -> int:
    """Number of items that the run trains on. Raises UsageError if it is unknown."""
    step = config.items_per_step
    if train_items is None:
        if config.run.max_steps is None:
            text = "the length of the training data is unknown, and so is the time of the run"
            raise UsageError(f"{text}: set run.max_steps, or --items N")
        return config.run.max_steps * step
    limits = [] if config.run.max_steps is None else [config.run.max_steps * step]
    if config.run.epochs is not None:
        limits.append(config.run.epochs * (train_items // step) * step)
    return max(min(limits, default=train_items), 1)
