"""The events of a run, written to events.jsonl as one JSON object per line.

Every event has `v` (format version), `type` and `t` (Unix time in seconds). Field names end with their unit. A value
that could not be measured is `null`. Readers ignore unknown fields and types, and skip lines that are incomplete or
have a value of another type than declared. A record of another version is refused.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal

from pydantic import TypeAdapter
from pydantic_core import from_json

from ndd_watch.mapped import PHASES as PHASES

from .event import (
    VERSION,
    AnyTable,
    BadLoss,
    Configuration,
    Count,
    Figure,
    Final,
    Flag,
    Gpu,
    GpuCounters,
    HostCounters,
    LastLoss,
    MarkData,
    MeasuredChange,
    OwnValues,
    PhaseTimes,
    Place,
    Side,
    ThreadTime,
    Time,
)
from .event import DeathEvent as DeathEvent
from .event import DescriptorsEvent as DescriptorsEvent
from .event import Event as Event
from .event import Holder as Holder
from .event import HoldersEvent as HoldersEvent
from .event import Json as Json
from .event import RankEvent as RankEvent
from .event import RanksEvent as RanksEvent
from .event import StallEvent as StallEvent
from .event import writable as writable
from .profile_events import FunctionsEvent as FunctionsEvent
from .profile_events import KernelsEvent as KernelsEvent
from .profile_events import StacksEvent as StacksEvent
from .worker_events import WorkersEvent as WorkersEvent


@dataclass(frozen=True, slots=True)
class RunEvent(Event):
    """Identity of a run.

    config: the resolved configuration. device: "cpu" or "cuda:N". gpu: the GPU, see hardware.gpu.Gpu.to_dict; null
    without one. versions: package -> version. parameters: number of model parameters. precision: "fp32", "tf32",
    "bf16" or "fp16". item, token: names of the workload's units ("window", "character"); token may be null and
    tokens_per_item 0. items_per_step: effective batch size. items_per_epoch, steps_per_epoch: of the training set,
    0 if unknown. epochs, total_steps: epochs and optimizer steps at which the run ends, 0 if unknown. model, data:
    descriptions. threads: CPU threads. usable_cores: CPU cores available to the process (affinity and cgroup
    quota). resumed_step, resumed_from: step and checkpoint of a resume, else null; resumed_epoch: the epochs
    done then, if they do not follow from the step. alternatives: cause of a finding -> [setting, what it does] that
    the factory offers against it.
    """

    type: ClassVar[str] = "run"
    name: str
    workload: str
    config: Configuration
    pid: Count
    host: str
    device: str
    device_name: str
    gpu: Gpu | None
    versions: dict[str, str]
    parameters: Count
    precision: str
    item: str
    token: str | None
    tokens_per_item: Figure
    items_per_step: Count
    items_per_epoch: Count
    steps_per_epoch: Count
    epochs: Count
    total_steps: Count
    model: str
    data: str
    threads: Count | None = None
    usable_cores: Figure | None = None
    resumed_step: Count | None = None
    resumed_from: str | None = None
    resumed_epoch: Count | None = None
    alternatives: dict[str, tuple[str, str]] = field(default_factory=dict)


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
    last one; milestone_losses: the same at steps at which each run of a script reads its loss. lr, grad_norm,
    loss_scale: latest values. device_steps: steps timed on the device. gc_ns, gc_count, gc_max_ns: total, number and
    longest of Python's garbage collections (part of the phases). profiled: true if a profiler capture ran or a step was
    profiled; such windows are not used for rates. heap_bytes: in use by the heap of the process, with the tensors of
    the CPU, at the end of the window. heap_free_bytes: free in it then, which the C library has not returned to the
    system. kept_steps: earlier steps whose autograd graphs still exist then. passes: over the training data, that began
    in it; the first pass of the run is not counted. timed_steps: steps that were timed by phase; the others were timed
    as a whole.
    skipped: updates that a gradient scaler left out in this window, since gradients were not finite; not those of the
    first steps, in which its scale settles. first_skipped: steps before the first of them, where it is known.
    skipping_since: if the last updates of the window were skipped, the steps before the first of them. bad_loss: if
    its last losses are not finite, ["NaN" or "infinite", steps before the first loss that was seen so; of the finite
    ones before: steps before the last one, its value, and the lowest value; or null]. evaluations, checkpoints: of a
    script, after steps of this window; those of other runs are marks. received: the number ("batches") of those that
    came from loader workers, in steps timed by phase, and sums over them. They are "behind_ns", waiting while a later
    batch was ready, "receive_ns", making their tensors, and "pin_ns", pinning them in a thread of its own.
    left_out: batches of a script that went through the model with gradients, and have no
    backward pass; of the steps that were timed by phase.
    """

    type: ClassVar[str] = "window"
    step: Count
    epoch: Count
    epoch_step: Count
    steps: Count
    micro_steps: Count
    items: Count
    tokens: Count
    wall_ns: Count
    step_p50_ns: Count | None
    step_p95_ns: Count | None
    step_max_ns: Count | None
    phases: dict[str, PhaseTimes]
    loss: Figure | None = None
    last_loss: LastLoss | None = None
    milestone_losses: tuple[LastLoss, ...] = ()
    lr: Figure | None = None
    grad_norm: Figure | None = None
    loss_scale: Figure | None = None
    device_steps: Count = 0
    gc_ns: Count | None = None
    gc_count: Count | None = None
    gc_max_ns: Count | None = None
    profiled: Flag = False
    heap_bytes: Count | None = None
    heap_free_bytes: Count | None = None
    kept_steps: Count = 0
    passes: Count = 0
    timed_steps: Count = 0
    skipped: Count = 0
    first_skipped: Count | None = None
    skipping_since: Count | None = None
    bad_loss: BadLoss | None = None
    evaluations: Count = 0
    checkpoints: Count = 0
    received: dict[str, Count] = field(default_factory=dict)
    left_out: Count = 0


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
    allocated_bytes: Count
    reserved_bytes: Count
    peak_allocated_bytes: Count
    peak_reserved_bytes: Count
    growth_bytes: Count | None
    retries: Count
    ooms: Count
    free_bytes: Count | None
    total_bytes: Count | None
    others_bytes: Count | None


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
    in_effect: Flag | None
    verified: str = ""
    step: Count = 0


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
    flops_per_step: Count | None
    bytes_per_step: Count | None
    flops_forward: Count | None = None
    parameters: Count = 0
    micro: Count = 0
    accumulation: Count = 1
    precision: str = ""
    peak_tflops: Figure | None = None
    peak_kind: str | None = None
    bandwidth_gb_s: Figure | None = None
    peak_source: str | None = None
    reason: str = ""
    attention: list[str] = field(default_factory=list)
    dtypes: dict[str, Count] = field(default_factory=dict)
    uncounted: list[str] = field(default_factory=list)
    method: str = ""


@dataclass(frozen=True, slots=True)
class LoaderEvent(Event):
    """The training data and the cost of making a micro-batch in the training process, measured before training.

    items: number of items; 0 if it is unknown. micro: items of a micro-batch. in_memory: tensors in memory, one
    gather operation makes a batch. encoded: number of items that are encoded once and cached, or null.
    epochs_differ: items change every epoch and cannot be cached. batch_bytes: size of a micro-batch. item_ns,
    item_cpu_ns: wall and CPU time of making an item, mean of `probed` items. item_delay_ns: the part of item_ns in
    which the thread could run but other threads or processes used the cores, null if the system does not report it;
    item_ns without both is time waiting for storage or network. collate_ns: joining the items of a micro-batch.
    gather_ns: making a micro-batch in one gather operation. Times that were not measured or do not apply are null.
    stream: the items come from an IterableDataset, so they have no index and cannot be cached.
    """

    type: ClassVar[str] = "loader"
    items: Count
    micro: Count
    in_memory: Flag
    encoded: Count | None
    epochs_differ: Flag
    batch_bytes: Count | None = None
    item_ns: Figure | None = None
    item_cpu_ns: Figure | None = None
    collate_ns: Figure | None = None
    gather_ns: Figure | None = None
    probed: Count = 0
    item_delay_ns: Figure | None = None
    stream: Flag = False


@dataclass(frozen=True, slots=True)
class BaselineEvent(Event):
    """Time of forward and backward of one micro-batch before training, without loader workers.

    micro: items. micro_ns: the fastest of `runs` repetitions. other_micro, other_ns: the same for another micro-batch
    size, to determine the fixed overhead. threads: CPU threads of the run. by_threads: [[threads, nanoseconds], …]
    for other thread counts (CPU only). operations: operators of one forward and backward pass.
    """

    type: ClassVar[str] = "baseline"
    micro: Count
    micro_ns: Figure
    runs: Count
    other_micro: Count | None = None
    other_ns: Figure | None = None
    threads: Count | None = None
    by_threads: list[ThreadTime] = field(default_factory=list)
    operations: Count | None = None


@dataclass(frozen=True, slots=True)
class NotFiniteEvent(Event):
    """What was not finite first in a step that was looked at closely, since its loss or gradients were not finite.

    step: optimizer steps before it. what: "input" (of the model, or of the loss), "output" (of a module), "before"
    (computed between modules, and given to this one), "function" (what it returns), "loss", "gradient" or "parameter".
    What an output or a function was computed from is finite. A parameter was damaged earlier. "" is a step in which
    everything was finite. name: of the argument or variable, the module, the function or the parameter. kind: class
    of the module. nan: whether there is NaN. infinite: whether there are infinite values. share: of the values. axis:
    "column", "channel" or "item", if only some positions of it are affected; else "". at: the first few of these
    positions. places: their number. size: the number of all positions. largest: magnitude of what a module or a
    function has received. count: number of parameters or gradients that are not finite. of: number of all of them.
    file: of the user's code. line: in that file. function: that the line is in. made: [file, line, function] of the
    user's function that returned such data first.
    """

    type: ClassVar[str] = "not_finite"
    step: Count
    what: str = ""
    name: str = ""
    kind: str = ""
    nan: Flag = False
    infinite: Flag = False
    share: Figure = 0.0
    axis: str = ""
    at: list[Count] = field(default_factory=list)
    places: Count = 0
    size: Count = 0
    largest: Figure = 0.0
    count: Count = 0
    of: Count = 0
    file: str = ""
    line: Count = 0
    function: str = ""
    made: Place | None = None


Confidence = Literal["certain", "likely", "possible"]


@dataclass(frozen=True, slots=True)
class Evidence:
    """One measurement: a sentence with figures and units, and where it comes from ("host clock", "NVML")."""

    text: str
    source: str


@dataclass(frozen=True, slots=True)
class Change:
    """A change to try.

    sets: configuration edits ("loader.workers=2"); () for a code change. where: "file.py:12 in load" from a
    profiled step; None if unknown. measured: by its newest trial against this run; null without one.
    """

    text: str
    sets: tuple[str, ...] = ()
    where: str | None = None
    measured: MeasuredChange | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """A bottleneck or a hazard of a run.

    title: one line, "input-bound: 57 % of each step is spent waiting for the loader". share: upper bound of the
    fraction of wall time it costs (0..1). ceiling: maximum speedup from removing it (1.42 is "at most 1.42x"); None if
    it does not affect speed or cannot be bounded. Both are figures of the same cost: ceiling = 1 / (1 - share).
    leave: why the change is not worthwhile, or "". from_steps: the change breaks even only in a run of this many steps
    and more, which this run does not have; None if it has them.
    """

    cause: str
    title: str
    evidence: tuple[Evidence, ...]
    confidence: Confidence
    share: Figure | None = None
    ceiling: Figure | None = None
    changes: tuple[Change, ...] = ()
    leave: str = ""
    from_steps: Count | None = None

    @property
    def condition(self) -> str:
        """ "for a run of 1,200 steps and more", or ""."""
        return "" if self.from_steps is None else f"for a run of {self.from_steps:,} steps and more"

    def advice(self, change: Change) -> str:
        """The text of one of its changes, with the condition under which it is worthwhile."""
        return f"{self.condition}: {change.text}" if self.condition and change.sets else change.text

    @property
    def sets(self) -> tuple[str, ...]:
        """The edits of the first configuration change; () if there is none."""
        return next((change.sets for change in self.changes if change.sets), ())

    def to_dict(self) -> Json:
        """As JSON, for a finding event and --json."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class FindingEvent(Event):
    """A finding appeared or disappeared.

    step: optimizer steps done. cause: id such as "few-workers". text: title of the finding. gone: true if it
    disappeared. finding: its cause, title, evidence, share, ceiling and changes, or null.
    """

    type: ClassVar[str] = "finding"
    step: Count
    cause: str
    text: str
    gone: Flag = False
    finding: Finding | None = None


@dataclass(frozen=True, slots=True)
class TrialEvent(Event):
    """A candidate configuration measured against a baseline in paired ABBA blocks on one machine.

    sets: the change, "key=value" each. against: description of the baseline. verdict: "faster", "slower",
    "no difference", "inconclusive", "out of memory", "failed" or "stopped".
    reason: why it failed, was stopped or is inconclusive, or "". text: the whole result in one sentence.
    ratio: throughput (items per second) of the candidate relative to the baseline, with the confidence interval
    low..high at level `confidence`; null without a comparison. abba_blocks: number of ABBA blocks.
    pairs: number of pairs of processes that measured them, 0 if unknown or if one process measured both sides.
    method: what the interval is from. "pairs": the differences between pairs. "usual difference": few pairs, and the
    usual difference between processes. "one process": the blocks of a process that switched between both sides. "":
    nothing was compared. between: standard deviation of that usual difference, as a share, or null.
    df: degrees of freedom of the interval, or null. seconds, budget_s: duration and time budget of the trial.
    device: the device of the measurement.
    in_effect: whether the change took effect, null if unknown; not_in_effect: why it did not. loss: "same", "close",
    "differs" or "not comparable"; loss_text: how the losses were compared. break_even_steps: optimizer steps after
    which the change breaks even, null if it is not faster. base, change: measurements of baseline and candidate, see
    trial.request.SideFacts. cause: id of the finding that proposed the change, or null.
    edit: SHA-256 of the edited file of a script, if it trained in a scratch copy as the change did; "" without one.
    edit_refused: why the edit is not shown. load: that other processes left no core free while it measured on a CPU; ""
    if they did.
    """

    type: ClassVar[str] = "trial"
    sets: list[str]
    against: str
    verdict: str
    text: str
    ratio: Figure | None = None
    low: Figure | None = None
    high: Figure | None = None
    confidence: Figure = 0.95
    abba_blocks: Count = 0
    pairs: Count = 0
    method: str = ""
    between: Figure | None = None
    df: Figure | None = None
    seconds: Figure = 0.0
    budget_s: Figure = 0.0
    device: str = ""
    in_effect: Flag | None = None
    not_in_effect: str = ""
    loss: str = "not comparable"
    loss_text: str = ""
    break_even_steps: Count | None = None
    base: Side = field(default_factory=dict)
    change: Side = field(default_factory=dict)
    cause: str | None = None
    edit: str = ""
    edit_refused: str = ""
    load: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ScalarsEvent(Event):
    """Scalars that the user's own training code logged since the last window.

    step: optimizer steps done. values: the mean of the values of each name; null if it is not finite.
    """

    type: ClassVar[str] = "scalars"
    step: Count
    values: OwnValues


@dataclass(frozen=True, slots=True)
class TextsEvent(Event):
    """Samples of an evaluation that the user's own training code returned.

    step: optimizer steps done. texts: one per sample; control characters other than line breaks are escaped.
    """

    type: ClassVar[str] = "texts"
    step: Count
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
    step: Count
    text: str
    data: MarkData = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EndEvent(Event):
    """The end of the run.

    status: done, stopped, failed, interrupted or terminated. reason: explanation. step: optimizer steps done.
    exit_status: of the process. checkpoint: name of the last checkpoint, or null. data: further figures.
    """

    type: ClassVar[str] = "end"
    status: Final
    reason: str
    step: Count
    exit_status: Count
    checkpoint: str | None = None
    data: AnyTable = field(default_factory=dict)


EVENT_TYPES: dict[str, type[Event]] = {
    kind.type: kind
    for kind in (
        RunEvent, StageEvent, WindowEvent, RankEvent, RanksEvent, SampleEvent, MemoryEvent, SettingEvent, WorkEvent,
        LoaderEvent, BaselineEvent, KernelsEvent, StacksEvent, FunctionsEvent, NotFiniteEvent, HoldersEvent,
        FindingEvent, TrialEvent, ScalarsEvent, TextsEvent, StallEvent, DeathEvent, DescriptorsEvent, MarkEvent,
        WorkersEvent, EndEvent,
    )
}  # fmt: skip


_CHECKERS: dict[Any, TypeAdapter[Any]] = {}


def checker(kind: Any) -> TypeAdapter[Any]:
    """Makes a value of this type from parsed JSON, or raises ValueError that names the field; made once."""
    if (found := _CHECKERS.get(kind)) is None:
        found = _CHECKERS[kind] = TypeAdapter(kind)
    return found


def decode(line: bytes | str) -> tuple[float, Event] | None:
    """(Unix time in seconds, event) of one line; None for an unknown type.

    Raises ValueError if the line is incomplete, of another version, or has a value of another type than declared.
    """
    return decoded(from_json(line, allow_inf_nan=False))


def decoded(body: Any) -> tuple[float, Event] | None:
    """As `decode`, of a line that was parsed."""
    if not isinstance(body, dict) or not isinstance(name := body.get("type"), str):
        raise ValueError("not an event")
    if (version := body.get("v")) != VERSION:
        raise ValueError(f"an event of version {version!r}, not {VERSION}")
    if (kind := EVENT_TYPES.get(name)) is None:
        return None
    return checker(Time).validate_python(body.get("t")), checker(kind).validate_python(body)


def parse(line: bytes | str) -> tuple[float, Event] | None:
    """As `decode`; None for a line that cannot be decoded, too."""
    try:
        return decode(line)
    except ValueError:
        return None
