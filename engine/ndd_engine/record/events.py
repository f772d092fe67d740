"""The events of a run: one JSON object a line, the only thing that is ever recorded.

Every event carries `v` (version), `type` and `t` (unix seconds). Units are in field names. A field that could
not be measured is `null`. Readers ignore fields and types they do not know, and skip lines that are torn.

    run      who runs what on which machine; the first event, and again after a resume (with `resumed_step`)
    stage    preparation, so that a viewer knows what is being waited for
    window   a stretch of steps: wall time, where it went, loss, throughput
    sample   counters of the card and the host
    memory   the torch allocator's counters (CUDA only)
    setting  one setting: what was asked for, what was applied, and whether it took effect
    work     what one optimizer step computes and moves, and what the card could do at most
    loader   what making a micro-batch costs, measured before training
    baseline one micro-batch by itself, measured before training
    kernels  a short profiler burst: exactly when something was computed or copied
    stacks   where in the code the training thread was seen
    finding  what holds the run back was found, or is gone
    trial    a change was measured against the present
    mark     something that happened: epoch, evaluation, checkpoint, compile, pause, warning, choice
    fold     the folded state, written now and then so that a long log opens at once
    end      how it ended
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Self

VERSION = 1

# Phases of a step; `other` is wall time minus the rest. The order is the order on the screen.
PHASES = (
    "data_wait",
    "to_device",
    "forward",
    "loss",
    "backward",
    "clip",
    "optimizer",
    "zero_grad",
    "log",
    "evaluate",
    "checkpoint",
    "other",
)

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Event:
    """What all events share: reading and writing."""

    type: ClassVar[str]

    def to_json(self, t: float) -> str:
        """One line without its newline. NaN and infinities become null: JSON has neither."""
        body: Json = {"v": VERSION, "type": self.type, "t": round(t, 4)}
        for item in fields(self):
            body[item.name] = getattr(self, item.name)
        try:
            return json.dumps(body, separators=(",", ":"), allow_nan=False)
        except ValueError:
            return json.dumps(finite(body), separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_dict(cls, body: Json) -> Self:
        """Rebuild from a parsed line; unknown fields are dropped. Raises TypeError when a required one is absent."""
        known = {item.name for item in fields(cls)}
        return cls(**{key: value for key, value in body.items() if key in known})


def finite(value: Any) -> Any:
    """The value with every NaN and infinity in it replaced by None."""
    if isinstance(value, float):
        return value if value == value and value not in (float("inf"), float("-inf")) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


@dataclass(frozen=True, slots=True)
class RunEvent(Event):
    """Identity of a run.

    steps_per_epoch and items_per_epoch are of the training set; total_steps is where the run will end.
    item and token name the units of the workload ("window", "character"); tokens_per_item may be 0 (none).
    card: see hardware.card.Card.to_dict; null without a card. usable_cores: what this process may use of the host,
    by its affinity and its control group's quota.
    """

    type: ClassVar[str] = "run"
    name: str
    workload: str
    config: Json
    pid: int
    host: str
    device: str
    device_name: str
    card: Json | None
    versions: dict[str, str]
    parameters: int
    precision: str
    item: str
    token: str | None
    tokens_per_item: float
    items_per_step: int
    items_per_epoch: int
    steps_per_epoch: int
    epochs: int
    total_steps: int
    model: str
    data: str
    threads: int | None = None
    usable_cores: float | None = None
    resumed_step: int | None = None
    resumed_from: str | None = None


@dataclass(frozen=True, slots=True)
class StageEvent(Event):
    """Preparation before the first step: "importing torch", "reading the text"."""

    type: ClassVar[str] = "stage"
    name: str
    text: str


@dataclass(frozen=True, slots=True)
class WindowEvent(Event):
    """A stretch of the run between two clock readings.

    wall_ns: the stretch by the monotonic clock; equals the sum of phases[*].host_ns exactly. steps may be 0
    (an evaluation longer than a window). step: optimizer steps done at its end. step_*_ns: per optimizer step.
    phases: {phase: {"host_ns": total in this window, "p50_ns", "p95_ns", "max_ns": per step,
    "device_ns": mean per step on the device, or null}}; a key "forward/encoder" is a part of "forward".
    loss: mean of the losses read back in this window, null if none was. last_loss: [step, loss].
    gc_ns, gc_count: Python's garbage collections in it, which lie inside the phases; gc_max_ns: the longest.
    profiled: a profiler burst ran, so its times say nothing about the other steps.
    """

    type: ClassVar[str] = "window"
    step: int
    epoch: int
    epoch_step: int
    steps: int
    micro_steps: int
    items: int
    tokens: int
    wall_ns: int
    step_p50_ns: int | None
    step_p95_ns: int | None
    step_max_ns: int | None
    phases: dict[str, Json]
    loss: float | None = None
    last_loss: tuple[int, float] | None = None
    lr: float | None = None
    grad_norm: float | None = None
    loss_scale: float | None = None
    device_steps: int = 0
    gc_ns: int | None = None
    gc_count: int | None = None
    gc_max_ns: int | None = None
    profiled: bool = False


@dataclass(frozen=True, slots=True)
class SampleEvent(Event):
    """Counters at one moment. card: null without NVML; each of its fields may be null. See hardware.sampler."""

    type: ClassVar[str] = "sample"
    card: Json | None
    host: Json


@dataclass(frozen=True, slots=True)
class MemoryEvent(Event):
    """The CUDA allocator. growth_bytes: peak within a step above what lives between steps (measured)."""

    type: ClassVar[str] = "memory"
    allocated_bytes: int
    reserved_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    growth_bytes: int | None
    retries: int
    ooms: int
    free_bytes: int | None
    total_bytes: int | None
    others_bytes: int | None


@dataclass(frozen=True, slots=True)
class SettingEvent(Event):
    """One setting of the configuration, and whether it took effect; the newest of a name counts.

    name: as in the configuration ("loader.workers"). requested, applied: values in words ("4", "auto", "bf16").
    in_effect: null when there was nothing to verify (left at its default). verified: how it was verified, or why
    it is not in effect. A setting that is not in effect counts as a warning.
    """

    type: ClassVar[str] = "setting"
    name: str
    requested: str
    applied: str
    in_effect: bool | None
    verified: str = ""
    step: int = 0


@dataclass(frozen=True, slots=True)
class WorkEvent(Event):
    """What one optimizer step computes and moves, counted once, and the published peak of the card.

    flops_*: floating-point operations, a multiply-add is two; flops_forward is the forward's (and the loss's) part.
    bytes_per_step: what the operations read and write without any fusion, an upper bound of memory traffic.
    peak_tflops: dense, 10^12 operations a second in peak_kind ("bf16", "fp16", "tf32", "fp32"); bandwidth_gb_s:
    10^9 bytes a second; both null with the reason when the card has no published figures. attention: back ends
    seen ("flash", "math"). dtypes: FLOPs of one micro-batch by the type of their result ("bfloat16"). uncounted:
    operations that may compute much and have no formula. method: how it was counted.
    """

    type: ClassVar[str] = "work"
    flops_per_step: int | None
    bytes_per_step: int | None
    flops_forward: int | None = None
    parameters: int = 0
    micro: int = 0
    accumulation: int = 1
    precision: str = ""
    peak_tflops: float | None = None
    peak_kind: str | None = None
    bandwidth_gb_s: float | None = None
    peak_source: str | None = None
    reason: str = ""
    attention: list[str] = field(default_factory=list)
    dtypes: dict[str, int] = field(default_factory=dict)
    uncounted: list[str] = field(default_factory=list)
    method: str = ""


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


@dataclass(frozen=True, slots=True)
class MarkEvent(Event):
    """Something that happened.

    kind: epoch, evaluation, checkpoint, compile, recompile, pause, resume, warning, choice, note, status.
    text is for people; data holds the figures: an evaluation's {"metrics", "seconds", …}, a checkpoint's {"file",
    "bytes", "seconds"}, a compilation's {"seconds", "mode"}.
    """

    type: ClassVar[str] = "mark"
    kind: str
    step: int
    text: str
    data: Json = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FoldEvent(Event):
    """The state after all events before this line; see record.state."""

    type: ClassVar[str] = "fold"
    state: Json


@dataclass(frozen=True, slots=True)
class EndEvent(Event):
    """How the run ended. status: done, stopped, failed, interrupted, terminated."""

    type: ClassVar[str] = "end"
    status: str
    reason: str
    step: int
    exit_status: int
    checkpoint: str | None = None
    data: Json = field(default_factory=dict)


EVENT_TYPES: dict[str, type[Event]] = {
    kind.type: kind
    for kind in (
        RunEvent, StageEvent, WindowEvent, SampleEvent, MemoryEvent, SettingEvent, WorkEvent, LoaderEvent,
        BaselineEvent, KernelsEvent, StacksEvent, FindingEvent, TrialEvent, MarkEvent, FoldEvent, EndEvent,
    )
}  # fmt: skip


def parse(line: bytes | str) -> tuple[float, Event] | None:
    """(unix seconds, event) of one line, or None for a torn, foreign or unknown one."""
    try:
        body = json.loads(line)
        kind = EVENT_TYPES.get(body["type"])
        return (float(body["t"]), kind.from_dict(body)) if kind is not None else None
    except (ValueError, TypeError, KeyError, UnicodeDecodeError):
        return None
