"""The events of the diagnosis: what was measured for it, what it found, and which change was tried."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from .event import Event, Json


@dataclass(frozen=True, slots=True)
class LoaderEvent(Event):
    """What the training data is, and what one micro-batch of it costs to make in the training process.

    in_memory: batches can be made in one gather from tensors that lie in memory. encoded: items that were encoded
    once and are kept, or null. epochs_differ: items change every epoch and cannot be kept. batch_bytes: of one
    micro-batch. item_ns, item_cpu_ns: wall and processor time of making one item (mean of `probed`; the rest it
    waited, for storage or a network). collate_ns: joining a micro-batch's items. gather_ns: a micro-batch in one
    gather, null where that is not possible. Nanoseconds; null where nothing was measured.
    """

    type: ClassVar[str] = "loader"
    items: int
    micro: int
    in_memory: bool
    encoded: int | None
    epochs_differ: bool
    batch_bytes: int | None = None
    item_ns: float | None = None
    item_cpu_ns: float | None = None
    collate_ns: float | None = None
    gather_ns: float | None = None
    probed: int = 0


@dataclass(frozen=True, slots=True)
class BaselineEvent(Event):
    """Forward and backward of one micro-batch by itself, before any loader process runs: the fastest of `runs`.

    other_micro, other_ns: the same for another size of the micro-batch, which shows what does not grow with it.
    threads: of the run; by_threads: [[threads, nanoseconds], …] of the same micro-batch with other thread counts
    (processor only). operations: operators of one forward and backward pass.
    """

    type: ClassVar[str] = "baseline"
    micro: int
    micro_ns: float
    runs: int
    other_micro: int | None = None
    other_ns: float | None = None
    threads: int | None = None
    by_threads: list[list[float]] = field(default_factory=list)
    operations: int | None = None


@dataclass(frozen=True, slots=True)
class KernelsEvent(Event):
    """A burst of the profiler over a few whole steps, with the exact union of what was computed and copied.

    method: "kernels" (kernels and copies on the card) or "operators" (operators on the host, without a card).
    step: optimizer steps done at its end. busy_ns, copy_ns: union of kernels and copies; of copies alone.
    idle_ns: the rest of wall_ns by cause, adding up to it. top: the longest kernels or operators, [name, total
    nanoseconds, count] each. launches: kernels or top-level operators in the burst. trace: the file that was exported.
    """

    type: ClassVar[str] = "kernels"
    method: str
    step: int
    steps: int
    wall_ns: int
    busy_ns: int
    copy_ns: int
    idle_ns: dict[str, int]
    launches: int
    top: list[list[Any]] = field(default_factory=list)
    trace: str | None = None


@dataclass(frozen=True, slots=True)
class StacksEvent(Event):
    """Where the training thread was seen since the last such event, at a few looks a second.

    looks: how many. frames: [phase, file, line, function, looks, own], the most seen first: the innermost frame
    that is not torch's, Python's or the console's own machinery. own: 1 where the user's code or a workload is in
    it, 0 where only the innermost frame of a library is known.
    """

    type: ClassVar[str] = "stacks"
    step: int
    looks: int
    frames: list[list[Any]]


@dataclass(frozen=True, slots=True)
class FindingEvent(Event):
    """A finding came (gone false) or went. finding: see diagnose.finding.Finding.to_dict."""

    type: ClassVar[str] = "finding"
    step: int
    cause: str
    text: str
    gone: bool = False
    finding: Json = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrialEvent(Event):
    """A change measured against the present, in paired blocks on this machine.

    sets: the change, "key=value" each. against: what it was compared with, in words. verdict: gain, no gain, loss,
    undecided, out of memory, failed or stopped. ratio: speed (items a second) with the change over without it, with
    its interval low..high at `confidence`; null where nothing was compared. quads: blocks A B B A that were measured.
    base, change: each side's figures (see trial.side.SideFacts). in_effect: whether the change took effect, null
    where that cannot be told; not_in_effect: why not. loss: "same", "close", "differs" or "not comparable";
    loss_text says how it was compared. break_even_steps: optimizer steps after which the time that the change costs
    before training is repaid, null without a gain. text: the result in one sentence. seconds: the trial took.
    device: what it was measured on.
    """

    type: ClassVar[str] = "trial"
    sets: list[str]
    against: str
    verdict: str
    text: str
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    confidence: float = 0.95
    quads: int = 0
    seconds: float = 0.0
    budget_s: float = 0.0
    device: str = ""
    in_effect: bool | None = None
    not_in_effect: str = ""
    loss: str = "not comparable"
    loss_text: str = ""
    break_even_steps: int | None = None
    base: Json = field(default_factory=dict)
    change: Json = field(default_factory=dict)
    cause: str | None = None
