"""The rows of the trade-off table from a probed model. Does not import torch."""

from __future__ import annotations

from ndd_engine.config import Config
from ndd_engine.errors import UsageError

from .answers import Answers
from .planner import ProbedModel, Situation, most_items
from .proposals import Proposal, cost_in_words
from .ranks import layout_of
from .space import Batch, Model, batches, worth_a_row

# Disadvantage of a proposal.
RETRIES = "fits, with allocator retries, which cost time"


def proposals(situation: Situation, answers: Answers, found: ProbedModel) -> list[Proposal]:
    """The proposals of a probed model; none if its probe failed."""
    if found.memory is None and found.time is None:
        return []
    config, opened, layout = situation.config, situation.opened, found.layout
    hold, free = situation.hold(answers, layout), situation.usable(layout)
    # Ranks on one CPU would share its cores, by how much is not known.
    timed = found.time if layout.ranks == 1 or on_gpu(situation) else None
    items = answers.items or run_items(config, opened.train_items)
    now = (opened.size, opened.sequence)
    loader, kept = config.loader, opened.items
    cuda = on_gpu(situation)
    peaks = found.memory
    loader_bytes = {place: kept.loader_bytes(cuda, place, loader.cache) for place in placements(situation)}

    def fits(micro: int) -> bool:
        times = 1 if hold is None else max(hold // micro, 1)
        least = min(loader_bytes.values())
        return peaks is None or bool(peaks.fit(micro, times, free, least).fits)

    grid = batches(config, hold, most_items(opened))
    rows = []
    chosen = worth_a_row(grid, config.batch.micro, fits, hold is None)
    given = given_sets(situation, answers)
    mine = (
        given is not None
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
        cost = cost_in_words(
            config, opened.token, now, found.model, batch, (opened.parameters, found.parameters), layout
        )
        for placement, added in loader_bytes.items():
            fit = None if peaks is None else peaks.fit(batch.micro, batch.accumulation, free, added)
            retries = 0 if fit is None else fit.retries
            placed = placement == "device" and cuda
            times = batch.micro, batch.accumulation, loader.workers, placed
            present = mine and batch == present_batch(config) and placement == loader.placement
            rows.append(
                Proposal(
                    model=found.model,
                    batch=batch,
                    placement=placement,
                    workers=loader.workers,
                    threads=opened.chosen_threads if situation.gpu is None else None,
                    parameters=found.parameters,
                    memory_bytes=None if fit is None else fit.peak_bytes,
                    free_bytes=free,
                    step_s=None if timed is None else timed.step_s(*times),
                    items=items,
                    tokens_per_item=found.tokens_per_item,
                    setup_s=opened.setup_s if situation.gpu is None else 0.0,
                    doubt="" if peaks is None else peaks.why_not,
                    lower_bound=found.lower_bound,
                    cost="; ".join(filter(None, (RETRIES if retries else "", cost))),
                    retries=retries,
                    given=given if present else None,
                    allowed=hold is None or batch.items * layout.ranks == answers.step_items(config),
                    layout=layout,
                    select_ranks=layout != layout_of(config),
                    whole_bytes=None
                    if found.instead is None
                    else found.instead.peak(batch.micro, batch.accumulation) + added,
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
    return Model(situation.opened.size, config.batch.sequence, amp)


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
        f"workload.size={opened.size}", *threads, f"batch.sequence={batch.sequence}", f"batch.micro={batch.micro}",
        f"batch.accumulation={batch.accumulation}",
    )  # fmt: skip


def unprobed_present(situation: Situation, answers: Answers) -> Proposal | None:
    """The present configuration without predictions, for answers that exclude its model; None for another GPU."""
    given, config, opened = given_sets(situation, answers), situation.config, situation.opened
    if given is None:
        return None
    return Proposal(
        model=present_model(situation),
        batch=present_batch(config),
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
        allowed=False,
        layout=layout_of(config),
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
