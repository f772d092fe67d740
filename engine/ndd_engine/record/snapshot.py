"""The state of a run as an immutable value, folded from its events.

The step time from the beginning on is kept in a bounded number of points.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .event import (
    BadLoss,
    Count,
    DeathEvent,
    DescriptorsEvent,
    Figure,
    LastLoss,
    OwnValues,
    Ranks,
    StallEvent,
    Status,
    Time,
)
from .events import (
    PHASES,
    BaselineEvent,
    EndEvent,
    FunctionsEvent,
    HoldersEvent,
    KernelsEvent,
    LoaderEvent,
    MarkEvent,
    MemoryEvent,
    NotFiniteEvent,
    RunEvent,
    SampleEvent,
    SettingEvent,
    StacksEvent,
    TextsEvent,
    TrialEvent,
    WindowEvent,
    WorkersEvent,
    WorkEvent,
)

# Phases that are outside of the steps.
_ASIDE = ("evaluate", "checkpoint")
_FIRST_BATCH = "data_wait/first_batch"
# Most points, and how many become one when there are so many.
MOST_POINTS, MERGED = 128, 4

# (steps until its end, nanoseconds of a step, items of a step, nanoseconds of a step by phase in the order of PHASES,
# seconds from the beginning of the first window until its end).
Point = tuple[Count, Count, Count, list[Count], Figure]


@dataclass(slots=True)
class Pace:
    """The times of the steps, by windows of about a second without evaluations, checkpoints and profiled steps.

    points: oldest first. Each is the fastest of four of the level before, those again of four, and so on: whatever
    slows down a part of the windows, such as another program, leaves no trace. levels: points of each level that are
    not merged yet. begun: seconds of the record at which the first window began.
    """

    points: list[Point] = field(default_factory=list)
    levels: list[list[Point]] = field(default_factory=list)
    begun: Figure | None = None

    def add(self, window: WindowEvent, t: float) -> None:
        """Add a window that ends at `t` seconds, unless it tells nothing of usual steps."""
        if self.begun is None:
            self.begun = t - window.wall_ns * 1e-9
        if window.profiled or not window.steps or not window.step_p50_ns:
            return
        point: Point = (
            window.step, int(window.step_p50_ns), window.items // window.steps,
            [_host_ns(window, name) // window.steps for name in PHASES], t - self.begun,
        )  # fmt: skip
        for level in self.levels:
            level.append(point)
            if len(level) < MERGED:
                return
            point = _merged(level)
            level.clear()
        self.points.append(point)
        if len(self.points) == MOST_POINTS:
            groups = range(0, MOST_POINTS, MERGED)
            self.points = [_merged(self.points[begin : begin + MERGED]) for begin in groups]
            self.levels.append([])

    def cut(self, step: int) -> None:
        """Forget what comes after a step: a resumed run repeats those steps."""
        self.points = [point for point in self.points if point[0] <= step]
        self.levels = [[point for point in level if point[0] <= step] for level in self.levels]

    def view(self) -> tuple[Point, ...]:
        """The points, including those of the highest level that are not merged yet."""
        return (*self.points, *(self.levels[-1] if self.levels else ()))


def _merged(points: list[Point]) -> Point:
    """The fastest of these points, at the step and the time of the last one."""
    _, step_ns, items, phases, _ = min(points, key=lambda point: point[1])
    return points[-1][0], step_ns, items, phases, points[-1][4]


def _host_ns(window: WindowEvent, phase: str) -> int:
    if phase in _ASIDE or phase not in window.phases:
        return 0
    first = window.phases.get(_FIRST_BATCH, {}) if phase == "data_wait" else {}
    return max(int(window.phases[phase]["host_ns"]) - int(first.get("host_ns", 0)), 0)


# "lost": the process is gone without an end event (kill -9, power failure).
STATUSES = (
    "preparing", "training", "evaluating", "checkpointing", "paused", "stopping",
    "done", "stopped", "failed", "interrupted", "terminated", "lost",
)  # fmt: skip
FINAL = frozenset(STATUSES[6:])


@dataclass(frozen=True, slots=True)
class PhaseShare:
    """A phase over the recent windows: nanoseconds per optimizer step, and its share of wall time (0..1).

    p50_ns, p95_ns: medians of those of the windows, weighted by their steps; max_ns: the largest. device_ns: None
    without a device clock. share_error: standard error of the share, None with fewer than three windows.
    """

    name: str
    host_ns: float
    share: float
    p50_ns: int | None
    p95_ns: int | None
    max_ns: int | None
    device_ns: float | None
    share_error: float | None = None


@dataclass(slots=True)
class Totals:
    """Sums since the start or resume of the run without pauses and profiler captures, by the host clock.

    windows: number of windows with steps. phases: name -> nanoseconds, including sub-phases. gc_ns: None if garbage
    collections are not measured; gc_max_ns: the longest. evaluations, checkpoints, recompiles: number done. compile_ns,
    recompile_ns: time of torch's compiler, and the part of it that compiled a function again. kept_steps: the most
    steps whose autograd graphs existed at a time. passes: over the training data, that began after the first one.
    received: see WindowEvent.
    """

    wall_ns: Count = 0
    steps: Count = 0
    windows: Count = 0
    phases: dict[str, Count] = field(default_factory=dict)
    gc_ns: Count | None = None
    gc_count: Count = 0
    gc_max_ns: Count = 0
    evaluations: Count = 0
    checkpoints: Count = 0
    recompiles: Count = 0
    compile_ns: Count = 0
    recompile_ns: Count = 0
    kept_steps: Count = 0
    passes: Count = 0
    received: dict[str, Count] = field(default_factory=dict)

    def share(self, phase: str) -> float:
        """Share of a phase in wall time, 0..1."""
        return self.phases.get(phase, 0) / self.wall_ns if self.wall_ns else 0.0


@dataclass(slots=True)
class NotFinite:
    """Of updates and losses since the start or resume of the run.

    skipped: updates that a gradient scaler left out, of so many updates; begun: the first step with one. since: the
    first step of those that were skipped last, if the newest update was. loss: see WindowEvent.bad_loss, now. origin:
    the first thing that was not finite, as far as it is known. scales: of the gradients, the first and the lowest one.
    left_out: about so many batches were computed, and have no backward pass; left_out_since: the first step of the
    first window with one.
    """

    skipped: Count = 0
    updates: Count = 0
    begun: Count | None = None
    since: Count | None = None
    loss: BadLoss | None = None
    origin: NotFiniteEvent | None = None
    scales: tuple[Figure, Figure] | None = None
    left_out: Figure = 0.0
    left_out_since: Count | None = None


# From this utilization on all cores count as in use.
FULL = 0.9
# Minimum cores used by other processes that are identified, and by those that are not (in other containers).
OTHERS, UNNAMED = 0.3, 0.6
# Minimum samples to judge by.
LEAST_SAMPLES = 3
# From this share of the wanted cores on, a process counts as getting them.
SERVED = 0.97


@dataclass(frozen=True, slots=True)
class CoreUse:
    """Mean CPU use over the newest samples, in cores.

    used: all processes; by_run: this run with its loader workers and its ranks here; others: other processes (at
    least 0); usable: cores available to this run. samples: their number. neighbours: the busiest other processes, (pid,
    name, cores) each, () if unknown. stoppable: ids of those that belong to this user and are no system processes.
    throttled: share of time throttled by the cgroup quota, None if unknown.
    """

    used: float
    by_run: float
    others: float
    usable: float
    samples: int
    neighbours: tuple[tuple[int, str, float], ...] = ()
    throttled: float | None = None
    stoppable: tuple[int, ...] = ()

    @property
    def full(self) -> bool:
        """Whether all cores are in use."""
        return self.by_run + self.others >= FULL * self.usable

    @property
    def shared(self) -> bool:
        """Whether other processes are known to use the cores."""
        least = OTHERS if self.neighbours else UNNAMED
        return self.samples >= LEAST_SAMPLES and self.others >= least

    def lacks(self, wanted: float) -> bool:
        """Whether this run gets fewer than `wanted` cores, or than all usable ones."""
        return self.by_run < SERVED * min(wanted, self.usable)


@dataclass(frozen=True, slots=True)
class Idle:
    """Share of wall time in which nothing is computed (0..1).

    method: "kernels" (profiler capture, exact), "events" or "nvml"; on the CPU "operators" (profiler capture) or
    "host". causes: (cause, share) in display order; they add up to `share`; () with method "nvml". reason: why the
    share is unknown or a lower bound. step: optimizer step of the profiler capture, else None.
    """

    share: float | None
    method: str
    causes: tuple[tuple[str, float], ...]
    reason: str = ""
    step: int | None = None


@dataclass(frozen=True, slots=True)
class Headroom:
    """Memory of the device. fits_micro: largest micro-batch predicted to fit, or None if unknown."""

    free_bytes: int | None
    total_bytes: int | None
    used_bytes: int | None
    others_bytes: int | None
    peak_bytes: int | None
    fits_micro: int | None
    kind: str  # "gpu" or "host"


@dataclass(frozen=True, slots=True)
class Evaluation:
    """An evaluation: optimizer step, metrics by name, duration in seconds."""

    step: Count
    metrics: OwnValues
    seconds: Figure | None


@dataclass(frozen=True, slots=True)
class TimedMark:
    """A mark with its Unix time in seconds."""

    t: Time
    mark: MarkEvent


@dataclass(frozen=True, slots=True)
class TimeLeft:
    """Estimated remaining time without pauses; see figures.time_left.

    seconds: None before the first steps, and if the length of the run is unknown. evaluations, checkpoints: number
    remaining; *_s: mean measured seconds of one, None if none was measured (`seconds` then does not include them).
    """

    seconds: float | None = None
    evaluations: int = 0
    evaluation_s: float | None = None
    checkpoints: int = 0
    checkpoint_s: float | None = None

    @property
    def without(self) -> tuple[str, ...]:
        """What `seconds` does not include because none was measured yet."""
        missing = (
            ("evaluations", self.evaluations, self.evaluation_s),
            ("checkpoints", self.checkpoints, self.checkpoint_s),
        )
        return tuple(name for name, count, mean in missing if count and mean is None)


@dataclass(frozen=True, slots=True)
class Throughput:
    """Achieved throughput relative to the published dense peak of the GPU.

    flops_per_s: counted FLOPs over measured time. mfu: model FLOPs utilization (0..1). intensity: FLOPs per byte
    without fusion (lower bound). ridge: intensity above which the GPU is compute-bound. reason: why mfu and ridge are
    missing.
    """

    flops_per_s: float | None = None
    peak_flops_per_s: float | None = None
    peak_kind: str | None = None
    mfu: float | None = None
    intensity: float | None = None
    ridge: float | None = None
    reason: str = "not counted yet"

    @property
    def side(self) -> str | None:
        """The bound by the roofline model: "compute" or "bandwidth"; None if unknown."""
        if self.intensity is None or self.ridge is None:
            return None
        return "compute" if self.intensity >= self.ridge else "bandwidth"


# A value at optimizer steps: (step, value).
Curve = tuple[tuple[int, float], ...]


@dataclass(slots=True, kw_only=True)
class Facts:
    """What a state of a run and a Snapshot share. None is unknown; the newest event of a type has its name.

    step: optimizer step; warnings: number of all so far. best: the best evaluation, by the metric that decides.
    first_functions: of the first profiled step since the start or resume. looked: the newest look at what is kept;
    holders: the newest one that was compared with one before; collected: that within an evaluation.
    stall: as long as it lasts. deaths: the first ones.
    """

    run: RunEvent | None = None
    status: Status = "preparing"
    stage: str = ""
    end: EndEvent | None = None
    started_t: Time | None = None
    preparing_t: Time | None = None
    t: Time | None = None
    step: Count = 0
    epoch: Count = 0
    items: Count = 0
    tokens: Count = 0
    loss: Figure | None = None
    last_loss: LastLoss | None = None
    lr: Figure | None = None
    grad_norm: Figure | None = None
    loss_scale: Figure | None = None
    evaluations: tuple[Evaluation, ...] = ()
    best: Evaluation | None = None
    checkpoint: TimedMark | None = None
    sample: SampleEvent | None = None
    memory: MemoryEvent | None = None
    marks: tuple[TimedMark, ...] = ()
    warnings: Count = 0
    settings: tuple[SettingEvent, ...] = ()
    texts: TextsEvent | None = None
    work: WorkEvent | None = None
    totals: Totals = field(default_factory=Totals)
    not_finite: NotFinite = field(default_factory=NotFinite)
    loader: LoaderEvent | None = None
    baseline: BaselineEvent | None = None
    kernels: KernelsEvent | None = None
    stacks: StacksEvent | None = None
    functions: FunctionsEvent | None = None
    # The newest profile of an evaluation and of a checkpoint, by phase.
    asides: dict[str, FunctionsEvent] = field(default_factory=dict)
    first_functions: FunctionsEvent | None = None
    looked: HoldersEvent | None = None
    holders: HoldersEvent | None = None
    collected: HoldersEvent | None = None
    trials: tuple[TrialEvent, ...] = ()
    stall: StallEvent | None = None
    deaths: tuple[DeathEvent, ...] = ()
    descriptors: DescriptorsEvent | None = None
    workers: WorkersEvent | None = None


@dataclass(slots=True, kw_only=True)
class Snapshot(Facts):
    """A run at one moment; nothing changes it. Rates are per second of training time without pauses; None is unknown.

    micro_steps: forward and backward passes per step; step_ns: nanoseconds per step. memory_trend: bytes of allocated
    GPU memory, or of resident memory on the CPU. heap_trend: of the heap, which falls when something is freed;
    heap_free_trend: free in it, and not returned to the system. gap_trend: of GPU memory that is reserved beyond the
    most that was in use.
    aside_bytes: by "evaluate" and "checkpoint", by how much their memory exceeded that of training at most, and what
    that was.
    resident_trend: of resident memory, also of a run on a GPU. workers_trend: private bytes of all loader workers,
    workers_shared_trend: what they still share with the process that forked them. pace: of the steps since the start or
    resume. scalars: (name, trend) of what the user's own training code logged; texts: its newest samples. ranks: of a
    run with several, whose phases are then means over the ranks without their waiting, with "exchange" and "skew" as
    phases of their own. usual_clock_mhz: of the busy GPU in the first minutes.
    """

    reason: str
    step_ns: float | None
    steps_per_s: float | None
    items_per_s: float | None
    tokens_per_s: float | None
    micro_steps: float | None = None
    left: TimeLeft
    elapsed_s: float
    phases: tuple[PhaseShare, ...]
    idle: Idle
    headroom: Headroom
    loss_trend: Curve
    rate_trend: Curve
    memory_trend: Curve = ()
    heap_trend: Curve = ()
    heap_free_trend: Curve = ()
    gap_trend: Curve = ()
    pace: tuple[Point, ...] = ()
    aside_bytes: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    resident_trend: Curve = ()
    workers_trend: Curve = ()
    workers_shared_trend: Curve = ()
    descriptor_trend: Curve = ()
    scalars: tuple[tuple[str, Curve], ...] = ()
    throughput: Throughput = Throughput()
    cores: CoreUse | None = None
    usual_clock_mhz: int | None = None
    ranks: Ranks | None = None
    dropped_events: int = 0

    @property
    def final(self) -> bool:
        """Whether the run has ended."""
        return self.status in FINAL

    @property
    def epoch_s(self) -> float | None:
        """Seconds per epoch at the measured step time, without evaluations and checkpoints."""
        if self.run is None or self.step_ns is None or not self.run.steps_per_epoch:
            return None
        return self.run.steps_per_epoch * self.step_ns * 1e-9

    @property
    def progress(self) -> float:
        """Completed share of the run, 0..1."""
        total = self.run.total_steps if self.run else 0
        return min(self.step / total, 1.0) if total else 0.0

    @property
    def gpu(self) -> dict[str, Any] | None:
        """The newest GPU counters, or None."""
        return self.sample.gpu if self.sample else None

    @property
    def host(self) -> dict[str, Any] | None:
        """The newest host counters, or None."""
        return self.sample.host if self.sample else None
