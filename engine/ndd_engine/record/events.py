"""The events of a run, written to events.jsonl as one JSON object per line.

Every event has `v` (format version), `type` and `t` (Unix time in seconds). Field names end with their unit. A value
that could not be measured is `null`. Readers ignore unknown fields and types, and skip lines that
are incomplete or have a value of another type than declared.

    run      the run, its configuration and machine; the first event, repeated on resume with `resumed_step`
    stage    a stage of the preparation, such as importing torch
    window   a group of consecutive steps: wall time, phases, loss, throughput
    rank     what one rank did in the steps of a window, in its own record
    ranks    what all ranks of a run with several did in the same steps
    sample   counters of the GPU and the host
    memory   counters of the CUDA allocator
    setting  one setting: requested value, applied value, and whether it is in effect
    work     FLOPs and bytes of one optimizer step, and the published peak of the GPU
    loader   cost of making a micro-batch, measured before training
    baseline time of one micro-batch, measured before training
    kernels  a profiler capture
    stacks   stack samples of the training thread of a script, and of runs before 0.6
    functions  the user's own functions in one step under Python's profiler
    finding  a finding appeared or disappeared
    trial    a candidate configuration was measured against a baseline
    scalars  scalars that the user's own training code logged
    texts    samples of an evaluation, as text
    mark     an occurrence: epoch, evaluation, checkpoint, compile, pause, warning, choice
    fold     the accumulated state, written regularly so that long records open fast
    end      the end of the run
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from .event import Event, Json, finite
from .evidence import (
    BaselineEvent,
    FindingEvent,
    FunctionsEvent,
    KernelsEvent,
    LoaderEvent,
    StacksEvent,
    TrialEvent,
)
from .parts import Configuration, Ended, Gpu, GpuCounters, HostCounters, MarkData, PhaseTimes, State
from .ranks import RankEvent, RanksEvent
from .shape import Time, check_of

__all__ = [
    "EVENT_TYPES", "PHASES", "BaselineEvent", "EndEvent", "Event", "FindingEvent", "FoldEvent",
    "FunctionsEvent", "Json", "KernelsEvent", "LoaderEvent", "MarkEvent", "MemoryEvent", "RankEvent", "RanksEvent",
    "RunEvent", "SampleEvent", "ScalarsEvent", "SettingEvent", "StacksEvent", "StageEvent", "TextsEvent", "TrialEvent",
    "WindowEvent", "WorkEvent", "decode", "decoded", "finite", "parse",
]  # fmt: skip

# Phases of a step in display order; `other` is the wall time outside the other phases.
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

    config: the resolved configuration. device: "cpu" or "cuda:N". gpu: the GPU, see hardware.gpu.Gpu.to_dict; null
    without one. versions: package -> version. parameters: number of model parameters. precision: "fp32", "tf32",
    "bf16" or "fp16". item, token: names of the workload's units ("window", "character"); token may be null and
    tokens_per_item 0. items_per_step: effective batch size. items_per_epoch, steps_per_epoch: of the training set,
    0 if unknown. epochs, total_steps: epochs and optimizer steps at which the run ends, 0 if unknown. model, data:
    descriptions. threads: CPU threads. usable_cores: CPU cores available to the process (affinity and cgroup
    quota). resumed_step, resumed_from: step and checkpoint file of a resume, else null; resumed_epoch: the epochs
    done then, if they do not follow from the step.
    """

    type: ClassVar[str] = "run"
    name: str
    workload: str
    config: Configuration
    pid: int
    host: str
    device: str
    device_name: str
    gpu: Gpu | None
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
    resumed_epoch: int | None = None


@dataclass(frozen=True, slots=True)
class StageEvent(Event):
    """A stage of the preparation before the first step.

    name: "prepare", or "resume" at the start of a resumed run. text: what is being done, such as "importing torch".
    """

    type: ClassVar[str] = "stage"
    name: str
    text: str


@dataclass(frozen=True, slots=True)
class WindowEvent(Event):
    """A group of consecutive steps.

    step, epoch, epoch_step: position at the end of the window, in optimizer steps. steps, micro_steps, items, tokens:
    processed in this window; steps is 0 in a window that contains only an evaluation or a checkpoint. wall_ns: wall
    time; the phases without "/" in their name add up to it. step_p50_ns, step_p95_ns, step_max_ns: time of an
    optimizer step. phases: {phase: {"host_ns": total in this window; "p50_ns", "p95_ns", "max_ns": per step;
    "device_ns": mean per step by CUDA events, of evaluations the total in this window, or null}}; "forward/encoder" is
    a sub-phase of "forward". loss: mean of the losses read back in this window, or null; last_loss: [step, loss] of the
    last one. lr, grad_norm, loss_scale: latest values. device_steps: steps timed on the device. gc_ns, gc_count,
    gc_max_ns: total, number and longest of Python's garbage collections (part of the phases). profiled: true if a
    profiler capture ran or a step was profiled; such windows are not used for rates. heap_bytes: in use by the heap of
    the process, with the tensors of the CPU, at the end of the window.
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
    phases: dict[str, PhaseTimes]
    loss: float | None = None
    last_loss: Annotated[tuple[int, float] | None, tuple[int, float | None] | None] = None
    lr: float | None = None
    grad_norm: float | None = None
    loss_scale: float | None = None
    device_steps: int = 0
    gc_ns: int | None = None
    gc_count: int | None = None
    gc_max_ns: int | None = None
    profiled: bool = False
    heap_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class SampleEvent(Event):
    """Counters at one moment. gpu: GPU counters, null without NVML. host: host counters. Each value may be null.

    See hardware.sampler.Sampler for the counters and their units.
    """

    type: ClassVar[str] = "sample"
    gpu: GpuCounters | None
    host: HostCounters


@dataclass(frozen=True, slots=True)
class MemoryEvent(Event):
    """Counters of the CUDA caching allocator of this process, and the memory of the GPU.

    allocated_bytes, reserved_bytes: current; peak_*: maximum so far. growth_bytes: peak within a step minus the
    memory allocated between steps. retries: allocations that freed the cache and retried. ooms: out-of-memory errors.
    free_bytes, total_bytes: memory of the GPU. others_bytes: memory used by other processes.
    """

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
    """A setting and whether it is in effect; the newest event of a name is valid.

    name: dotted key ("loader.workers"). requested, applied: values as text ("4", "auto", "bf16"). in_effect: null if
    there is nothing to verify (default value); false is shown as a warning. verified: how it was verified, or why it
    is not in effect. step: optimizer steps done.
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
    """FLOPs and memory traffic of one optimizer step, counted once, and the published peak of the GPU.

    flops_per_step: floating-point operations (a multiply-add is two); flops_forward: those of forward and loss.
    bytes_per_step: bytes that the operators read and write without fusion (upper bound of the memory traffic).
    parameters, micro, accumulation, precision: of the run. peak_tflops: dense peak in 10^12 operations per second for
    peak_kind ("bf16", "fp16", "tf32", "fp32"); bandwidth_gb_s: 10^9 bytes per second; both null if the GPU has no
    published figures, see reason. peak_source: where the figures were published. attention: attention backends in use
    ("flash", "math"). dtypes: result dtype -> FLOPs of a micro-batch. uncounted: operators without a FLOP formula.
    method: how the FLOPs were counted.
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
class ScalarsEvent(Event):
    """Scalars that the user's own training code logged since the last window.

    step: optimizer steps done. values: the mean of the values of each name; null if it is not finite.
    """

    type: ClassVar[str] = "scalars"
    step: int
    values: Annotated[dict[str, float], dict[str, float | None]]


@dataclass(frozen=True, slots=True)
class TextsEvent(Event):
    """Samples of an evaluation that the user's own training code returned.

    step: optimizer steps done. texts: one per sample; control characters other than line breaks are escaped.
    """

    type: ClassVar[str] = "texts"
    step: int
    texts: list[str]


@dataclass(frozen=True, slots=True)
class MarkEvent(Event):
    """An occurrence during the run.

    kind: epoch, evaluation, checkpoint, compile, recompile, pause, resume, warning, choice, note or status. step:
    optimizer steps done. text: for display. data: figures, such as {"metrics", "seconds", …} of an evaluation,
    {"file", "bytes", "seconds"} of a checkpoint and {"seconds", "mode"} of a compilation.
    """

    type: ClassVar[str] = "mark"
    kind: str
    step: int
    text: str
    data: MarkData = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FoldEvent(Event):
    """The accumulated state after all previous events; see record.fold."""

    type: ClassVar[str] = "fold"
    state: State


@dataclass(frozen=True, slots=True)
class EndEvent(Event):
    """The end of the run.

    status: done, stopped, failed, interrupted or terminated. reason: explanation. step: optimizer steps done.
    exit_status: of the process. checkpoint: file name of the last checkpoint, or null. data: further figures.
    """

    type: ClassVar[str] = "end"
    status: Annotated[str, Ended]
    reason: str
    step: int
    exit_status: int
    checkpoint: str | None = None
    data: Json = field(default_factory=dict)


EVENT_TYPES: dict[str, type[Event]] = {
    kind.type: kind
    for kind in (
        RunEvent, StageEvent, WindowEvent, RankEvent, RanksEvent, SampleEvent, MemoryEvent, SettingEvent, WorkEvent,
        LoaderEvent, BaselineEvent, KernelsEvent, StacksEvent, FunctionsEvent, FindingEvent, TrialEvent, ScalarsEvent,
        TextsEvent, MarkEvent, FoldEvent, EndEvent,
    )
}  # fmt: skip


_IS_TIME = check_of(Time)
# NaN and infinities are null, as when they are written.
_DECODER = json.JSONDecoder(parse_constant=lambda _: None)


def decode(line: bytes | str) -> tuple[float, Event] | None:
    """(Unix time in seconds, event) of one line; None for an unknown type.

    Raises ValueError if the line is incomplete, or if a value does not have the declared type.
    """
    text = line if isinstance(line, str) else line.decode()
    try:
        body = _DECODER.decode(text)
    except RecursionError:
        raise ValueError("nested too deep") from None
    return decoded(body)


def decoded(body: Any) -> tuple[float, Event] | None:
    """As `decode`, of a line that was parsed."""
    if body.__class__ is not dict or (name := body.get("type")).__class__ is not str:
        raise ValueError("not an event")
    if (kind := EVENT_TYPES.get(name)) is None:
        return None
    t: Any = body.get("t")
    if not _IS_TIME(t):
        raise ValueError("not a time")
    return float(t), kind.from_dict(body)


def parse(line: bytes | str) -> tuple[float, Event] | None:
    """As `decode`; None for a line that cannot be decoded, too."""
    try:
        return decode(line)
    except ValueError:
        return None
