"""Events of the diagnosis: measurements before training, profiler captures, profiled steps, findings, trials."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from .event import Event
from .parts import Finding, Frame, Function, Kernel, LineTime, ModuleTime, Side, ThreadTime, Wait


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
    item_delay_ns: float | None = None
    stream: bool = False


@dataclass(frozen=True, slots=True)
class BaselineEvent(Event):
    """Time of forward and backward of one micro-batch before training, without loader workers.

    micro: items. micro_ns: the fastest of `runs` repetitions. other_micro, other_ns: the same for another micro-batch
    size, to determine the fixed overhead. threads: CPU threads of the run. by_threads: [[threads, nanoseconds], …]
    for other thread counts (CPU only). operations: operators of one forward and backward pass.
    """

    type: ClassVar[str] = "baseline"
    micro: int
    micro_ns: float
    runs: int
    other_micro: int | None = None
    other_ns: float | None = None
    threads: int | None = None
    by_threads: list[ThreadTime] = field(default_factory=list)
    operations: int | None = None


@dataclass(frozen=True, slots=True)
class KernelsEvent(Event):
    """A profiler capture of a few whole steps.

    method: "kernels" (kernels and copies on the GPU) or "operators" (operators on the CPU, without a GPU). step:
    optimizer steps done at its end. steps: optimizer steps captured. wall_ns: duration. busy_ns: time with at least
    one kernel or copy running. copy_ns: time with a copy from or to another memory running. idle_ns: cause -> idle
    nanoseconds; busy_ns and all causes add up to wall_ns. launches: number of kernels or top-level operators. top: the
    longest kernels or operators, [name, total nanoseconds, count] each. trace: path of the exported Chrome trace, or
    null. collective_ns: time with a collective (NCCL) running, part of busy_ns; exposed_ns: the part of it without any
    other kernel running. convolution_ns: total duration of the convolution kernels; null in records before 0.6.
    modules: forward and backward by module, [name, class, forward nanoseconds, backward nanoseconds, calls] each, the
    longest first: sums of kernels or top-level operators, each of its innermost module only. Modules of equal blocks
    are one entry ("blocks.*.attention"). [] with compiled code or a CUDA graph, and in older records. lines: the same
    by the line of the user's own code that calls a module, [file, line, function, forward nanoseconds, backward
    nanoseconds, calls of modules] each.
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
    top: list[Kernel] = field(default_factory=list)
    trace: str | None = None
    collective_ns: int = 0
    exposed_ns: int = 0
    convolution_ns: int | None = None
    modules: list[ModuleTime] = field(default_factory=list)
    lines: list[LineTime] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StacksEvent(Event):
    """Stack samples of the training thread since the previous one, of observed scripts and of runs before 0.6.

    step: optimizer steps done. looks: number of stack samples. frames: [phase, file, line, function, samples, own]
    each, the most frequent first. The phase is "?" if it is not known: in a step that was timed as a whole, at a line
    that was seen in no other step. The frame is the innermost one outside of torch, the standard library and this
    package (own 1), or the innermost one of a library if there is none (own 0).
    """

    type: ClassVar[str] = "stacks"
    step: int
    looks: int
    frames: list[Frame]


@dataclass(frozen=True, slots=True)
class FunctionsEvent(Event):
    """The functions of the user's own code in one step under Python's profiler, which sees every call.

    step: optimizer steps done. wall_ns: of the profiled step, which is slower than the others and is part of no
    statistics. functions: [file, line, name, calls, ns, own_ns, caller, phase] each, the longest first. Here, ns
    includes everything that the function calls, and own_ns leaves out torch and other functions of the user's own code.
    The caller is the one of these that calls it, or "". The phase is that of most of its time, or "" if it is unknown.
    waits: [file, line, name, method, calls, ns] of what waits for the device, such as item and float, by the
    function that calls them. phases: nanoseconds of this step by phase. Up to Python 3.11, pure Python takes longer
    under the profiler: compare a function with its phase in this event, not with usual steps.
    """

    type: ClassVar[str] = "functions"
    step: int
    wall_ns: int
    functions: list[Function]
    waits: list[Wait] = field(default_factory=list)
    phases: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FindingEvent(Event):
    """A finding appeared or disappeared.

    step: optimizer steps done. cause: id such as "few-workers". text: title of the finding. gone: true if it
    disappeared. finding: all its fields, see diagnose.finding.Finding.
    """

    type: ClassVar[str] = "finding"
    step: int
    cause: str
    text: str
    gone: bool = False
    finding: Finding = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrialEvent(Event):
    """A candidate configuration measured against a baseline in paired ABBA blocks on one machine.

    sets: the change, "key=value" each. against: description of the baseline. verdict: "faster", "slower",
    "no difference", "inconclusive", "out of memory", "failed" or "stopped".
    text: the result in one sentence. ratio: throughput (items per second) of the candidate relative to the baseline,
    with the confidence interval low..high at level `confidence`; null without a comparison. abba_blocks: number of ABBA
    blocks. pairs: number of pairs of processes that measured them, 0 if unknown or if one process measured both sides.
    method: what the interval is from. "pairs": the differences between pairs. "usual difference": few pairs, and the
    usual difference between processes. "one process": the blocks of a process that switched between both sides. "": a
    record before 0.6. between: standard deviation of that usual difference, as a share, or null.
    df: degrees of freedom of the interval, or null. seconds, budget_s: duration and time budget of the trial.
    device: the device of the measurement.
    in_effect: whether the change took effect, null if unknown; not_in_effect: why it did not. loss: "same", "close",
    "differs" or "not comparable"; loss_text: how the losses were compared. break_even_steps: optimizer steps after
    which the change breaks even, null if it is not faster. base, change: measurements of baseline and candidate, see
    trial.request.SideFacts. cause: id of the finding that proposed the change, or null.
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
    abba_blocks: int = 0
    pairs: int = 0
    method: str = ""
    between: float | None = None
    df: float | None = None
    seconds: float = 0.0
    budget_s: float = 0.0
    device: str = ""
    in_effect: bool | None = None
    not_in_effect: str = ""
    loss: str = "not comparable"
    loss_text: str = ""
    break_even_steps: int | None = None
    base: Side = field(default_factory=dict)
    change: Side = field(default_factory=dict)
    cause: str | None = None
