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
from dataclasses import dataclass, field
from typing import ClassVar

from .event import Event, Json, finite
from .evidence import BaselineEvent, FindingEvent, KernelsEvent, LoaderEvent, StacksEvent, TrialEvent

__all__ = [
    "EVENT_TYPES", "PHASES", "BaselineEvent", "EndEvent", "Event", "FindingEvent", "FoldEvent", "Json", "KernelsEvent",
    "LoaderEvent", "MarkEvent", "MemoryEvent", "RunEvent", "SampleEvent", "SettingEvent", "StacksEvent", "StageEvent",
    "TrialEvent", "WindowEvent", "WorkEvent", "finite", "parse",
]  # fmt: skip

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
    """The state after all events before this line; see record.fold."""

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
