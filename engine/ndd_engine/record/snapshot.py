"""What anyone ever sees of a run: one frozen value, folded from events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .events import (
    BaselineEvent,
    EndEvent,
    KernelsEvent,
    LoaderEvent,
    MarkEvent,
    MemoryEvent,
    RunEvent,
    SampleEvent,
    SettingEvent,
    StacksEvent,
    TrialEvent,
    WorkEvent,
)

# "lost": the process is gone and no end was recorded (kill -9, power).
STATUSES = (
    "preparing", "training", "evaluating", "checkpointing", "paused", "stopping",
    "done", "stopped", "failed", "interrupted", "terminated", "lost",
)  # fmt: skip
FINAL = frozenset(STATUSES[6:])


@dataclass(frozen=True, slots=True)
class PhaseShare:
    """One phase over the recent windows: nanoseconds per optimizer step, and the share of wall time (0..1).

    p50/p95/max are per step in the newest window that had steps. device_ns is null where no device clock ran.
    share_error: standard error of the share over these windows, null below three of them.
    """

    name: str
    host_ns: float
    share: float
    p50_ns: int | None
    p95_ns: int | None
    max_ns: int | None
    device_ns: float | None
    share_error: float | None = None


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums since the run began or was resumed, pauses and profiler bursts left out; nanoseconds by the host clock.

    windows: those with steps. phases: by name, sub-phases too.
    gc_ns: None where collections are not watched; gc_max_ns: the longest pause.
    evaluations, checkpoints: done, with their time in phases "evaluate" and "checkpoint".
    """

    wall_ns: int = 0
    steps: int = 0
    windows: int = 0
    phases: Mapping[str, int] = field(default_factory=dict)
    gc_ns: int | None = None
    gc_count: int = 0
    gc_max_ns: int = 0
    evaluations: int = 0
    checkpoints: int = 0
    recompiles: int = 0

    def share(self, phase: str) -> float:
        """Of wall time, 0..1."""
        return self.phases.get(phase, 0) / self.wall_ns if self.wall_ns else 0.0


@dataclass(frozen=True, slots=True)
class CoreUse:
    """Processor time over the newest samples, in cores: of all processes, of this run with its loader processes, of
    others (never below 0); usable: what this run may use. samples: how many it is the mean of. neighbours: the
    busiest other processes, (pid, name, cores) each, the busiest first; () where none was looked for.
    throttled: share of time in which the control group's quota held this run up, None where that is not known.
    """

    used: float
    own: float
    others: float
    usable: float
    samples: int
    neighbours: tuple[tuple[int, str, float], ...] = ()
    throttled: float | None = None


@dataclass(frozen=True, slots=True)
class Idle:
    """How much of wall time nothing was computed. share in 0..1.

    method: "kernels" (a profiler burst: exact), "events", "nvml", and without a card "operators" (a burst) or "host".
    causes: (cause, share) in order of the screen; they add up to `share` except with method "nvml" (no causes).
    step: the optimizer step at which a burst was taken, None for what is measured all the time.
    """

    share: float | None
    method: str
    causes: tuple[tuple[str, float], ...]
    reason: str = ""
    step: int | None = None


@dataclass(frozen=True, slots=True)
class Headroom:
    """What can still be allocated. fits_micro: largest micro-batch predicted to fit (a prediction), or null."""

    free_bytes: int | None
    total_bytes: int | None
    used_bytes: int | None
    others_bytes: int | None
    peak_bytes: int | None
    fits_micro: int | None
    kind: str  # "card" or "host"


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One evaluation: step, metrics by name, seconds."""

    step: int
    metrics: dict[str, float]
    seconds: float | None


@dataclass(frozen=True, slots=True)
class TimedMark:
    """A mark with its time (unix seconds)."""

    t: float
    mark: MarkEvent


@dataclass(frozen=True, slots=True)
class TimeLeft:
    """How long the run still takes by its own measured times, pauses left out; see record.timeleft.

    seconds: None before the first steps. evaluations, checkpoints: how many are still to come; *_s: mean measured
    seconds of one, None while none was measured, and then `seconds` is without them.
    """

    seconds: float | None = None
    evaluations: int = 0
    evaluation_s: float | None = None
    checkpoints: int = 0
    checkpoint_s: float | None = None

    @property
    def without(self) -> tuple[str, ...]:
        """What is to come and not in `seconds`, because none was measured yet."""
        missing = (
            ("evaluations", self.evaluations, self.evaluation_s),
            ("checkpoints", self.checkpoints, self.checkpoint_s),
        )
        return tuple(name for name, count, mean in missing if count and mean is None)


@dataclass(frozen=True, slots=True)
class Throughput:
    """What the steps achieve, against the published dense peak of the card.

    flops_per_s: counted FLOPs over measured time. mfu: its share of the peak (0..1), the model FLOPs utilization.
    intensity: FLOPs for each byte that operations move without fusion (a lower bound); ridge: the intensity above
    which the card's arithmetic and no longer its memory is the limit. reason: why mfu and ridge are missing.
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
        """The side of the roofline's ridge: "compute" or "bandwidth"; None when it is not known."""
        if self.intensity is None or self.ridge is None:
            return None
        return "compute" if self.intensity >= self.ridge else "bandwidth"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The newest state of a run. Rates are per second of training time (pauses excluded); None = not known yet.

    step means optimizer step; micro_steps: forward and backward passes in one, step_ns: nanoseconds of one.
    memory_trend: (step, bytes) allocated on the card, or resident in this process without one.
    """

    run: RunEvent | None
    status: str
    stage: str
    reason: str
    end: EndEvent | None
    started_t: float | None
    t: float | None
    step: int
    epoch: int
    epoch_step: int
    items: int
    tokens: int
    step_ns: float | None
    steps_per_s: float | None
    items_per_s: float | None
    tokens_per_s: float | None
    left: TimeLeft
    elapsed_s: float
    phases: tuple[PhaseShare, ...]
    idle: Idle
    headroom: Headroom
    loss: float | None
    lr: float | None
    grad_norm: float | None
    loss_scale: float | None
    evaluations: tuple[Evaluation, ...]
    best: Evaluation | None
    checkpoint: TimedMark | None
    sample: SampleEvent | None
    memory: MemoryEvent | None
    loss_trend: tuple[tuple[int, float], ...]
    rate_trend: tuple[tuple[int, float], ...]
    marks: tuple[TimedMark, ...]
    warnings: int
    dropped_events: int = 0
    preparing_t: float | None = None
    settings: tuple[SettingEvent, ...] = ()
    work: WorkEvent | None = None
    throughput: Throughput = Throughput()
    micro_steps: float | None = None
    totals: Totals = Totals()
    loader: LoaderEvent | None = None
    baseline: BaselineEvent | None = None
    kernels: KernelsEvent | None = None
    stacks: StacksEvent | None = None
    cores: CoreUse | None = None
    memory_trend: tuple[tuple[int, float], ...] = ()
    trials: tuple[TrialEvent, ...] = ()

    @property
    def final(self) -> bool:
        """Nothing more will come."""
        return self.status in FINAL

    @property
    def eta_s(self) -> float | None:
        """Seconds left, None while nothing is known; `left` says what is in it."""
        return self.left.seconds

    @property
    def epoch_s(self) -> float | None:
        """Seconds of training in one epoch at the measured step time, without evaluation and checkpoints."""
        if self.run is None or self.step_ns is None or not self.run.steps_per_epoch:
            return None
        return self.run.steps_per_epoch * self.step_ns * 1e-9

    @property
    def progress(self) -> float:
        """Share of the run done, 0..1."""
        total = self.run.total_steps if self.run else 0
        return min(self.step / total, 1.0) if total else 0.0

    @property
    def card(self) -> dict[str, Any] | None:
        """Newest card counters, or None."""
        return self.sample.card if self.sample else None

    @property
    def host(self) -> dict[str, Any] | None:
        """Newest host counters, or None."""
        return self.sample.host if self.sample else None
