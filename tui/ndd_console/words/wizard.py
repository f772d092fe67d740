"""What the wizard proposes, in words: the columns of its tables, remarks, and the table that it prints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ndd_engine.hardware.named_gpus import usable_bytes
from ndd_engine.text import MISSING, counted, duration, foreign, number, plural, size
from ndd_engine.wizard.proposals import Answers, Proposal
from ndd_engine.wizard.ranking import handful, range_in_words, slowness

from .blocks import Block, NamedValues, Table, Text
from .machine import peak_rows

if TYPE_CHECKING:
    from ndd_engine.hardware.gpus import GpuProfile
    from ndd_engine.predict.probe_process import Opened
    from ndd_engine.wizard.planner import Situation
    from ndd_engine.wizard.session import Choice, ProposalSet
    from ndd_engine.workloads.interface import DataFacts

_LARGE = float("inf")
_FEW_STEPS = 10  # an epoch with fewer is a remark
ITEMS, TOKENS = "items/s", "tokens/s"  # columns; their headings name the items and tokens of the workload
_ESTIMATES = "times are estimates, with a range over what the host takes to launch a kernel"

# Goals and questions.
MEANINGS = {
    "throughput": "as many items per second as possible within the limits below",
    "low-memory": "little memory at nearly full speed, for a machine shared with others",
    "reproducible": "fp32 and deterministic algorithms: the same results on the same machine",
    "time": "the shortest time for the number of items below, including data preparation",
    "number of items": "the total number of items to train on",
    "effective batch": (
        "items per optimizer step; kept by gradient accumulation, because changing it changes the training"
    ),
    "minimum sequence": "shorter sequences are faster and need less memory, but give the model less context",
    "model sizes": "smaller models are faster and need less memory, but reach a higher loss",
    "reserved memory": "kept free for evaluation, libraries and other processes",
}

# Columns that some models have no values for: left out if no row has one.
APPLIES: dict[str, Callable[[Proposal], Any]] = {
    "size": lambda row: row.model.size,
    "ranks": lambda row: row.layout.ranks > 1,
    "sequence": lambda row: row.tokens_per_item,
    TOKENS: lambda row: row.token,
}
# Columns of `verified_texts`, after the name of a proposal.
VERIFIED = ("memory", "measured", "error", "step", "measured", "error")


@dataclass(frozen=True)
class Column:
    """One column. text: cell text; order: sort key, ascending."""

    name: str
    text: Callable[[Proposal], str]
    order: Callable[[Proposal], Any]


def _or(value: float | None) -> float:
    return _LARGE if value is None else value


def _over(count: int) -> str:
    return f"over the limit by {size(count)}"


def _ranks(proposal: Proposal) -> str:
    return f"{proposal.layout.ranks} {proposal.layout.strategy}" if proposal.layout.ranks > 1 else "1"


PROPOSAL_COLUMNS: tuple[Column, ...] = (
    Column("size", lambda row: row.model.size or MISSING, lambda row: row.parameters),
    Column("sequence", lambda row: str(row.model.sequence), lambda row: -row.model.sequence),
    Column("dtype", lambda row: row.model.precision, lambda row: float(row.model.amp != "off")),
    Column("ranks", _ranks, lambda row: -row.layout.ranks),
    Column("micro", lambda row: str(row.batch.micro), lambda row: -row.batch.micro),
    Column("accum", lambda row: str(row.batch.accumulation), lambda row: row.batch.accumulation),
    Column("memory", lambda row: size(row.memory_bytes), lambda row: _or(row.memory_bytes)),
    Column("data", lambda row: "GPU" if row.placement == "device" else "host", lambda row: row.placement),
    Column("step", lambda row: duration(row.step_s), lambda row: _or(row.step_s)),
    Column(ITEMS, lambda row: number(row.items_per_s), slowness),
    Column(TOKENS, lambda row: number(row.tokens_per_s), lambda row: -(row.tokens_per_s or 0.0)),
    Column("total time", lambda row: duration(row.total_s), lambda row: _or(row.total_s)),
    Column("parameters", lambda row: number(row.parameters), lambda row: row.parameters),
)  # fmt: skip


# Those of the printed table, which fits into 80 cells with the model and the batch.
_PRINTED = ("memory", "step", ITEMS, TOKENS, "total time")


def applicable(rows: Sequence[Proposal], names: Iterable[str]) -> list[str]:
    """The columns among `names` that apply to any of the rows."""
    return [name for name in names if name not in APPLIES or any(map(APPLIES[name], rows))]


def item_unit(proposal: Proposal) -> str:
    """ "segments/s"."""
    return f"{plural(foreign(proposal.item))}/s"


def token_unit(proposal: Proposal) -> str:
    """ "characters/s"."""
    return f"{plural(foreign(proposal.token or 'token'))}/s"


def heading(column: Column, rows: Sequence[Proposal]) -> str:
    """The name of a column; of a rate, with what the workload calls its items or tokens."""
    units = {ITEMS: item_unit, TOKENS: token_unit}
    return units[column.name](rows[0]) if rows and column.name in units else column.name


def remark(proposal: Proposal, details: bool = False) -> str:
    """Whether it fits, measurements and disadvantages. details: with memory, spread and reasons."""
    words, known = ["present configuration"] if proposal.present else [], proposal.measured
    if not proposal.allowed:
        words.append("outside the limits")
    if proposal.missing_bytes:
        words.append(f"does not fit: {_over(proposal.missing_bytes)}")
    if known is not None and known.step_s is None:
        words.append(known.verdict)
    elif known is not None:
        memory = f"{size(known.memory_bytes)}, " if details else ""
        varies = "" if known.spread is None else f" (rounds vary by {known.spread * 100:.0f} %)"
        spread = varies if details else ""
        words.append(f"measured {memory}{duration(known.step_s)} per step{spread}")
    if proposal.over_bytes:
        words.append(f"measured memory is {_over(proposal.over_bytes)}")
    if proposal.doubt and proposal.memory_bytes is not None:
        words.append("low confidence in memory" + (f" ({proposal.doubt})" if details else ""))
    if proposal.steps_per_epoch is not None and proposal.steps_per_epoch < _FEW_STEPS:
        words.append(
            f"only {counted(proposal.steps_per_epoch, 'step')} an epoch: the model is seldom updated"
        )
    if details and (text := range_in_words(proposal)):
        words.append(text)
    if details and proposal.placement == "device":
        words.append("data on the GPU")
    return "; ".join([*words, proposal.cost] if proposal.cost else words)


def about_text(proposal: Proposal) -> str:
    """What is predicted of a proposal."""
    rates = [f"{number(proposal.items_per_s)} {item_unit(proposal)}"]
    if proposal.token:
        rates.append(f"{number(proposal.tokens_per_s)} {token_unit(proposal)}")
    memory = f"predicted peak {size(proposal.memory_bytes)} of {size(proposal.free_bytes)}"
    leaves = leaves_text(proposal)
    return "; ".join(
        filter(None, (memory, leaves, ", ".join(rates), f"{number(proposal.parameters)} parameters"))
    )


def label(proposal: Proposal) -> str:
    """ "guide 256, 64 x 2 bf16": model, batch and what sets it apart."""
    kind = "" if proposal.model.amp == "off" else f" {proposal.model.amp}"
    kind += " recompute" if proposal.model.recomputes else ""
    if proposal.present:
        kind += ", present"
    model = proposal.model.size or "model"
    if proposal.tokens_per_item:
        model += f" {proposal.model.sequence}"
    return f"{model}, {batch_text(proposal)}{kind}"


def batch_text(proposal: Proposal) -> str:
    """ "64 x 2": micro-batch and accumulation."""
    times = f" x {proposal.batch.accumulation}" if proposal.batch.accumulation > 1 else ""
    return f"{proposal.batch.micro}{times}"


def verified_texts(proposal: Proposal) -> tuple[str, ...]:
    """The predictions beside their measurements, or beside what is known in place of these."""
    known, memory, step = proposal.measured, proposal.memory_bytes, proposal.step_s
    if known is None or known.step_s is None:
        return size(memory), known.verdict if known is not None else "not yet", "", duration(step), "", ""
    memories, times = (memory, known.memory_bytes), (step, known.step_s)
    return *map(size, memories), _error(*memories), *map(duration, times), _error(*times)


def _error(predicted: float | None, measured: float | None) -> str:
    """Signed relative error of the prediction."""
    if not predicted or not measured:
        return MISSING
    return f"{(predicted / measured - 1) * 100:+.1f} %"


def spread_text(verified: Sequence[Proposal]) -> str:
    """How much repeated measurements vary; "" if that is unknown."""
    spread = max((one.measured.spread or 0.0 for one in verified if one.measured is not None), default=0.0)
    return (
        f"repeated measurements vary by up to {spread * 100:.0f} %; smaller errors are noise"
        if spread
        else ""
    )


def other_gpu_blocks(gpu: GpuProfile) -> Iterator[Block]:
    """A GPU that is not in this machine."""
    yield Text(f"proposals are for another GPU: {gpu.name} (from its specifications)")
    memory = f"{gpu.memory_gb:g} GB, {size(usable_bytes(gpu))} usable"
    yield NamedValues(
        (("memory", memory), *peak_rows(gpu), ("", f"nothing is measured on this machine; {_ESTIMATES}"))
    )


def proposal_blocks(
    proposed: ProposalSet, answers: Answers, best: Proposal | None, choice: Choice | None = None
) -> Iterator[Block]:
    """The handful of proposals as a table, and below it what each leaves, depends on and gives up."""
    situation = proposed.situation
    yield Text(f"{situation.device_name}: {size(situation.free_bytes)} usable")
    yield from map(Text, situation_texts(proposed))
    shown = handful(proposed.rows, answers)
    if not shown:
        yield Text("nothing could be predicted")
        return
    names = applicable(shown, _PRINTED)
    columns = [column for column in PROPOSAL_COLUMNS if column.name in names]
    marks = ("*" if best is not None and one.key == best.key else " " for one in shown)
    rows = tuple(
        (f"{mark}{place}", model_text(one), batch_text(one), *(column.text(one) for column in columns))
        for place, (mark, one) in enumerate(zip(marks, shown, strict=True), 1)
    )
    yield Table("", ("", "model", "batch", *(heading(column, shown) for column in columns)), rows)
    for place, one in enumerate(shown, 1):
        yield Text(f"{place}: {'; '.join(filter(None, (leaves_text(one), remark(one, details=True))))}")
    measured = [proposal for proposal in proposed.rows if proposal.measured is not None]
    tight = [proposal for proposal in proposed.rows if not proposal.fits]
    timed = any(proposal.measured is not None and proposal.measured.step_s for proposal in measured)
    if choice is not None and timed:
        yield Text(choice.text + ("" if best is not None else "; nothing is written"))
    elif best is None and any(proposal.fits for proposal in measured):
        yield Text("all measured proposals failed; nothing is written")
    elif best is None and not tight:
        yield Text("no proposal is within the limits; nothing is written")
    elif best is None:
        least = min(tight, key=lambda proposal: proposal.missing_bytes)
        yield Text(f"nothing fits: micro-batch {least.batch.micro} is {_over(least.missing_bytes)}")
    yield Text("* recommended; total time: for as much data as the configured run has")
    yield Text("memory and time are predictions" + (" unless marked as measured" if measured else ""))


def model_text(proposal: Proposal) -> str:
    """ "guide 512 bf16": what needs a probe of its own, and several ranks."""
    sequence = str(proposal.model.sequence) if proposal.tokens_per_item else ""
    parts = [proposal.model.size, sequence] if proposal.model.size else [sequence and f"sequence {sequence}"]
    ranks = f"{_ranks(proposal)} ranks" if proposal.layout.ranks > 1 else ""
    again = "recompute" if proposal.model.recomputes else ""
    return " ".join(filter(None, (*parts, proposal.model.precision, again, ranks)))


def leaves_text(proposal: Proposal) -> str:
    """What is left of the memory, and the steps of an epoch."""
    spare = proposal.spare_bytes
    words = [] if spare is None or spare < 0 else [f"{size(spare)} spare"]
    if proposal.steps_per_epoch is not None and proposal.steps_per_epoch >= _FEW_STEPS:
        words.append(f"{counted(proposal.steps_per_epoch, 'step')} an epoch")
    return ", ".join(words)


def situation_texts(proposed: ProposalSet) -> Iterator[str]:
    """Data and model, with how many threads was measured, and what could not be predicted."""
    from ndd_engine.wizard.planner import model_name

    situation, opened = proposed.situation, proposed.situation.opened
    yield from (opened.data, opened.model, *lengths_line(opened), *threads_line(situation), *situation.notes)
    yield from (f"{model_name(probed.model)}: {probed.why}" for probed in proposed.found if probed.why)


def threads_line(situation: Situation) -> tuple[str, ...]:
    """How many threads the times were measured with, and how long another number took."""
    opened = situation.opened
    if situation.gpu is not None or opened.device != "cpu" or not opened.threads:
        return ()
    times = ", ".join(f"{duration(s)} with {counted(n, 'thread')}" for n, s in opened.by_threads)
    words = f"measured with {counted(opened.threads, 'thread')}"
    compared = f"; a micro-batch takes {times}" if times else ""
    advice = f"; run.threads={opened.threads} is proposed" if opened.faster else ""
    return (f"{words}{compared}{advice}",)


def lengths_line(opened: Opened) -> tuple[str, ...]:
    """The distribution of item lengths, if they vary."""
    lengths = opened.lengths
    if not lengths:
        return ()
    median, ninety = lengths[len(lengths) // 2], lengths[min(int(len(lengths) * 0.9), len(lengths) - 1)]
    unit = plural(opened.token or "step")
    return (f"lengths: {lengths[0]} to {lengths[-1]} {unit}, median {median}, 90th percentile {ninety}",)


def data_texts(known: DataFacts | None, chosen: str) -> tuple[str, ...]:
    """What is known of the data of a workload before it is read. chosen: a size that is chosen automatically, or ""."""
    if known is None:
        return ("the number of items is known after the data has been read",)
    amount = counted(known.train_items, f"training {known.item}")
    if known.tokens_per_item:
        amount += f", {counted(known.tokens_per_item, known.token or 'token')} each"
    if chosen:
        amount += f" (with size {chosen}; the size is chosen automatically)"
    return (known.text, amount)
