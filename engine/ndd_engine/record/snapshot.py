"""What anyone ever sees of a run: one frozen value, folded from events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .events import EndEvent, MarkEvent, MemoryEvent, RunEvent, SampleEvent, SettingEvent, WorkEvent

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
    """

    name: str
    host_ns: float
    share: float
    p50_ns: int | None
    p95_ns: int | None
    max_ns: int | None
    device_ns: float | None


@dataclass(frozen=True, slots=True)
class Idle:
    """How much of wall time nothing was computed. method: "events", "nvml" or "host". share in 0..1.

    causes: (cause, share) in order of the screen; they add up to `share` except with method "nvml" (no causes).
    """

    share: float | None
    method: str
    causes: tuple[tuple[str, float], ...]
    reason: str = ""


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
class Snapshot:
    """The newest state of a run. Rates are per second of training time (pauses excluded); None = not known yet."""

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
    eta_s: float | None
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

    @property
    def final(self) -> bool:
        """Nothing more will come."""
        return self.status in FINAL

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
